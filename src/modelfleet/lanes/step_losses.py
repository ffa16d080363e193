"""Losses of single steps, which stay on the device until an epoch has ended."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from modelfleet.types import Tensor

CHUNK = 64  # tensors that are stacked at once


class StepLosses:
    """Losses of a lane's steps since they were last taken to the host."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor | np.ndarray, np.ndarray, np.ndarray]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def forget_after(self, length: int) -> None:
        """Forget everything that was added since there were so many: these steps were undone."""
        del self._steps[length:]

    def add(self, losses: Tensor | np.ndarray, columns: np.ndarray, positions: np.ndarray) -> None:
        """Add the losses of some steps.

        Args:
            losses: `(column,)` of one step, or `(step, column)` of several. They are not read yet.
            columns: The columns of members that took part.
            positions: The positions of these members in the lane.
        """
        self._steps.append((losses, columns, positions))

    def take(self, arrays: Any) -> dict[int, list[float]]:
        """Return the losses by the members' positions, and forget them.

        Args:
            arrays: The framework's functions of tensors (`Adapter.arrays`).
        """
        steps, self._steps = self._steps, []
        found: dict[int, list[float]] = {}
        for losses, (_, columns, positions) in zip(
            _on_host([step[0] for step in steps], arrays), steps, strict=True
        ):
            by_column = losses.reshape(-1, losses.shape[-1]).T.tolist()
            for column, position in zip(columns.tolist(), positions.tolist(), strict=True):
                found.setdefault(position, []).extend(by_column[column])
        return found


def _on_host(tensors: Sequence[Tensor | np.ndarray], arrays: Any) -> list[np.ndarray]:
    """Return tensors as NumPy arrays, with one copy for all of the same shape."""
    found: list[np.ndarray] = [np.empty(0)] * len(tensors)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_shape.setdefault(tuple(tensor.shape), []).append(number)
    for numbers in by_shape.values():
        own = [tensors[number] for number in numbers]
        if isinstance(own[0], np.ndarray):
            stacked = np.stack(own)
        else:
            chunks = [arrays.stack(own[start : start + CHUNK]) for start in range(0, len(own), CHUNK)]
            stacked = arrays.host(chunks[0] if len(chunks) == 1 else arrays.concatenate(chunks))
        for number, losses in zip(numbers, stacked, strict=True):
            found[number] = losses
    return found
