"""Measurements: the times of lanes, known from earlier runs or measured now, within a budget."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from modelfleet.devices import threads_of
from modelfleet.errors import FleetError
from modelfleet.feeds import Feed
from modelfleet.feeds.checking import row_spec
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.garbage import forget_frames
from modelfleet.lanes import Groups, LaneSpec
from modelfleet.planning import timings, trials
from modelfleet.planning.plan import Plan
from modelfleet.runs.events import Sharing
from modelfleet.runs.job import Job
from modelfleet.runs.opening import LaneOpener, OpenLane

PART_OF_RUN = 0.05  # fraction of a run's time that measuring may take
FIRST_LOOK = 1.0  # seconds that may pass until the time of the run is known roughly
SHORT_RUN: int = 300  # steps: a shorter run is over before measuring has paid off
UNKNOWN_STEPS = 1000  # assumed for an epoch of unknown length
LEAST_SECONDS = 0.4  # enough to compare fused with apart; a run of a few seconds may take twice its part for it


class Budget:
    """Seconds that measuring may take: none for a short run, otherwise a part of the run's predicted time."""

    def __init__(self, steps: int) -> None:
        self._seconds = 0.0 if steps < SHORT_RUN else FIRST_LOOK
        self._predicted = 0.0
        self.spent = 0.0
        """Seconds that trials have taken."""
        self.longest = 0.1
        """Time of the longest trial so far. Most of it may be compiling."""

    def limit(self, seconds: float) -> None:
        """Set the budget for a run that takes about this many seconds, as a first look at all lanes has shown."""
        self._predicted, self._seconds = seconds, _allowed(seconds)

    def predict(self, seconds: float) -> None:
        """Set the budget for a run, or a part of one, that is predicted to take this many seconds."""
        self._predicted = max(self._predicted, seconds)
        if self._seconds:
            self._seconds = _allowed(self._predicted)

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._seconds - self.spent)

    def allows(self, seconds: float) -> bool:
        """Return True if a trial of this many seconds is within the budget."""
        return self.left() >= seconds

    def spend(self, seconds: float) -> None:
        """Charge the budget for a trial."""
        self.spent += seconds
        self.longest = max(self.longest, seconds)


def _allowed(run: float) -> float:
    """Return the seconds that measuring may take in a run of this many seconds."""
    return max(PART_OF_RUN * run, min(LEAST_SECONDS, 2 * PART_OF_RUN * run))


class Measurements:
    """Times of steps and epochs, by everything that they depend on."""

    def __init__(self) -> None:
        self.timings = timings.Timings()
        self._estimates: dict[str, float] = {}  # times of steps after a first look; too rough to be kept on disk

    def estimate(self, opener: LaneOpener, opened: OpenLane, budget: Budget) -> float | None:
        """Return the time of a lane's step. If it is not known, take a first look: a step or two."""
        key = self._lane_key(opener.groups, opened.spec, opened.feed)
        if self._known(key) is None and budget.left():
            begun = time.perf_counter()
            with suppress(CannotFuseError), _surviving(opener):
                self._estimates[key] = trials.step_seconds(
                    opener.builder, opener.groups, opened.spec, opened.feed.first(), 0.0
                )
            budget.spend(time.perf_counter() - begun)
        return self._known(key)

    def step_seconds(
        self,
        opener: LaneOpener,
        spec: LaneSpec,
        feed: Feed,
        budget: Budget,
        *,
        expected: float = 0.0,
        again: bool = False,
    ) -> float | None:
        """Return the time of a lane's step. It is measured if it is not known and the budget allows it.

        Args:
            opener: Opened the lanes.
            spec: The lane.
            feed: Its feed.
            budget: The budget to charge for a trial.
            expected: The seconds that a trial is expected to take, if they are more than those of an earlier one.
            again: Measure again if the time is known, and keep the shorter one. Noise only adds.
        """
        key = self._lane_key(opener.groups, spec, feed)
        seconds = self.timings.get(key)
        if (again or seconds is None) and budget.allows(max(expected, budget.longest)):
            begun = time.perf_counter()
            try:
                with _surviving(opener):
                    found = trials.step_seconds(opener.builder, opener.groups, spec, feed.first(), budget.left())
                    seconds = found if seconds is None else min(found, seconds)
                    self.timings.put(key, seconds)
            except CannotFuseError:
                self._estimates.pop(key, None)
            budget.spend(time.perf_counter() - begun)
        return self._known(key)

    def known_step_seconds(self, groups: Groups, opened: OpenLane) -> float | None:
        """Return the time of a lane's step if it is known."""
        return self._known(self._lane_key(groups, opened.spec, opened.feed))

    def are_measured(self, groups: Groups, opened: Sequence[OpenLane]) -> bool:
        """Return True if the times of all lanes are more than estimates, so that they may be compared."""
        return all(self.timings.get(self._lane_key(groups, one.spec, one.feed)) is not None for one in opened)

    def _known(self, key: str) -> float | None:
        measured = self.timings.get(key)
        return self._estimates.get(key) if measured is None else measured

    def known_epoch_seconds(self, groups: Groups, opened: Sequence[OpenLane], sharing: str) -> float | None:
        """Return the time of an epoch of lanes that share their device in a given way, if it is known."""
        return self.timings.get(self._mix_key(groups, opened, sharing))

    def epoch_seconds(
        self,
        opener: LaneOpener,
        opened: Sequence[OpenLane],
        sharing: str,
        sharing_of: Callable[[Job], Sharing],
        steps: Sequence[int],
        scale: float,
        budget: Budget,
    ) -> float | None:
        """Measure an epoch of lanes that share their device in a given way.

        Args:
            opener: Opened the lanes.
            opened: The lanes.
            sharing: The name of the sharing.
            sharing_of: Makes the sharing for a job.
            steps: The steps of each lane that the trial takes.
            scale: How many times as long an epoch is as the trial.
            budget: The budget to charge for the trial.
        """
        begun, seconds = time.perf_counter(), None
        # Some members can't be sent to a worker, for example.
        with suppress(FleetError), _surviving(opener):
            took = trials.epoch_seconds(opener, opened, sharing_of, steps)
            seconds = took * scale
            self.timings.put(self._mix_key(opener.groups, opened, sharing), seconds)
        budget.spend(time.perf_counter() - begun)
        return seconds

    def known_width(self, groups: Groups, opened: OpenLane) -> int | None:
        """Return how many members of a lane's group fit into memory, if it has run out before."""
        width = self.timings.get(self._key(groups, opened.spec, opened.feed, "widest"))
        return None if width is None else int(width)

    def remember_width(self, groups: Groups, spec: LaneSpec, feed: Feed, width: int) -> None:
        """Note how many members of a lane's group fit into memory, after it has run out."""
        self.timings.put(self._key(groups, spec, feed, "widest"), width)
        self.timings.save()

    def recorder(self, groups: Groups, plan: Plan, opened: Sequence[OpenLane]) -> Callable[[float | None], None]:
        """Return a function that records, after a run, how long its steps and an epoch took."""
        if groups.pool.places:
            return lambda epoch: None
        # The keys are made before the run: they need a look at the data.
        keys = [(one.lane, self._lane_key(groups, one.spec, one.feed)) for one in opened]
        mix = self._mix_key(groups, opened, plan.sharing)
        # Lanes that take turns have their device to themselves, so their times are not distorted by others.
        alone = plan.sharing == "interleaved" or groups.several_devices

        def record(epoch: float | None) -> None:
            for lane, key in keys:
                if alone and lane.steady_seconds_per_step is not None:
                    self.timings.put(key, lane.steady_seconds_per_step)
            if len(keys) > 1 and epoch is not None and all(lane.steady_seconds_per_step for lane, _ in keys):
                self.timings.put(mix, epoch)
            self.timings.save()

        return record

    # --- keys ----------------------------------------------------------------------------------------------------

    def _lane_key(self, groups: Groups, spec: LaneSpec, feed: Feed) -> str:
        where = ()
        if groups.several_devices and spec.device is not None:
            where = spec.device.partition(":")[0], threads_of(groups.devices(spec))
        return self._key(groups, spec, feed, "pace", spec.width, spec.fused, *where)

    def _mix_key(self, groups: Groups, opened: Sequence[OpenLane], sharing: str) -> str:
        own = [
            (
                self._lane_key(groups, one.spec, one.feed),
                () if one.feed.steps is None else tuple(one.feed.steps.tolist()),
            )
            for one in opened
        ]
        where = sorted({one.lane.device for one in opened}) if groups.several_devices else []
        return timings.key("mix", sorted(own), sharing, *where)

    @staticmethod
    def _key(groups: Groups, spec: LaneSpec, feed: Feed, *what: object) -> str:
        variants = [(groups.tasks[names[0]], len(names)) for names in groups.variants(spec)]
        batch = feed.first()
        shape = row_spec(batch.data), batch.size, batch.shared
        own = [(task.signature, task.task.summary) for task, _ in variants]
        counts = [count for _, count in variants] if len(variants) > 1 else []
        return timings.key(groups.framework(spec).NAME, *own, *counts, shape, *what, *_hardware(groups, spec))


def _hardware(groups: Groups, spec: LaneSpec) -> tuple[str, ...]:
    """Return the name of the accelerator that a lane is measured on; nothing for a CPU, which `timings` names."""
    if groups.pool.places:  # of a cluster, whose devices this process can't ask
        return ()
    device = groups.devices(spec)[0]
    if spec.device is not None:
        device = next((own for own in groups.devices(spec) if str(own) == spec.device), device)
    framework = groups.framework(spec)
    name = framework.hardware(framework.native(device))
    return () if name is None else (name,)


def steps_per_epoch(opened: OpenLane, job: Job) -> int:
    """Return the steps of a lane's epoch, or a guess if the data have no length."""
    names = opened.lane.names
    steps = np.full(len(names), UNKNOWN_STEPS) if opened.feed.steps is None else opened.feed.steps
    limited = job.limit_steps(steps, names)
    assert limited is not None
    return int(limited.max())


def total_steps(opened: OpenLane, job: Job) -> int:
    """Return the steps of a lane's member that trains longest."""
    epochs = job.by_name("epochs")
    return steps_per_epoch(opened, job) * max(int(epochs[name]) for name in opened.lane.names)


def work(opened: OpenLane, job: Job) -> float:
    """Return a lane's work by its size, for lanes whose step has not been timed."""
    lane, feed = opened.lane, opened.feed
    epochs = job.by_name("epochs")
    steps = np.full(len(lane.names), UNKNOWN_STEPS) if feed.steps is None else feed.steps
    taken = sum(int(own) * int(epochs[name]) for own, name in zip(steps, lane.names, strict=True))
    return float(lane.engine.parameters) * feed.first().size * taken


@contextmanager
def _surviving(opener: LaneOpener) -> Iterator[None]:
    """Go on after a trial that has run out of memory: what it was to measure stays unknown.

    A trial has a copy of the state beside the lane's own. The run itself may fit, or will halve its lanes.
    """
    try:
        yield
    except Exception as error:
        if not opener.out_of_memory(error):
            raise
        forget_frames(error)
