"""Batches: the rows of a step, as feeds make them and engines take them."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tensor, Tree


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one step for the members of a lane, or of several steps of one size."""

    data: Tree
    """A tree of tensors. Each leaf is `(member, row, …)`, or `(row, …)` if shared. A step axis comes before these
    if the batch holds several steps."""
    shared: bool
    """True if all members see the same rows. The leaves then have no member axis."""
    counts: np.ndarray
    """`(member,)`: the number of real rows of each member, which come before its padding. With 0 the member sits
    the step out."""
    steps: int | None = None
    """Number of steps if the leaves have a step axis, otherwise None."""
    others: "tuple[Batch, ...]" = ()
    """Batches of the same step for other members, whose rows have other shapes."""
    weights: Tensor | None = None
    """`(member, row)`: 1 for a real row, 0 for padding. None if no row has to be weighted."""
    slots: np.ndarray | None = None
    """Slots of the members that the batch is for; None if it is for all slots."""

    @property
    def by_shape(self) -> "tuple[Batch, ...]":
        """This batch and the others of its step: one for every shape of rows."""
        return (self, *self.others)

    @cached_property
    def size(self) -> int:
        """Number of rows of every leaf, padding included."""
        return int(leaves(self.data)[0].shape[(not self.shared) + (self.steps is not None)])

    @cached_property
    def full(self) -> bool:
        """True if no row of any member is padding."""
        return bool((self.counts == self.size).all())

    def step(self, number: int) -> "Batch":
        """Return one of the steps of a batch that holds several."""
        data, weights = map_tree(lambda leaf: leaf[number], (self.data, self.weights))
        return replace(self, data=data, weights=weights, steps=None)

    def member(self, index: int) -> Tree:
        """Return the rows `(row, …)` of one member of a batch that holds one step."""
        return self.data if self.shared else map_tree(lambda leaf: leaf[index], self.data)

    def fewest_rows(self) -> tuple[int, int]:
        """Return the index of the member with the fewest real rows, but at least one, and their number."""
        index = int(np.where(self.counts > 0, self.counts, self.size + 1).argmin())
        return index, int(self.counts[index])
