"""Combining that needs all members' values of a row at once: the median, and functions of the user."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from modelfleet.ensembles.parts import Answer, Outputs, narrow, refuse_unlike, wide
from modelfleet.errors import InputError
from modelfleet.trees import leaves, map_tree, map_trees
from modelfleet.types import Tree

Function = Callable[[np.ndarray], np.ndarray]
"""Takes the values `(member, row, …)` of all members, and returns `(row, …)`."""


@dataclass(frozen=True)
class Whole:
    """A function of all members' values.

    Args:
        function: The function; None for the median.
        std: Compute the standard deviation over the members, too.
        names: All members, in the order in which the function gets them.
    """

    function: Function | None
    std: bool
    names: tuple[str, ...] = field(repr=False)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.names)}

    def answer(self, outputs: Sequence[Outputs]) -> Answer:
        """Return the answer of all members for some rows.

        Raises:
            InputError: Members' outputs differ in structure or shape, or some have no outputs for these rows.
        """
        first = outputs[0]
        for other in outputs[1:]:
            refuse_unlike(first.names[0], _of_one(first), other.names[0], _of_one(other))
        given = [self._positions[name] for own in outputs for name in own.names]
        if len(given) < len(self.names):
            late = next(name for place, name in enumerate(self.names) if place not in set(given))
            raise InputError(
                f"member {late!r} has fewer rows than {first.names[0]!r}. An ensemble needs every member's output "
                f"for the same rows: give all members equally many."
            )
        order = np.argsort(given)
        tree = map_trees(lambda found: np.concatenate(found)[order], [own.tree for own in outputs])
        return Answer(map_tree(self._combined, tree), map_tree(_deviation, tree) if self.std else None)

    def _combined(self, values: np.ndarray) -> np.ndarray:
        if self.function is None:
            return np.median(values.astype(wide(values.dtype, "the median"), copy=False), axis=0).astype(
                narrow(values.dtype)
            )
        found = np.asarray(self.function(values))
        if found.ndim == 0 or len(found) != values.shape[1]:
            raise InputError(
                f"the function given as combine returned {found.shape} for values {values.shape} of (member, row, "
                f"…). Return one answer for each of the {values.shape[1]} rows: reduce axis 0."
            )
        return found


def _of_one(outputs: Outputs) -> Tree:
    """Return the outputs of the first member."""
    return map_tree(lambda leaf: leaf[0], outputs.tree)


def _deviation(values: np.ndarray) -> np.ndarray:
    found = values.astype(wide(values.dtype, "the standard deviation"), copy=False).std(axis=0)
    return found.astype(np.empty(0, narrow(values.dtype)).real.dtype)


def share_of(outputs: Sequence[Outputs], rank: int, size: int) -> list[Outputs]:
    """Return the outputs for the rows that a rank of several combines. It may have none."""
    found = []
    for own in outputs:
        start, end = own.rows * rank // size, own.rows * (rank + 1) // size
        found.append(own.only(slice(start, end)))
    return [own for own in found if own.rows and leaves(own.tree)]
