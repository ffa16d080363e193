"""How fast each replica is, and what follows from it."""

import math
from collections.abc import Collection

WEIGHT = 0.3  # of the newest batch. A moving average of rates forgets a first batch that had to compile.


class Rates:
    """Rows per second by replica, as a moving average over its batches."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def note(self, replica: str, rows: int, seconds: float) -> None:
        """Learn from a batch."""
        rate = rows / max(seconds, 1e-6)
        self._rates[replica] = self._rates.get(replica, rate) * (1 - WEIGHT) + rate * WEIGHT

    def share(self, replica: str, live: Collection[str], rows: int) -> int | None:
        """The part of `rows` that `replica` should do, rounded up; None if some live replica's rate is unknown."""
        if any(name not in self._rates for name in live):
            return None
        part = self._rates[replica] / math.fsum(self._rates[name] for name in live)
        return math.ceil(rows * part - 1e-9)  # 3 × a third is 1, not a hair more

    def total(self, live: Collection[str]) -> float | None:
        """Rows per second of all live replicas, the unknown ones as fast as the mean; None if all are unknown."""
        known = [self._rates[name] for name in live if name in self._rates]
        return math.fsum(known) / len(known) * len(live) if known else None
