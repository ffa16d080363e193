"""Engines whose members' tensors are stacked."""

from collections.abc import Collection

import numpy as np

from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.stacked import Positions, StackedState
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
    def positions(self) -> np.ndarray:
        """Return the positions of all members."""
        return self.stacked.positions

    @property
    def slots(self) -> np.ndarray:
        """Return `(slot,)`: the position of the member in each slot."""
        return self.stacked.slots

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state of some members, by part and name."""
        return self.stacked.read(positions, parts)

    def write(self, positions: Positions, state: State) -> None:
        """Replace the state of some members by part and name."""
        self.stacked.write(positions, state)

    def narrow(self, positions: np.ndarray) -> None:
        """Give slots only to these members from now on. The others rest."""
        self.stacked.narrow(positions)

    def widen(self) -> None:
        """Give every member its slot again."""
        self.stacked.widen()
