"""Lanes whose steps are taken by a worker, as their owner knows them.

The lanes of this process stand for those in the workers. At the end of every epoch a worker tells its lanes'
state; so when it dies, what was computed up to then is here, and another can go on with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from modelfleet.history import Failure
from modelfleet.sharing import crew
from modelfleet.sharing.shifts import Report, Shift, next_wave

Reports = list[tuple[Shift, Report]]


@dataclass
class Away:
    """What is known of a lane while its steps are taken in a worker."""

    tensors: crew.Tensors = field(default_factory=dict)
    """Its state, as it was told last."""
    seen: bool = True
    """Whether the lane here has that state."""
    changed: bool = False
    """Whether the lane here has tensors that the worker has not."""
    stopped: list[str] = field(default_factory=list)
    deaths: int = 0
    """Workers that have died on it since its last epoch ended."""


class Crew:
    """Lanes that one worker steps."""

    def __init__(self, shifts: Sequence[Shift], home: int) -> None:
        self.shifts = list(shifts)
        self.home = home
        """The number of the place that they were placed on."""
        self.failed_starts = 0
        for shift in shifts:
            shift.away = shift.away or Away()

    @property
    def work(self) -> float:
        """How much there is to do, to begin with those that have most."""
        return sum(work_of(shift) for shift in self.shifts)

    @property
    def working(self) -> bool:
        """Whether anybody is still training."""
        return any(shift.working for shift in self.shifts)

    @property
    def names(self) -> str:
        """Who they are, for errors."""
        return ", ".join(repr(name) for shift in self.shifts for name in shift.names)

    def sent(self) -> None:
        """Note that all is known to a worker that was ordered just now."""
        for shift in self.shifts:
            away = _away(shift)
            away.stopped, away.changed = [], False
        self._go_on()

    def heard(self, told: crew.Told, *, watched: bool) -> tuple[Reports, Shift | None]:
        """Take in what was told: the reports, and the lane that took a turn. `watched`: every turn is told."""
        reports, stepped = [], None
        # Copied: the arrays that came are gone with the next answer.
        randomness = {name: np.array(state) for name, state in told.randomness.items()}
        for number, tensors, standing, report in told.lanes:
            shift = self.shifts[number]
            away = _away(shift)
            away.tensors = {name: np.array(array) for name, array in tensors.items()}
            away.seen = False
            shift.busy = False
            shift.lane.steps[:] = standing.lane["steps"]
            shift.lane.epochs[:] = standing.lane["epochs"]
            shift.schedules.restore(standing.schedules)
            moved = standing.position != shift.position
            shift.epoch, shift.position = standing.epoch, standing.position
            if report is None:
                stepped = shift if moved else stepped
                continue
            away.deaths = 0
            shift.randomness = randomness
            shift.lane.paced(report.steps, report.seconds, first=report.epoch == 1)
            shift.lane.rest([shift.lane.places[name] for name in report.failures], failed=True)
            reports.append((shift, report))
        if watched and told.lanes:  # then what was told last of the others is how they are
            for shift in self.shifts:
                shift.busy = False
        return reports, stepped

    def answer(self) -> crew.Answer:
        """What was decided here, for the worker to go on with."""
        answer = crew.Answer()
        for number, shift in enumerate(self.shifts):
            away = _away(shift)
            answer.stopped[number], away.stopped = away.stopped, []
            if away.changed:
                answer.changed[number] = shift.lane.tensors()
                away.changed = False
        self._go_on()
        return answer

    def _go_on(self) -> None:
        for shift in next_wave(self.shifts):
            shift.busy = True

    def bereaved(self, reason: str, most: int) -> tuple[Reports, list["Crew"]]:
        """After a worker's death: the reports of lanes on which so many have died, and the others, each alone."""
        for shift in self.shifts:
            _away(shift).deaths += 1
            shift.busy = False
        lost = [shift for shift in self.shifts if _away(shift).deaths >= most]
        left = [shift for shift in self.shifts if shift.working and shift not in lost]
        return buried(lost, reason), [Crew([shift], self.home) for shift in left]


def buried(shifts: Sequence[Shift], reason: str) -> Reports:
    """The reports of lanes that nobody goes on with: their members have failed."""
    reports = []
    for shift in shifts:
        shift.busy = False
        failures = {
            name: Failure(shift.epoch + 1, int(shift.lane.steps[place] - shift.started[place]) + 1, reason)
            for name, place in shift.lane.places.items()
            if shift.lane.on()[place]
        }
        shift.lane.rest([shift.lane.places[name] for name in failures], failed=True)
        if failures:
            reports.append((shift, Report(shift.epoch + 1, {}, failures, 0, 0.0)))
    return reports


def work_of(shift: Shift) -> float:
    """How much a lane has to do: its seconds, if its pace is known, or else its steps."""
    steps = 1.0 if shift.known_steps is None else float((shift.known_steps * shift.epochs).max())
    return steps * (shift.lane.seconds_per_step or 1.0)


def _away(shift: Shift) -> Away:
    assert shift.away is not None
    return shift.away
