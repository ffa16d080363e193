"""A board on which every rank marks the operation it is at, for the owner to read when something is wrong."""

import os
from collections.abc import Callable
from typing import NamedTuple

from modelfleet.workers import pickling, shared_memory
from modelfleet.workers.channel import above_standard

_NUMBERS = 4  # per rank: the schedule, the step and the operation, all counted from 1, and whether it waits


class Position(NamedTuple):
    """What a rank is at. All numbers are -1 before the first operation."""

    schedule: int
    """Which of the verb's schedules it follows."""
    step: int
    """How many steps it has finished that followed this schedule."""
    operation: int
    """Which of its operations in the schedule it is at."""
    waiting: int = 0
    """1 while it waits for another rank."""


class Board:
    """Positions of all ranks, in memory that processes of one machine share. They outlive the processes."""

    def __init__(self, ranks: int, descriptor: int | None = None) -> None:
        self._ranks = ranks
        size = max(64, 8 * _NUMBERS * ranks)
        self._descriptor = shared_memory.create(size) if descriptor is None else descriptor
        self._cells: memoryview[int] = shared_memory.map_memory(self._descriptor, size).cast("Q")

    def mark(self, rank: int, position: Position) -> None:
        """Note where a rank is. It does not wait."""
        for index, number in enumerate(position[:3]):
            self._cells[_NUMBERS * rank + index] = number + 1
        self._cells[_NUMBERS * rank + 3] = 0

    def mark_waiting(self, rank: int, waiting: bool) -> None:
        """Note that a rank waits for another one, or has got what it waited for."""
        self._cells[_NUMBERS * rank + 3] = int(waiting)

    def read(self, rank: int) -> Position:
        """Return where a rank is."""
        schedule, step, operation, waiting = self._cells[_NUMBERS * rank : _NUMBERS * (rank + 1)]
        return Position(schedule - 1, step - 1, operation - 1, waiting)

    def close(self) -> None:
        """Close this process's descriptor. The memory stays as long as anybody maps it."""
        if self._descriptor >= 0:
            shared_memory.close_descriptors([self._descriptor])
            self._descriptor = -1

    def __reduce__(self) -> tuple[Callable[..., "Board"], tuple[int, int]]:
        return _unpickled, (self._ranks, pickling.attach_descriptor(self._descriptor))


def _unpickled(ranks: int, index: int) -> Board:
    return Board(ranks, above_standard(os.dup(pickling.attached_descriptor(index))))
