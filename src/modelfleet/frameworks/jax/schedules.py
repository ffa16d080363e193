"""Schedules of JAX models are Optax's: they are part of the optimizer, and count its steps themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Schedules:
    """Nothing to do between the steps (see `protocol.Schedules`)."""

    by_step = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._columns: dict[str, np.ndarray] = {}

    def at(self, steps: np.ndarray) -> Mapping[str, np.ndarray]:
        """No hyperparameters that are not in the state."""
        return self._columns

    def end_epoch(self, values: Sequence[Mapping[str, float]]) -> None:
        """Optax's schedules go by steps alone."""

    def state(self) -> None:
        """All is in the optimizer's state."""

    def restore(self, state: None) -> None:
        """Nothing to take up."""
