"""Lanes in worker processes: a few lanes in each.

The lanes of this process stand for those in the workers. At the end of every epoch a worker tells its lanes' state;
so when it dies, what was computed up to then is here.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from modelfleet.history import Failure
from modelfleet.sharing import crew
from modelfleet.sharing.shifts import Ended, Moment, Report, Shift, Stepped, Way
from modelfleet.workers import WorkerDiedError
from modelfleet.workers.process import ProcessWorker, hire, release

OrderOf = Callable[[Sequence[Shift]], crew.Order]


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


def processes(order_of: OrderOf, most: int, shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    """Run the lanes in at most so many workers; one that dies fails its members, and the rest go on.

    Lanes of later waves follow when the earlier ones are done, in new orders.
    """
    waves = sorted({shift.lane.part.wave for shift in shifts})
    for wave in waves:
        own = [shift for shift in shifts if shift.lane.part.wave == wave and shift.working]
        if own and not way.stopped():
            yield from _wave(order_of, most, own, way)


def _wave(order_of: OrderOf, most: int, shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    crews = [_Away(part) for part in _dealt(shifts, most)]
    try:
        env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(crews)))}
        for away in crews:
            order = replace(order_of(away.shifts), together=way.together, watched=way.watched)
            away.start(order, env)
        yield from _listen(crews, way)
        for away in crews:
            for shift in away.shifts:
                shift.pull()
    finally:
        for away in crews:
            away.end()


def _listen(crews: Sequence["_Away"], way: Way) -> Iterator[Moment]:
    running = {away.worker: away for away in crews}
    held: list[tuple[_Away, list[tuple[Shift, Report]]]] = []  # who waits for the others at an epoch's end
    interrupted = False
    while running:
        for worker in ProcessWorker.wait(
            [worker for worker in running if all(away.worker is not worker for away, _ in held)]
        ):
            away = running[worker]
            if way.stopped() and not interrupted:
                interrupted = True
                for other in running:
                    other.interrupt()
            try:
                more, told = worker.receive()
            except WorkerDiedError as error:
                del running[worker]
                held.append((away, away.buried(str(error))))
                continue
            if not more:
                del running[worker]
                continue
            reports, stepped = away.heard(told)
            if stepped is not None:
                yield Stepped(stepped, 1)
            if reports and way.together:
                held.append((away, reports))
            elif reports:
                yield Ended(reports)
                away.answer()
            else:
                away.answer()
        waiting = {id(away) for away, _ in held}
        if held and (not way.together or all(id(away) in waiting for away in running.values())):
            yield Ended([pair for _, reports in held for pair in reports])
            for away, _ in held:
                if away.worker in running:
                    away.answer()
            held.clear()


class _Away:
    """The lanes of one worker."""

    def __init__(self, shifts: Sequence[Shift]) -> None:
        self.shifts = list(shifts)
        self.worker: ProcessWorker
        self._hired = False
        for shift in shifts:
            shift.away = Away()

    def start(self, order: crew.Order, env: Mapping[str, str]) -> None:
        """Hire a worker and have it begin."""
        self.worker = hire(env, order.fleet)
        self._hired = True
        self.worker.last = order.fleet
        self.worker.start(crew.work, order, f"members {', '.join(map(repr, order.job.names))} with their data")

    def heard(self, told: crew.Told) -> tuple[list[tuple[Shift, Report]], Shift | None]:
        """Take in what was told: the reports, and the lane that took a turn."""
        reports, stepped = [], None
        for number, tensors, standing, report in told.lanes:
            shift = self.shifts[number]
            away = _away(shift)
            away.tensors = {name: np.array(array) for name, array in tensors.items()}  # what came is soon gone
            away.seen = False
            shift.lane.steps[:] = standing.lane["steps"]
            shift.lane.epochs[:] = standing.lane["epochs"]
            shift.schedules.restore(standing.schedules)
            moved = standing.position != shift.position
            shift.epoch, shift.position = standing.epoch, standing.position
            if report is None:
                stepped = shift if moved else stepped
                continue
            shift.lane.paced(report.steps, report.seconds, first=report.epoch == 1)
            shift.lane.rest([shift.lane.places[name] for name in report.failures], failed=True)
            reports.append((shift, report))
        return reports, stepped

    def answer(self) -> None:
        """Let the worker go on, with what was decided here."""
        stopped: dict[int, list[str]] = {}
        changed: dict[int, crew.Tensors] = {}
        for number, shift in enumerate(self.shifts):
            away = _away(shift)
            stopped[number], away.stopped = away.stopped, []
            if away.changed:
                changed[number] = shift.lane.tensors()
                away.changed = False
        self.worker.answer(crew.Answer(stopped, changed))

    def buried(self, reason: str) -> list[tuple[Shift, Report]]:
        """The reports of a worker that has died: its members have failed."""
        reports = []
        for shift in self.shifts:
            failures = {
                name: Failure(
                    shift.epoch + 1, int(shift.lane.steps[place] - shift.started[place]) + 1, f"{reason}"
                )
                for name, place in shift.lane.places.items()
                if shift.lane.on()[place]
            }
            shift.lane.rest([shift.lane.places[name] for name in failures], failed=True)
            if failures:
                reports.append((shift, Report(shift.epoch + 1, {}, failures, 0, 0.0)))
        return reports

    def end(self) -> None:
        """Give back the worker."""
        if self._hired:
            release(self.worker)
        for shift in self.shifts:
            shift.away = None


def _dealt(shifts: Sequence[Shift], most: int) -> list[list[Shift]]:
    """The lanes dealt out to at most so many hands, the longest first, each to whoever has least."""
    hands: list[list[Shift]] = [[] for _ in range(max(1, min(most, len(shifts))))]
    loads = [0.0 for _ in hands]
    for shift in sorted(shifts, key=_work, reverse=True):
        least = loads.index(min(loads))
        hands[least].append(shift)
        loads[least] += _work(shift)
    return hands


def _work(shift: Shift) -> float:
    steps = 1.0 if shift.known_steps is None else float((shift.known_steps * shift.epochs).max())
    return steps * (shift.lane.seconds_per_step or 1.0)


def _away(shift: Shift) -> Away:
    assert shift.away is not None
    return shift.away
