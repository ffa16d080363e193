"""The work of a worker process: some of a fleet's lanes, taking turns there."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import Device
from modelfleet.members import Member
from modelfleet.planning import supply
from modelfleet.planning.assembly import Assembly, Part
from modelfleet.recipe import Recipe
from modelfleet.sharing.interleaved import interleaved
from modelfleet.sharing.shifts import Ended, Report, Shift, Way
from modelfleet.workers import interrupted

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Standing:
    """Where a lane is in a fit, beside its tensors; in plain terms."""

    lane: dict[str, Any]
    schedules: Any
    epoch: int
    position: int
    begun: tuple[list[int], list[int], list[int]]
    """Of every member when the fit began: the epochs and steps it had, and the steps that had changed it."""

    @classmethod
    def of(cls, shift: Shift) -> "Standing":
        """Where a shift is."""
        begun = shift.epochs_before.tolist(), shift.started.tolist(), shift.taken.tolist()
        return cls(shift.lane.standing(), shift.schedules.state(), shift.epoch, shift.position, begun)


@dataclass(frozen=True)
class Order:
    """All that a worker needs to take the steps of some lanes."""

    fleet: str
    """Orders of one fleet trace their programs once."""
    members: list[tuple[str, Any, int, str]]
    """Name, model, seed and framework."""
    recipes: dict[str, Recipe | None]
    devices: tuple[Device, ...] | None
    parts: list[Part]
    job: supply.Job
    tensors: list[Tensors]
    """The state of every lane."""
    standings: list[Standing]
    randomness: Mapping[str, Any]
    together: bool = False
    watched: bool = False


@dataclass(frozen=True)
class Told:
    """What a worker tells: a turn that was taken (no report), the end of an epoch, or that it has stopped."""

    lanes: list[tuple[int, Tensors, Standing, Report | None]]
    """Of each lane its number, its state, where it stands, and its report."""


@dataclass(frozen=True)
class Answer:
    """What a worker is told before it goes on, by the lane's number."""

    stopped: dict[int, list[str]]
    changed: dict[int, Tensors]
    """The state of lanes that was changed since it was told."""


_assemblies: dict[str, Assembly] = {}


def work(order: Order) -> Generator[Told, Answer, None]:
    """Run the lanes of an order; tells every epoch's end, and waits for an answer."""
    crew = _Crew(order)
    side_by_side = supply.side_by_side(crew.lanes, order.job)
    way = Way(order.together, order.watched, interrupted, side_by_side, _indivisible)
    for shift in crew.shifts:
        shift.begin()
    for moment in interleaved(crew.shifts, way):
        if isinstance(moment, Ended):
            told = [crew.tell(shift, report) for shift, report in moment.reports]
        elif order.watched:
            told = [crew.tell(moment.shift, None)]
        else:
            continue
        answer = yield Told(told)
        crew.heed(answer, moment.reports if isinstance(moment, Ended) else [])
    for shift in crew.shifts:
        shift.close()
        shift.lane.engine.stop()
    yield Told([crew.tell(shift, None) for shift in crew.shifts])


def _indivisible(shift: Shift) -> None:
    raise AssertionError("lanes in workers are not cut in two")


class _Crew:
    def __init__(self, order: Order) -> None:
        if order.fleet not in _assemblies:
            _assemblies.clear()
            _assemblies[order.fleet] = Assembly(order.devices)
        assembly = _assemblies[order.fleet]
        members = [Member(name, model, seed, frameworks.adapter(f)) for name, model, seed, f in order.members]
        for framework in {id(m.framework): m.framework for m in members}.values():
            state = order.randomness.get(framework.NAME)
            if state is not None:
                framework.restore_randomness(state)
        studied = assembly.study(members, order.recipes, "train")
        self.lanes = [assembly.lane(studied, part) for part in order.parts]
        for lane, standing in zip(self.lanes, order.standings, strict=True):
            lane.epochs = np.array(standing.begun[0])  # what shuffles go by
        fed = supply.feeds(self.lanes, order.job)
        for lane, feed in fed:
            supply.check(lane, feed, order.job)
        self.shifts = supply.shifts(fed, order.job)
        self._numbers = {id(shift): number for number, shift in enumerate(self.shifts)}
        for shift, standing, tensors in zip(self.shifts, order.standings, order.tensors, strict=True):
            shift.lane.engine.load(tensors)
            shift.lane.take_up(standing.lane)
            _, started, taken = standing.begun
            shift.started, shift.taken = np.array(started), np.array(taken)
            shift.schedules.restore(standing.schedules)
            shift.epoch, shift.position = standing.epoch, standing.position
            shift.several = 1 if order.watched else shift.lane.engine.several

    def tell(self, shift: Shift, report: Report | None) -> tuple[int, Tensors, Standing, Report | None]:
        """A lane's state as it is now: the owner keeps it, whatever becomes of this worker."""
        return self._numbers[id(shift)], shift.lane.tensors(), Standing.of(shift), report

    def heed(self, answer: Answer, reports: list[tuple[Shift, Report]]) -> None:
        """Do as answered."""
        for number, tensors in answer.changed.items():
            # Copied: a framework may make an array its own without, and these are gone with the next answer.
            self.shifts[number].lane.engine.load({name: np.array(array) for name, array in tensors.items()})
        for shift, _ in reports:
            shift.leave(answer.stopped.get(self._numbers[id(shift)], []))
