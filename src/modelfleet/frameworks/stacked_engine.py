"""Engines whose members' tensors are stacked."""

from collections.abc import Collection

import numpy as np

from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.stacked import CARRIED, Given, Positions, StackedState, fitting
from modelfleet.types import State


class StackedEngine(Engine):
    """An engine that keeps its state in a `StackedState`."""

    stacked: StackedState

    @property
    def state(self) -> State:
        """Return the working state: the tensors that programs step, `(slot, …)`."""
        return self.stacked.parts

    @state.setter
    def state(self, parts: State) -> None:
        self.stacked.parts = parts

    @property
    def slots(self) -> np.ndarray:
        """Return `(slot,)`: the position of the member in each slot."""
        return self.stacked.slots

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state of some members, by part and name."""
        return self.stacked.read(positions, parts)

    def write(self, positions: Positions, state: Given) -> None:
        """Replace the state of some members by part and name."""
        self.stacked.write(positions, state)

    def adopt(self, positions: Positions, other: Engine, sources: Positions) -> None:
        """Copy optimizer state and step counts of some members from another engine, where the shapes fit."""
        parts = {part: names for part, names in CARRIED.items() if part not in self.parts_in_models}
        self.write(positions, fitting(other.read(sources, parts), self.state, parts=parts))

    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members from now on. The others rest."""
        self.stacked.give_slots(positions)
