"""Training state of members outside of any lane: a saved fleet keeps it, and a later lane takes it over."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modelfleet.errors import FleetWarning
from modelfleet.frameworks.stacked import CARRIED, fitting
from modelfleet.lanes.lane import COUNTS, Lane
from modelfleet.trees import map_tree
from modelfleet.types import State, Tensor


@dataclass(frozen=True)
class TrainingState:
    """Optimizer state, steps and epochs of some members.

    A loaded fleet has one for each member, until the member is in a lane that trains.
    """

    state: State
    """Tensors `(member, …)` of the parts `CARRIED`, as the adapter's `files` write and read them."""
    steps: np.ndarray
    """Steps taken, `(member,)`."""
    epochs: np.ndarray
    """Epochs finished, `(member,)`; shuffles depend on them."""

    def row(self, row: int) -> "TrainingState":
        """Return the state of one of the members."""
        own = slice(row, row + 1)
        return TrainingState(map_tree(lambda tensor: tensor[own], self.state), self.steps[own], self.epochs[own])

    @property
    def form(self) -> tuple[tuple[str, str, tuple[int, ...], str], ...]:
        """Return a key that is equal for states that can be joined."""
        return tuple(
            (part, name, tuple(tensor.shape[1:]), str(tensor.dtype))
            for part, own in sorted(self.state.items())
            for name, tensor in sorted(own.items())
        )


def read(lane: Lane, names: Sequence[str]) -> list[tuple[list[str], TrainingState]]:
    """Return a copy of the training state of some members of a lane, those of one form together."""
    return [
        (own, _training_state(found, tensors))
        for some, tensors in _by_optimizer(lane, names)
        for own, found in lane.read_apart(some, (*CARRIED, COUNTS))
    ]


def _training_state(found: State, tensors: Collection[str] | None) -> TrainingState:
    own = {**CARRIED, "optimizer": tensors}
    state = {
        part: {name: tensor for name, tensor in found.get(part, {}).items() if chosen is None or name in chosen}
        for part, chosen in own.items()
    }
    return TrainingState(state, **found[COUNTS])


def _by_optimizer(lane: Lane, names: Sequence[str]) -> list[tuple[list[str], Collection[str] | None]]:
    """Return some members together with the names of the tensors that their optimizer has; None for all."""
    found: dict[frozenset[str] | None, list[str]] = {}
    for name in names:
        tensors = lane.engine.optimizer_tensors(lane.positions[name])
        found.setdefault(None if tensors is None else frozenset(tensors), []).append(name)
    return [(own, tensors) for tensors, own in found.items()]


def write(lane: Lane, states: Mapping[str, TrainingState]) -> None:
    """Give each of some members of a lane its training state, as far as it fits.

    If a member's optimizer has a different state now, the optimizer starts from the beginning.
    """
    arrays = lane.members[0].framework.arrays
    by_form: dict[object, list[str]] = {}
    for name, one in states.items():
        by_form.setdefault(one.form, []).append(name)
    for alike in by_form.values():
        for some, tensors in _by_optimizer(lane, alike):
            for names in lane.by_width(some):
                _write(lane, names, tensors, join([states[name] for name in names], arrays.concatenate))


def _write(lane: Lane, names: Sequence[str], tensors: Collection[str] | None, joined: TrainingState) -> None:
    arrays = lane.members[0].framework.arrays
    ((_, own),) = lane.read_apart(names[:1], CARRIED)
    ours = own.get("optimizer", {}).keys() if tensors is None else tensors
    theirs = joined.state.get("optimizer", {}).keys()
    if theirs and not (theirs <= set(ours) or set(ours) <= theirs):
        listed = ", ".join(map(repr, names))
        warnings.warn(
            f"the saved optimizer state of {listed} does not fit the optimizer, which starts from the "
            f"beginning. Compile with the optimizer that was saved to keep its state.",
            FleetWarning,
            stacklevel=3,
        )
        return
    fits = map_tree(arrays.host, fitting(joined.state, own, parts={**CARRIED, "optimizer": ours}))
    lane.write(names, {**fits, COUNTS: {"steps": joined.steps, "epochs": joined.epochs}})


def join(states: Sequence[TrainingState], concatenate: Callable[[list[Tensor]], Tensor]) -> TrainingState:
    """Return states of one form as one, in their order."""
    if len(states) == 1:
        return states[0]
    state = {
        part: {name: concatenate([one.state[part][name] for one in states]) for name in own}
        for part, own in states[0].state.items()
    }
    steps, epochs = (np.concatenate([getattr(one, name) for one in states]) for name in ("steps", "epochs"))
    return TrainingState(state, steps, epochs)
