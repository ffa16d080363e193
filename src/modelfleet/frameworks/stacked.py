"""Stacked state of a lane's members, and the two methods that move it: `read` and `write`.

A state is a dict of parts, each a dict of tensors by name. Every tensor has the member as its first axis:

    params      trained weights
    frozen      weights that take no gradient
    buffers     running statistics, seeds and the like
    optimizer   the optimizer's state
    member      numbers of each member: step, trouble, seed, loss scale
    sums, metrics   sums for the metrics of the current epoch

An engine has those parts that its framework needs. Callers address members by their position in the lane. Only
this module knows which slot of the tensors a member has, and whether it has one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.types import State, Tensor, Tree

WEIGHTS = ("params", "frozen", "buffers")
PARTS = (*WEIGHTS, "optimizer", "member", "sums", "metrics")
CARRIED = {"optimizer": None, "member": ("step", "scale", "finite_steps")}
"""State that moves with a member to another engine, by part: the names, or None for all."""
Positions = Sequence[int] | np.ndarray
Given = Mapping[str, Mapping[str, Tensor | np.ndarray]]
"""A state to write: tensors, or NumPy arrays of them, by part and name."""

_PATHS = {"optimizer": "slots"}  # parts that have another name in checkpoints, which older ones have, too


class Tensors(Protocol):
    """Operations on a framework's tensors that a stacked state needs."""

    def rows(self, numbers: np.ndarray) -> Tensor:
        """Return row numbers as `take` and `put` want them."""
        ...

    def take(self, tree: Tree, rows: Tensor) -> Tree:
        """Return a copy of some rows of every tensor."""
        ...

    def put(self, tree: Tree, rows: Tensor, values: Tree) -> Tree:
        """Return the tensors with some rows replaced: the same tensors changed in place, or new ones."""
        ...

    def like(self, value: Tensor | np.ndarray, tensor: Tensor) -> Tensor:
        """Return a tensor, or an array that the adapter's `arrays.host` gave, with the dtype of another tensor."""
        ...

    def replace(self, tensor: Tensor, value: Tensor | np.ndarray) -> Tensor:
        """Return a tensor with all rows replaced: the same one changed in place, or a copy of the value."""
        ...


class StackedState:
    """Stacked state of a lane's members, of which some may rest.

    `parts` is the working state, which programs step. An engine may replace its tensors, or the whole dict. Slot n
    of every tensor belongs to the member at position `slots[n]`. Members without a slot rest: their state is
    stored separately until `give_slots` gives them one again.

    A state is allocated as a whole by the engine that makes it. So an engine may lay out all weights of a lane in
    one buffer and give views of it here.
    """

    def __init__(self, parts: State, members: int, tensors: Tensors) -> None:
        self.parts = parts
        self.members = members
        self.slots = np.arange(members)
        self._tensors = tensors
        self._resting: State | None = None  # of all members, with old values for those that have a slot

    @property
    def width(self) -> int:
        """Return the number of slots."""
        return len(self.slots)

    @property
    def rows(self) -> int:
        """Return the number of allocated rows, for members that step and for members that rest."""
        return self.width + (0 if self._resting is None else self.members)

    def read(self, positions: Positions, parts: Collection[str] | None = None, *, copy: bool = True) -> State:
        """Return a copy of the state of some members, `(member, …)` in the order of `positions`.

        Args:
            positions: Positions in the lane, with or without a slot.
            parts: Names of parts. Parts that this state does not have are left out. None for all.
            copy: False if the tensors are read at once and may be those of the working state.
        """
        positions, take, rows = np.asarray(positions, np.int64), self._tensors.take, self._tensors.rows
        slots = self._slots_of(positions)
        working = _chosen(self.parts, parts)
        if not copy and np.array_equal(slots, np.arange(self.width)):
            return working
        if self._resting is None or (slots >= 0).all():
            return take(working, rows(slots))
        found = take(_chosen(self._resting, parts), rows(positions))
        stepping = np.flatnonzero(slots >= 0)
        return self._put(found, stepping, take(working, rows(slots[stepping]))) if len(stepping) else found

    def write(self, positions: Positions, state: Given) -> None:
        """Replace the state of some members by part and name.

        Args:
            positions: Positions in the lane, with or without a slot.
            state: Tensors `(member, …)` in the order of `positions`, or NumPy arrays as the `host` of the
                adapter's `arrays` gives them. Names that this state does not have are ignored.
        """
        positions = np.asarray(positions, np.int64)
        slots = self._slots_of(positions)
        stepping, resting = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        if len(stepping):
            self.parts = self._put(self.parts, slots[stepping], state, stepping)
        if len(resting):
            assert self._resting is not None
            self._resting = self._put(self._resting, positions[resting], state, resting)

    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members, in this order. The others rest. If all have one, it is their position."""
        if self._resting is not None:
            self.parts = self._put(self._resting, self.slots, self.parts)
            self._resting, self.slots = None, np.arange(self.members)
        if len(positions) < self.members:
            self.slots = np.asarray(positions, np.int64)
            self._resting = self.parts
            self.parts = self._tensors.take(self.parts, self._tensors.rows(self.slots))

    def moved(self, move: Callable[[Tensor], Tensor], tensors: Tensors) -> "StackedState":
        """Return this state with every tensor moved, and the operations for where they are then."""
        found = StackedState(_mapped(lambda one, _: move(one), self.parts, self.parts), self.members, tensors)
        found.slots = self.slots
        if self._resting is not None:
            found._resting = _mapped(lambda one, _: move(one), self._resting, self._resting)
        return found

    def _slots_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the slot of each position, or -1 for a member that rests."""
        found = np.full(self.members, -1)
        found[self.slots] = np.arange(self.width)
        return found[positions]

    def _put(
        self,
        whole: State,
        rows: np.ndarray,
        state: Given,
        chosen: np.ndarray | None = None,
    ) -> State:
        """Return a state with some rows replaced by the rows of another state, or by its chosen rows."""
        state = {
            part: {name: tensor for name, tensor in tensors.items() if name in whole.get(part, {})}
            for part, tensors in state.items()
        }
        old = {part: {name: whole[part][name] for name in own} for part, own in state.items()}
        given, length = _length(state), _length(whole)
        if chosen is not None and len(chosen) == given:
            chosen = None
        if chosen is None and np.array_equal(rows, np.arange(length)):
            put = _mapped(self._tensors.replace, old, state)
        else:
            new = _mapped(lambda tensor, value: self._tensors.like(value, tensor), old, state)
            if chosen is not None:
                new = self._tensors.take(new, self._tensors.rows(chosen))
            put = self._tensors.put(old, self._tensors.rows(rows), new)
        if all(whole[part][name] is tensor for part, own in put.items() for name, tensor in own.items()):
            return whole  # changed in place: the same object, by which programs know their arguments
        return {**whole, **{part: {**whole[part], **tensors} for part, tensors in put.items() if part in whole}}


def fitting(state: State, own: State, *, parts: Mapping[str, Collection[str] | None]) -> State:
    """Return those tensors of a state that another state has in the same shape.

    Args:
        state: The state to choose from.
        own: The state that has to take it.
        parts: By part, the names that may be taken; None for all of the part.
    """
    return {
        part: {
            name: tensor
            for name, tensor in state.get(part, {}).items()
            if (names is None or name in names)
            and name in own.get(part, {})
            and tuple(own[part][name].shape[1:]) == tuple(tensor.shape[1:])
        }
        for part, names in parts.items()
    }


def runs(numbers: np.ndarray) -> list[tuple[int, int, int]]:
    """Return neighbours that have the same number: the number, the first index, and the index after the last."""
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return [(int(numbers[start]), start, stop) for start, stop in pairwise(starts)]


def by_path(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state by the paths that checkpoints have: `params/0.weight`."""
    return {f"{_PATHS.get(part, part)}/{name}": t for part, own in state.items() for name, t in own.items()}


def by_part(tensors: Mapping[str, Tensor]) -> State:
    """Return tensors by path as a state that has every part. Undoes `by_path`."""
    parts = {path: part for part, path in _PATHS.items()}
    state: State = {part: {} for part in PARTS}
    for path, tensor in tensors.items():
        first, _, name = path.partition("/")
        state.setdefault(parts.get(first, first), {})[name] = tensor
    return state


def _mapped(function: Callable[[Tensor, Tensor], Tensor], first: State, second: Given) -> State:
    """Return `function` of the tensors of two states with the same names."""
    return {
        part: {name: function(tensor, second[part][name]) for name, tensor in own.items()}
        for part, own in first.items()
    }


def _length(state: Given) -> int:
    return next((len(tensor) for own in state.values() for tensor in own.values()), 0)


def _chosen(state: State, parts: Collection[str] | None) -> State:
    return {part: dict(own) for part, own in state.items() if parts is None or part in parts}


def stack(states: Sequence[State], join: Callable[[list[Tensor]], Tensor]) -> State:
    """Return the states of single members as one, with `join` to stack tensors of one name."""
    return {
        part: {name: join([state[part][name] for state in states]) for name in own}
        for part, own in states[0].items()
    }


def with_all_names(states: Sequence[State], zeros: Callable[[Tensor], Tensor]) -> list[State]:
    """Return single members' states with the optimizer's tensors of all: zeros for those of another's optimizer.

    Raises:
        CannotFuseError: Two optimizers have tensors of the same name that can't be stacked.
    """
    known: dict[str, Tensor] = {}
    for state in states:
        for name, tensor in state["optimizer"].items():
            other = known.setdefault(name, tensor)
            if tuple(tensor.shape) != tuple(other.shape) or tensor.dtype != other.dtype:
                raise CannotFuseError(
                    f"the states of their optimizers have {name!r} in different shapes or dtypes"
                )
    empty = {name: zeros(tensor) for name, tensor in known.items()}
    return [{**state, "optimizer": {**empty, **state["optimizer"]}} for state in states]
