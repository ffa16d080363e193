"""What a rank measured of its operations: their mean over the steps of a run."""

from dataclasses import dataclass

from modelfleet.schedules import Event, Operation


@dataclass
class _Sums:
    operation: Operation
    start: float = 0.0
    end: float = 0.0
    waited: float = 0.0
    moved: int = 0


class Recorder:
    """Adds up the times of a rank's operations in the steps on whole batches.

    The first step of a schedule, which warms up, counts only if it is the only one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sums: dict[str, list[_Sums]] = {}
        self._steps: dict[str, int] = {}
        self._last = -1

    def add(
        self, schedule: str, index: int, operation: Operation, start: float, end: float, waited: float, moved: int
    ) -> None:
        """Add one operation of a step that follows a schedule."""
        if index == 0:
            self._steps[schedule] = steps = self._steps.get(schedule, 0) + 1
            if steps <= 2:
                self._sums[schedule] = []
        own = self._sums[schedule]
        if len(own) <= index:
            own.append(_Sums(operation))
        sums = own[index]
        sums.start += start
        sums.end += end
        sums.waited += waited
        sums.moved = moved

    def events(self, schedule: str) -> list[Event]:
        """Return the mean of every operation, by this process's clock."""
        steps = max(1, self._steps.get(schedule, 0) - 1)
        return [
            Event(self._rank, one.operation, one.start / steps, one.end / steps, one.waited / steps, one.moved)
            for one in self._sums.get(schedule, [])
        ]
