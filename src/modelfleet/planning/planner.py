"""The planner: which lanes, and how they share the device, by what was measured.

It begins with every group fused. If the run is long enough for it, it times a step of each group fused and apart,
takes what is faster, and then times the lanes that are left taking turns, in threads, and in processes. Measuring
may take a small part of the run; what was measured once is known from then on (`paces`). Where there are several
devices, the lanes are placed first, by what is known of them.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from modelfleet.devices import Device, threads_of
from modelfleet.each import per_member
from modelfleet.errors import FleetError, StrategyError
from modelfleet.feeds import Feed
from modelfleet.feeds.checking import row_spec
from modelfleet.frameworks.protocol import CannotFuseError
from modelfleet.lanes import Lane
from modelfleet.planning import memory, paces, placement, supply, trials
from modelfleet.planning.assembly import Part, Studied, refuse_indivisible
from modelfleet.planning.placement import Load
from modelfleet.planning.supply import Job
from modelfleet.sharing.shifts import Sharing
from modelfleet.sharing.threads import held_in_common
from modelfleet.workers import CannotSendError
from modelfleet.workers.process import idle
from modelfleet.workers.shared import pickled

PART_OF_RUN = 0.05  # that measuring may take
SHORT: int = 300  # steps: a run of fewer is over before measuring has paid
UNKNOWN = 1000  # steps of an epoch, where the data do not tell
WORKER_START = 8.0  # seconds until a new worker process has taken its first step
BETTER = 0.9  # an alternative must take at most this part of the time

Fed = tuple[Lane, Feed]


@dataclass
class Choice:
    """What was chosen, and what is known of it."""

    lanes: list[Fed]
    sharing: str = "interleaved"
    predicted: dict[int, float] = field(default_factory=dict)
    """Seconds per step by the id of a lane."""
    epoch: float | None = None
    """Seconds for an epoch of everything."""
    measuring: float = 0.0
    """Seconds that were spent on measuring."""


class Planner:
    """Chooses for one fleet; remembers its measurements."""

    def __init__(self) -> None:
        self.paces = paces.Paces()
        self._placed: tuple[_Where, _Where] = (), ()  # as the lanes were placed last, and what was made of them

    # --- choosing ------------------------------------------------------------------------------------------------

    def decide(
        self,
        studied: Studied,
        lanes: Sequence[Fed],
        job: Job,
        strategy: str,
        sharings: dict[str, Callable[[Job], Sharing]],
        kept: str | None,
    ) -> Choice:
        """How lanes run by a strategy. `kept` is the sharing of a resumed run: its lanes stay as they are."""
        choice = self._decided(studied, lanes, job, strategy, sharings, kept)
        common = held_in_common([lane for lane, _ in choice.lanes]) if choice.sharing == "threads" else None
        if common is not None:
            if strategy == "threads":
                first, second, module = common
                raise StrategyError(
                    f'strategy="threads" can\'t be had: members {first!r} and {second!r} hold the very same '
                    f"module {module!r}, and the step of one would set its mode while the other runs it. Give "
                    f'each a copy (copy.deepcopy), or use "interleaved".'
                )
            choice.sharing = "interleaved"
        return choice

    def _decided(
        self,
        studied: Studied,
        lanes: Sequence[Fed],
        job: Job,
        strategy: str,
        sharings: dict[str, Callable[[Job], Sharing]],
        kept: str | None,
    ) -> Choice:
        if "data_parallel" in (strategy, kept):
            refuse_indivisible(lanes)
            return Choice(list(lanes), "data_parallel")
        scattered, clustered = studied.scattered, bool(studied.assembly.places)
        sharing = strategy if strategy in ("interleaved", "threads", "processes") else usual_sharing(studied)
        if kept is not None or clustered:  # the devices of a cluster are not here to be measured
            if kept is None:
                lanes = self._place(studied, lanes, job)
            elif strategy in ("auto", "fused"):
                sharing = kept
            return Choice(list(lanes), "processes" if clustered else sharing)
        if not scattered:
            if strategy != "auto":
                return Choice(list(lanes), sharing)
            others = ("threads",) if _loaded(lanes, job) else ("threads", "processes")
            return self.choose(studied, lanes, job, {name: sharings[name] for name in others})
        lanes = self._place(studied, lanes, job)
        choice = Choice(list(lanes), sharing)
        if strategy in ("auto", "threads", "processes"):
            loaded = _loaded(lanes, job)
            others = {"processes": sharings["processes"]} if strategy == "auto" and not loaded else {}
            choice = self.choose(studied, lanes, job, others, sharing)
            if strategy == "auto" and not loaded and self._worth_processes(studied, choice, job):
                choice.sharing = "processes"
        self._placed = self._placed[0], _where(lane.part for lane, _ in choice.lanes)
        return choice

    @staticmethod
    def _worth_processes(studied: Studied, choice: Choice, job: Job) -> bool:
        """Whether lanes on several CPU devices had better be in processes, though nobody measured it.

        Compiled steps keep Python's lock, so that threads wait for each other: two took twice as long as one.
        """
        devices = {lane.device for lane, _ in choice.lanes}
        if choice.epoch is None or len(devices) == 1 or not all(name.startswith("cpu") for name in devices):
            return False
        epochs = max(int(epoch) for epoch in per_member(job.epochs, job.names, "epochs"))
        if choice.epoch * epochs < 2 * WORKER_START and idle() < len(devices):
            return False
        try:
            pickled([[row.member.model for row in studied.rows.values()], job], "the members")
        except CannotSendError:
            return False
        return True

    def choose(
        self,
        studied: Studied,
        lanes: Sequence[Fed],
        job: Job,
        sharings: dict[str, Callable[[Job], Sharing]],
        usual: str = "interleaved",
    ) -> Choice:
        """The fastest lanes that fit, of those that the fused ones can be cut into, and their sharing: the usual
        one, or one of the others."""
        begun = time.perf_counter()
        length = max(self._steps(lane, feed, job) for lane, feed in lanes)
        spent = _Budget(length)
        chosen: list[Fed] = []
        for lane, feed in lanes:
            chosen += self._cut(studied, lane, feed, job, spent)
        choice = Choice(chosen, usual)
        for lane, feed in chosen:
            seconds = self.paces.get(self.lane_key(studied, lane.part, feed))
            if seconds is not None:
                choice.predicted[id(lane)] = seconds
        self._share(studied, choice, job, sharings, spent)
        choice.measuring = time.perf_counter() - begun
        self.paces.save()
        return choice

    def _cut(self, studied: Studied, lane: Lane, feed: Feed, job: Job, spent: "_Budget") -> list[Fed]:
        """A group's lane as it is, in waves if it is too wide, or its members apart, whatever is fastest."""
        names = tuple(lane.names)
        width = memory.widest(lane, feed)
        remembered = self.paces.get(self._widest_key(studied, lane.part, feed))
        if remembered is not None:
            width = max(1, min(width, int(remembered)))
        if len(names) == 1 or not lane.engine.fused:
            self._pace(studied, lane.part, feed, spent)
            return [(lane, feed)]
        parts = [lane.part]
        if width < len(names):
            why = f"{len(names)} at once do not fit into memory"
            parts = [
                replace(lane.part, names=own, reason=_joined(lane.part.reason, why), wave=wave)
                for wave, own in enumerate(memory.waves(width, names))
            ]
        best = self._apart_or(studied, lane, parts, feed, job, spent)
        if best == [lane.part]:
            return [(lane, feed)]
        return [self._remade(studied, lane, feed, part) for part in best]

    def _apart_or(
        self, studied: Studied, lane: Lane, parts: list[Part], feed: Feed, job: Job, spent: "_Budget"
    ) -> list[Part]:
        """The parts, narrower ones, or every member apart: by the time of a step of all."""
        places = lane.places

        def pace(part: Part) -> float | None:
            return self._pace(studied, part, feed.select([places[name] for name in part.names]), spent)

        wide = pace(parts[0])
        if wide is None:
            return parts
        spent.predict(wide * len(parts) * self._steps(lane, feed, job))
        single = Part((lane.names[0],), False, "", device=lane.part.device)
        candidates: list[tuple[float, list[Part]]] = [(wide * lane.engine.prospect * len(parts), parts)]
        quarter = len(parts[0].names) // 4
        if quarter >= 2:
            narrow = [replace(lane.part, names=own) for own in memory.waves(quarter, lane.names)]
            seconds = pace(narrow[0])
            if seconds is not None:
                total = seconds * lane.engine.prospect * len(narrow)
                why = f"lanes of {quarter} are faster than one of {len(lane.names)} ({_ms(total)} a step of all)"
                reason = _joined(lane.part.reason, why)
                candidates.append((total, [replace(part, reason=reason) for part in narrow]))
        seconds = pace(single)
        if seconds is not None:
            total = seconds * len(lane.names)
            why = f"apart is faster than fused: {_ms(total)} a step of all, not {_ms(candidates[0][0])}"
            reason = _joined(lane.part.reason, why)
            apart = replace(lane.part, fused=False, reason=reason, split=None)
            candidates.append((total, [replace(apart, names=(name,)) for name in lane.names]))
        best = min(candidates, key=lambda candidate: candidate[0])
        return best[1] if best[0] < BETTER * candidates[0][0] else parts

    def _share(
        self,
        studied: Studied,
        choice: Choice,
        job: Job,
        sharings: dict[str, Callable[[Job], Sharing]],
        spent: "_Budget",
    ) -> None:
        """Choose how the lanes share the device, if there is more than one."""
        per_epoch = [_per_epoch(feed, job) for _, feed in choice.lanes]
        epochs = max(int(epoch) for epoch in per_member(job.epochs, job.names, "epochs"))
        known = [choice.predicted.get(id(lane)) for lane, _ in choice.lanes]
        if any(seconds is None for seconds in known):
            return
        turns = _all(choice.lanes, known, per_epoch)
        choice.epoch = turns
        if len(choice.lanes) == 1 or any(lane.part.wave for lane, _ in choice.lanes):
            return
        actual = self.paces.get(self.mix_key(studied, choice.lanes, choice.sharing))
        best = choice.epoch = actual or turns
        spent.predict(best * epochs)
        for sharing, sharing_of in sharings.items():
            start = WORKER_START if sharing == "processes" else 0.0
            key = self.mix_key(studied, choice.lanes, sharing)
            seconds = self.paces.get(key)
            if seconds is None and spent.allows(start + spent.dearest):
                begun = time.perf_counter()
                scale = max(1.0, turns / (2 * trials.LEAST))  # as long as a few turns of each
                steps = [max(1, min(64, round(count / scale))) for count in per_epoch]
                try:
                    took = trials.epoch_seconds(studied, choice.lanes, job, sharing_of, steps)
                    alone = _all(choice.lanes, known, steps)
                    seconds = took * turns / max(alone, 1e-9)
                    self.paces.put(key, seconds)
                except FleetError:  # what can't be sent to a worker, say
                    seconds = None
                spent.spend(time.perf_counter() - begun)
            if seconds is None:
                continue
            total = seconds * epochs + (start if not _workers_idle(sharing) else 0.0)
            if total < BETTER * best * epochs:
                best = choice.epoch = seconds
                choice.sharing = sharing

    # --- placing -------------------------------------------------------------------------------------------------

    def _place(self, studied: Studied, lanes: Sequence[Fed], job: Job) -> list[Fed]:
        """Lanes placed by their cost: as they are, or made anew."""
        if supply.read_by_loaders([lane for lane, _ in lanes], job):
            return list(
                lanes
            )  # loaders were looked into, and can't always be begun anew: they stay where they are
        now = _where(lane.part for lane, _ in lanes)
        parts = placement.place(self._loads(studied, lanes, job))
        best = _where(parts)
        if best == now or self._placed == (best, now):
            self._placed = best, now
            return list(lanes)
        self._placed = best, best
        return supply.made(studied, parts, job)

    def _loads(self, studied: Studied, lanes: Sequence[Fed], job: Job) -> list[Load]:
        """What is to be placed, and its cost: in seconds if the pace of all lanes is known, else by their size."""
        epochs = dict(zip(job.names, per_member(job.epochs, job.names, "epochs"), strict=True))
        seconds: list[float | None] = []
        sizes: list[float] = []
        spent = _Budget(max(self._steps(lane, feed, job) for lane, feed in lanes))
        for lane, feed in lanes:
            pace = None if studied.assembly.places else self._pace(studied, lane.part, feed, spent)
            seconds.append(None if pace is None else pace * self._steps(lane, feed, job))
            steps = np.full(len(lane.names), UNKNOWN) if feed.steps is None else feed.steps
            taken = sum(int(own) * int(epochs[name]) for own, name in zip(steps, lane.names, strict=True))
            sizes.append(float(lane.engine.parameters) * feed.first().size * taken)
        known = [one for one in seconds if one is not None]
        costs = known if len(known) == len(lanes) else sizes
        return [
            Load(part, sum(costs[number] for number in numbers), studied.devices(part))
            for part, numbers in placement.whole(studied, [lane.part for lane, _ in lanes])
        ]

    # --- measuring -----------------------------------------------------------------------------------------------

    def _pace(self, studied: Studied, part: Part, feed: Feed, spent: "_Budget") -> float | None:
        """Seconds per step of a part; measured if it is not known and there is time for it."""
        key = self.lane_key(studied, part, feed)
        seconds = self.paces.get(key)
        if seconds is None and spent.allows(spent.dearest):
            begun = time.perf_counter()
            try:
                seconds = trials.step_seconds(studied, part, feed.first(), spent.left())
                self.paces.put(key, seconds)
            except CannotFuseError:
                seconds = None
            spent.spend(time.perf_counter() - begun)
        return seconds

    def _remade(self, studied: Studied, lane: Lane, feed: Feed, part: Part) -> Fed:
        own = feed.select([lane.places[name] for name in part.names])
        made = studied.assembly.lane(studied, part)
        made.engine.check(own.first(), part.names[0])
        made.ready(own.first(), "train")
        return made, own

    def _steps(self, lane: Lane, feed: Feed, job: Job) -> int:
        """The steps of the longest-training member of a lane."""
        epochs = dict(zip(job.names, per_member(job.epochs, job.names, "epochs"), strict=True))
        return _per_epoch(feed, job) * max(int(epochs[name]) for name in lane.names)

    # --- what measurements are known by --------------------------------------------------------------------------

    def lane_key(self, studied: Studied, part: Part, feed: Feed) -> str:
        """The name of a lane's pace."""
        where = () if part.device is None else (part.device.kind, threads_of(studied.devices(part)))
        return self._key(studied, part, feed, "pace", len(part.names), part.fused, *where)

    def mix_key(self, studied: Studied, lanes: Sequence[Fed], sharing: str) -> str:
        """The name of the time of an epoch of lanes that share a device in a way."""
        own = [(self.lane_key(studied, lane.part, feed), _tuple(feed.steps)) for lane, feed in lanes]
        where = sorted({lane.device for lane, _ in lanes}) if studied.scattered else []
        return paces.key("mix", sorted(own), sharing, *where)

    def remember_width(self, studied: Studied, part: Part, feed: Feed, width: int) -> None:
        """Note how many members of a group fit at once, as far as is known after memory has run out."""
        self.paces.put(self._widest_key(studied, part, feed), width)
        self.paces.save()

    def _widest_key(self, studied: Studied, part: Part, feed: Feed) -> str:
        return self._key(studied, part, feed, "widest")

    def _key(self, studied: Studied, part: Part, feed: Feed, *what: Any) -> str:
        row = studied.rows[part.names[0]]
        batch = feed.first()
        shape = row_spec(batch.data), batch.size, batch.shared
        framework = row.member.framework
        return paces.key(framework.NAME, row.signature, row.task.summary, shape, *what)

    def watch(self, studied: Studied, choice: Choice) -> Callable[[float | None], None]:
        """What to call after a run with what an epoch took: then the pace of its lanes is known, too."""
        # The names are worked out before the run: for those, data are looked into.
        if studied.assembly.places:
            return lambda epoch: None
        keys = [(lane, self.lane_key(studied, lane.part, feed)) for lane, feed in choice.lanes]
        mix = self.mix_key(studied, choice.lanes, choice.sharing)
        # Lanes that take turns on their device have it to themselves, and so their pace is their own.
        alone = choice.sharing == "interleaved" or studied.scattered

        def learn(epoch: float | None) -> None:
            for lane, key in keys:
                if alone and lane.steady_seconds_per_step is not None:
                    self.paces.put(key, lane.steady_seconds_per_step)
            if len(keys) > 1 and epoch is not None and all(lane.steady_seconds_per_step for lane, _ in keys):
                self.paces.put(mix, epoch)
            self.paces.save()

        return learn


class _Budget:
    """The seconds that measuring may take: none for a short run, else a part of what the run is predicted to."""

    def __init__(self, steps: int) -> None:
        self._seconds = 0.0 if steps < SHORT else 1.0  # to time one step at all
        self._spent = 0.0
        self.dearest = 0.2
        """What a trial has taken at most: most of it may go into compiling."""

    def predict(self, seconds: float) -> None:
        """The run, or a part of it, is now thought to take so long."""
        self._seconds = max(self._seconds, PART_OF_RUN * seconds)

    def left(self) -> float:
        """Seconds that may still be spent."""
        return max(0.0, self._seconds - self._spent)

    def allows(self, seconds: float) -> bool:
        """Whether so much may still be spent."""
        return self.left() >= seconds

    def spend(self, seconds: float) -> None:
        """A trial has taken so long."""
        self._spent += seconds
        self.dearest = max(self.dearest, seconds)


def usual_sharing(studied: Studied) -> str:
    """How lanes share the devices before anything is known of them."""
    if studied.assembly.places:
        return "processes"
    return "threads" if studied.scattered else "interleaved"


_Where = tuple[tuple[tuple[str, ...], bool, Device | None], ...]


def _where(parts: Iterable[Part]) -> _Where:
    """Parts as far as their placement goes."""
    return tuple((part.names, part.fused, part.device) for part in parts)


def _all(lanes: Sequence[Fed], seconds: Sequence[float | None], steps: Sequence[int]) -> float:
    """The seconds for so many steps of all lanes: those of a device take turns, the devices do not."""
    busy: dict[str, float] = {}
    for (lane, _), pace, count in zip(lanes, seconds, steps, strict=True):
        busy[lane.device] = busy.get(lane.device, 0.0) + (pace or 0.0) * count
    return max(busy.values())


def _per_epoch(feed: Feed, job: Job) -> int:
    steps = UNKNOWN if feed.steps is None else int(feed.steps.max())
    return steps if job.steps_per_epoch is None else min(steps, job.steps_per_epoch)


def _loaded(lanes: Sequence[Fed], job: Job) -> bool:
    """Whether loaders were looked into: a worker process would go on from there, and not from the beginning."""
    members = {member.name: member for lane, _ in lanes for member in lane.members}
    return supply.has_loaders([members[name] for name in job.names], job)


def _workers_idle(sharing: str) -> bool:
    return sharing != "processes" or idle() >= min(2, os.cpu_count() or 1)


def _joined(*reasons: str | None) -> str:
    return "; ".join(reason for reason in reasons if reason)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _tuple(steps: np.ndarray | None) -> tuple[int, ...]:
    return () if steps is None else tuple(steps.tolist())
