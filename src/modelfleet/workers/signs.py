"""Signs of life: a few numbers in memory that a process and its owner share. They outlive the process."""

import time
from typing import Any

from modelfleet.workers import pieces
from modelfleet.workers.channel import SLICE

BEAT = 0.5  # seconds between two signs of life
_SIZE = 64  # bytes


class _Cell:
    """One of the numbers."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, signs: Any, kind: type) -> int:
        return signs._cells[self._place]

    def __set__(self, signs: Any, value: int) -> None:
        signs._cells[self._place] = value


class Signs:
    """What a process lets its owner see, whatever either of them is doing."""

    def __init__(self, descriptor: int) -> None:
        self._cells: Any = pieces.mapped(descriptor, _SIZE).cast("Q")

    @staticmethod
    def new() -> int:
        """A descriptor for both sides."""
        return pieces.new(_SIZE)

    beats = _Cell(0)
    """Counts up twice a second, from 1 on."""
    taken = _Cell(1)
    """How many answers it has begun with since it is there."""
    busy = _Cell(2)
    """1 while it is at something (computing, importing, loading), 0 while it waits for a message."""
    pong = _Cell(3)
    """The number of the last ping that it has heard."""


class Silence:
    """For how long a process has shown no sign of life, in this process's own running time."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._seen: Any = None
        self._looked = time.monotonic()

    def look(self, sign: Any) -> float:
        """The seconds for which the sign has been the same.

        Between two looks at most a slice is counted: this process may have been stopped itself, or busy.
        """
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._looked, SLICE) if sign == self._seen else 0.0
        self._seen, self._looked = sign, now
        return self._seconds
