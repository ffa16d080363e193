"""Measured speed of each replica, and how many rows it should therefore take."""

import math
from collections.abc import Collection

NEWEST_WEIGHT = 0.3  # of the newest batch. The moving average forgets a first batch that had to compile.


class Speeds:
    """Rows per second by replica, as a moving average over its batches."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}

    def record(self, replica: str, rows: int, seconds: float) -> None:
        """Update a replica's speed with a batch."""
        speed = rows / max(seconds, 1e-6)
        self._speeds[replica] = self._speeds.get(replica, speed) * (1 - NEWEST_WEIGHT) + speed * NEWEST_WEIGHT

    def fair_rows(self, replica: str, live: Collection[str], rows: int) -> int | None:
        """Return how many of `rows` a replica should take, rounded up; None if a live one's speed is unknown."""
        if any(name not in self._speeds for name in live):
            return None
        fraction = self._speeds[replica] / math.fsum(self._speeds[name] for name in live)
        return math.ceil(rows * fraction - 1e-9)  # a third of 3 is 1, even after rounding

    def total(self, live: Collection[str]) -> float | None:
        """Return the rows per second of all live replicas; None if no speed is known.

        A replica whose speed is unknown counts as the mean of the others.
        """
        known = [self._speeds[name] for name in live if name in self._speeds]
        return math.fsum(known) / len(known) * len(live) if known else None
