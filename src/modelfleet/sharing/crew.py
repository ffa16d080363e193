"""The work of a worker: some of a fleet's lanes, taking turns there."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import Device, parse_devices
from modelfleet.each import Each
from modelfleet.errors import StrategyError
from modelfleet.frameworks import randomness as generators
from modelfleet.members import Member
from modelfleet.planning import supply
from modelfleet.planning.assembly import Assembly, Part
from modelfleet.recipe import Recipe
from modelfleet.sharing.interleaved import interleaved
from modelfleet.sharing.shifts import Ended, Report, Shift, Way
from modelfleet.workers import SharedValue, interrupted
from modelfleet.workers.rendezvous import Rendezvous

Tensors = dict[str, np.ndarray]
MEETING = 300.0  # seconds that workers which step together wait for each other: one of them may be compiling


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
    """The worker's device, or what it may choose from."""
    parts: list[Part]
    job: supply.Job
    tensors: list[Tensors]
    """The state of every lane."""
    standings: list[Standing]
    randomness: generators.State
    """The state of the generators when the epoch at hand began."""
    data: SharedValue | None = None
    """The job's data and validation data, if all members have the same."""
    together: bool = False
    watched: bool = False
    parallel: tuple[str | Rendezvous, int, int] | None = None
    """For members that are trained on several devices at once: where these meet, the rank here, and how many."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the owner has set in its frameworks."""

    @staticmethod
    def on(device: str) -> tuple[Device, ...] | None:
        """What `devices` is for a worker on a device."""
        return parse_devices(device)


@dataclass(frozen=True)
class Told:
    """What a worker tells: a turn that was taken (no report), the end of an epoch, or that it has stopped.

    Its first word, with nothing in it, says that it is there; its second, that it has all that it needs.
    """

    lanes: list[tuple[int, Tensors, Standing, Report | None]]
    """Of each lane its number, its state, where it stands, and its report."""
    randomness: generators.State = field(default_factory=dict)
    """The state of the generators."""


@dataclass(frozen=True)
class Answer:
    """What a worker is told before it goes on, by the lane's number."""

    stopped: dict[int, list[str]] = field(default_factory=dict)
    changed: dict[int, Tensors] = field(default_factory=dict)
    """The state of lanes that was changed since it was told."""
    end: bool = False
    """Whether the lanes are to be given up: somebody else will go on with them."""


_assemblies: dict[str, Assembly] = {}


def work(order: Order) -> Generator[Told, Answer, None]:
    """Run the lanes of an order; tells every epoch's end, and waits for an answer."""
    yield Told([])
    with frameworks.using(order.settings), frameworks.computing():
        yield from _work(order)


def _work(order: Order) -> Generator[Told, Answer, None]:
    group = _met(order)
    crew = _Crew(order, group)
    stopped = interrupted if group is None else lambda: group.any(interrupted())
    way = Way(order.together, order.watched, stopped, crew.side_by_side, _indivisible)
    for shift in crew.shifts:
        shift.begin()
    try:
        yield Told([])
        for moment in interleaved(crew.shifts, way):
            for shift in [shift for shift, _ in moment.reports] if isinstance(moment, Ended) else [moment.shift]:
                crew.refuse_python_state(shift)
            if isinstance(moment, Ended):
                told = [crew.tell(shift, report) for shift, report in moment.reports]
            elif order.watched:
                told = [crew.tell(moment.shift, None)]
            else:
                continue
            answer = yield Told(told, generators.state())
            if answer.end:
                return
            crew.heed(answer, moment.reports if isinstance(moment, Ended) else [])
    finally:
        for shift in crew.shifts:
            shift.close()
            shift.lane.engine.stop()
        if group is not None:
            group.close()
    yield Told([crew.tell(shift, None) for shift in crew.shifts], generators.state())


def _met(order: Order) -> Any:
    """The group of an order whose lanes are spread over several workers, when all have met; else None."""
    if order.parallel is None:
        return None
    meeting, rank, size = order.parallel
    address = meeting if isinstance(meeting, str) else meeting.address
    framework = frameworks.adapter(order.members[0][3])
    kind = order.devices[0].kind if order.devices else "cpu"
    return framework.Group.join(address, rank, size, MEETING, device=kind)


def _indivisible(shift: Shift) -> None:
    raise AssertionError("lanes in workers are not cut in two")


class _Crew:
    def __init__(self, order: Order, group: Any) -> None:
        self._silent = order.parallel is not None and order.parallel[1] > 0  # another rank tells the state
        if order.fleet not in _assemblies:
            _assemblies.clear()
            _assemblies[order.fleet] = Assembly(order.devices)
        assembly = _assemblies[order.fleet]
        self.job = order.job
        if order.data is not None:
            data, validation = order.data.get()
            self.job = replace(order.job, data=data, validation=validation)
        members = [Member(name, model, seed, frameworks.adapter(f)) for name, model, seed, f in order.members]
        generators.restore(order.randomness)
        studied = assembly.study(members, order.recipes, "train")
        self.lanes = [assembly.lane(studied, part) for part in order.parts]
        for lane, standing in zip(self.lanes, order.standings, strict=True):
            lane.epochs = np.array(standing.begun[0])  # what shuffles go by
        self.side_by_side = supply.side_by_side(self.lanes, self.job)
        fed = supply.feeds(self.lanes, self.job)
        for lane, feed in fed:
            supply.check(lane, feed, self.job)
        if group is not None:
            for lane in self.lanes:
                lane.engine.spread(group)
        for lane, feed in fed:
            lane.ready(feed.first(), "train")  # which finds out how its steps have to run
        self.shifts = supply.shifts(fed, self.job)
        self._structures = {
            id(shift): shift.lane.signature for shift in self.shifts if len(shift.lane.members) == 1
        }
        self._numbers = {id(shift): number for number, shift in enumerate(self.shifts)}
        for shift, standing, tensors in zip(self.shifts, order.standings, order.tensors, strict=True):
            shift.lane.engine.load({name: _writable(array) for name, array in tensors.items()})
            self._take_up(shift, standing)
            # Lanes that read one loader take a batch of it after the other.
            shift.take_several(one=order.watched or self.side_by_side)
        if any(standing.epoch or standing.position for standing in order.standings):
            generators.restore(order.randomness)
            for shift in self.shifts:
                for feed in (shift.feed, shift.validation):
                    if feed is not None:
                        feed.rewind()

    def refuse_python_state(self, shift: Shift) -> None:
        """Raise `StrategyError` if a lane's first turn has changed its model beside the tensors that are told."""
        before = self._structures.pop(id(shift), None)
        member = shift.lane.members[0]
        change = before and member.framework.difference(member.framework.signature(member.model), before)
        if change:
            raise StrategyError(
                f"member {member.name!r} keeps state in Python: after a step, {change}. What a worker process "
                f'changes there would be lost. Use strategy="interleaved" or "threads", or keep it in a buffer.'
            )

    def _take_up(self, shift: Shift, standing: Standing) -> None:
        """Go on from where a lane was, whoever took its steps until then."""
        slots = shift.lane.take_up(standing.lane).tolist()
        _, started, taken = standing.begun
        shift.started, shift.taken = np.array(started), np.array(taken)
        shift.schedules.restore(standing.schedules)
        shift.epoch, shift.position = standing.epoch, standing.position
        if len(slots) < len(shift.lane.members):
            shift.feed = shift.feed.select(slots)
            shift.validation = shift.validation and shift.validation.select(slots)

    def tell(self, shift: Shift, report: Report | None) -> tuple[int, Tensors, Standing, Report | None]:
        """A lane's state as it is now: the owner keeps it, whatever becomes of this worker."""
        tensors = {} if self._silent else shift.lane.tensors()
        return self._numbers[id(shift)], tensors, Standing.of(shift), report

    def heed(self, answer: Answer, reports: list[tuple[Shift, Report]]) -> None:
        """Do as answered."""
        for number, tensors in answer.changed.items():
            # Copied: a framework may make an array its own without, and these are gone with the next answer.
            self.shifts[number].lane.engine.load({name: np.array(array) for name, array in tensors.items()})
        for shift, _ in reports:
            shift.leave(answer.stopped.get(self._numbers[id(shift)], []))


def _writable(array: np.ndarray) -> np.ndarray:
    """What may be taken over by a framework; on a cluster what came is only to be read."""
    return array if array.flags.writeable else array.copy()


@dataclass(frozen=True)
class Orders:
    """Writes the orders of a fit."""

    fleet: str
    recipes: Mapping[str, Recipe | None]
    devices: tuple[Device, ...] | None
    job: supply.Job
    randomness: generators.State

    @property
    def data(self) -> tuple[Any, Any] | None:
        """The data and validation data, if they are the same for all members."""
        return (
            None
            if isinstance(self.job.data, Each) or isinstance(self.job.validation, Each)
            else (self.job.data, self.job.validation)
        )

    def order(self, shifts: Sequence[Shift], device: str | None = None, data: SharedValue | None = None) -> Order:
        """The order for some lanes, as they stand, for a worker on a device; None: it chooses one."""
        members = [member for shift in shifts for member in shift.lane.members]
        names = [member.name for member in members]
        job = self.job.only(names)
        return Order(
            fleet=self.fleet,
            members=[(m.name, m.model, m.seed, m.framework.NAME) for m in members],
            recipes={name: self.recipes[name] for name in names},
            devices=self.devices if device is None else Order.on(device),
            parts=[
                Part(tuple(shift.names), shift.lane.engine.fused, shift.lane.part.reason, shift.lane.part.wave)
                for shift in shifts
            ],
            job=job if data is None else replace(job, data=None, validation=None),
            tensors=[shift.tensors() for shift in shifts],
            standings=[Standing.of(shift) for shift in shifts],
            randomness=shifts[0].randomness or self.randomness,
            data=data,
            settings=frameworks.settings(None),
        )
