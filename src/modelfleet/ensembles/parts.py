"""Parts of an ensemble's answer: what some members say about some rows, in the size of one member's output."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from modelfleet.errors import InputError
from modelfleet.trees import leaves, map_tree, map_trees, paths
from modelfleet.types import Tree


@dataclass(frozen=True, eq=False)
class Outputs:
    """What some members of one lane say about a batch of rows."""

    names: tuple[str, ...]
    """The members."""
    tree: Tree
    """Arrays `(member, row, …)`."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return int(leaves(self.tree)[0].shape[1])

    def only(self, rows: slice) -> "Outputs":
        """Return the outputs for some of the rows."""
        return Outputs(self.names, map_tree(lambda leaf: leaf[:, rows], self.tree))

    def without(self, names: Collection[str]) -> "Outputs | None":
        """Return the outputs of the other members; None if there are none."""
        kept = [row for row, name in enumerate(self.names) if name not in names]
        if len(kept) == len(self.names):
            return self
        if not kept:
            return None
        return Outputs(tuple(self.names[row] for row in kept), map_tree(lambda leaf: leaf[kept], self.tree))


@dataclass(frozen=True, eq=False)
class Answer:
    """Combined outputs of some members for some rows."""

    output: Tree
    """Arrays `(row, …)`."""
    spread: Tree | None = None
    """The standard deviation over the members, or the share of the votes; None if it was not asked for."""


class LeafPart(Protocol):
    """One array of an output, reduced over some members."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape `(row, …)` that the array has in the output of one member."""
        ...


Leaf = TypeVar("Leaf", bound=LeafPart)


@dataclass(frozen=True, eq=False)
class Part:
    """What some members say about a batch of rows, reduced."""

    member: str
    """The first of the members, for errors."""
    members: int
    tree: Tree
    """One `LeafPart` for each array of an output."""


class Merging(Protocol):
    """A way to combine members of which some can be reduced first: parts can be merged in any order."""

    def part(self, outputs: Outputs) -> Part:
        """Return the part of some members."""
        ...

    def merged(self, one: Part, other: Part) -> Part:
        """Return the part of the members of both."""
        ...

    def answer(self, part: Part) -> Answer:
        """Return the answer of the members of a part."""
        ...


def merge_trees(merge: Callable[[Leaf, Leaf], Leaf], one: Part, other: Part) -> Part:
    """Return the part of the members of both, given how two arrays are merged.

    Raises:
        InputError: The members' outputs differ in structure or shape.
    """
    refuse_unlike(one.member, one.tree, other.member, other.tree)
    tree = map_trees(lambda found: merge(found[0], found[1]), [one.tree, other.tree])
    return Part(one.member, one.members + other.members, tree)


def refuse_unlike(first: str, one: Tree, second: str, other: Tree) -> None:
    """Raise InputError if the outputs of two members can't be combined. Leaves have shapes `(row, …)`."""
    ours, theirs = dict(paths(one)), dict(paths(other))
    if ours.keys() != theirs.keys():
        raise InputError(
            f"the outputs of members {first!r} and {second!r} can't be combined: {_listed(ours)} and "
            f"{_listed(theirs)}. An ensemble's members must return the same arrays; leave out one of them by "
            f"members=[...]."
        )
    for path, leaf in ours.items():
        shape = theirs[path].shape
        if leaf.shape[:1] != shape[:1]:
            raise InputError(
                f"members {first!r} and {second!r} have {leaf.shape[0]} and {shape[0]} rows in one batch. An "
                f"ensemble needs every member's output for the same rows: give all members equally many."
            )
        if leaf.shape != shape:
            what = f"{path} of the outputs" if path else "the outputs"
            raise InputError(
                f"{what} of members {first!r} and {second!r} can't be combined: their shapes are {leaf.shape} and "
                f"{shape}. An ensemble's members must return arrays of one shape; leave out one of them by "
                f"members=[...]."
            )


def _listed(found: dict[str, LeafPart]) -> str:
    return ", ".join(path or "one array" for path in found)


def weights_of(names: tuple[str, ...], weights: Mapping[str, float] | None) -> np.ndarray:
    """Return `(member,)`: the weights of some members, which are 1 if none were given."""
    return np.ones(len(names)) if weights is None else np.array([weights[name] for name in names])


def wide(dtype: np.dtype, what: str) -> np.dtype:
    """Return the dtype to add up numbers of a dtype in: float64, or complex128 for complex numbers.

    Raises:
        InputError: They are no numbers.
    """
    try:
        found = np.result_type(dtype, np.float64)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "fc":
        raise InputError(
            f"{what} needs numbers, and the members return {dtype}. Give models that return arrays of numbers."
        )
    return found


def narrow(dtype: np.dtype) -> np.dtype:
    """Return the dtype of a mean of numbers of a dtype, as NumPy has it."""
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype
