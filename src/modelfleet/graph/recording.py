"""What a rank measured of its operations: their mean over the steps of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelfleet.schedules import Event, Operation


@dataclass
class _Sums:
    operation: Operation
    start: float = 0.0
    end: float = 0.0
    waited: float = 0.0
    moved: int = 0


class Recorder:
    """Adds up the times of a rank's operations.

    The first step of a schedule, which warms up, counts only if alone.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sums: dict[str, dict[int, _Sums]] = {}
        self._steps: dict[str, int] = {}

    def begin(self, schedule: str) -> None:
        """Begin a step that follows a schedule."""
        self._steps[schedule] = steps = self._steps.get(schedule, 0) + 1
        if steps <= 2:
            self._sums[schedule] = {}

    def second(self, schedule: str) -> bool:
        """Return True in the second step of a schedule."""
        return self._steps[schedule] == 2

    def add(
        self, schedule: str, index: int, operation: Operation, start: float, end: float, waited: float
    ) -> None:
        """Add one operation of the step."""
        sums = self._sums[schedule].setdefault(index, _Sums(operation))
        sums.start += start
        sums.end += end
        sums.waited += waited

    def received(self, schedule: str, index: int, moved: int) -> None:
        """Note how many bytes a receive has brought. The operation that needs them is the one that waits."""
        self._sums[schedule][index].moved = moved

    def events(self, schedule: str) -> list[Event]:
        """Return the mean of every operation, by this process's clock."""
        steps = max(1, self._steps.get(schedule, 0) - 1)
        return [
            Event(self._rank, one.operation, one.start / steps, one.end / steps, one.waited / steps, one.moved)
            for one in self._sums.get(schedule, {}).values()
        ]


def by_one_clock(ranks: Sequence[Sequence[Event]]) -> list[Sequence[Event]]:
    """Return the events of ranks whose clocks differ, by the clock of the first rank.

    The last sum of a step ends at one moment for all ranks.
    """
    ends = [[event.end for event in own if event.operation.node == "step"] for own in ranks]
    if not all(ends):
        return list(ranks)
    shifts = [max(ends[0]) - max(own) for own in ends]
    return [
        [replace(event, start=event.start + shift, end=event.end + shift) for event in own]
        for own, shift in zip(ranks, shifts, strict=True)
    ]
