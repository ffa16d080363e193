"""Schedules of frameworks whose optimizers count their own steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class NoSchedules:
    """Schedules that have nothing to do between steps (see `adapter_protocol.Schedules`).

    The schedules of Keras and Optax are part of the optimizer: all they need is in its state.
    """

    by_step = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._columns: dict[str, np.ndarray] = {}

    def at(self, steps: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return no columns, always as the same object."""
        return self._columns

    def end_epoch(self, values: Sequence[Mapping[str, float]]) -> None:
        """Do nothing: these schedules depend on steps alone."""

    def state(self) -> None:
        """Return None: the optimizer's state holds everything."""

    def restore(self, state: None) -> None:
        """Do nothing."""
