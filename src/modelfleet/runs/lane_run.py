"""A lane's run: its part in one fit, from the first step to the last report."""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from modelfleet.errors import FleetError
from modelfleet.feeds import Batch, Feed
from modelfleet.frameworks.adapter_protocol import Schedules
from modelfleet.frameworks.errors import REASONS, CannotFuseError, StepError
from modelfleet.history import Failure
from modelfleet.lanes.lane import Lane
from modelfleet.lanes.work import Work, finish_in_step
from modelfleet.runs.feeding import Feeding
from modelfleet.runs.opening import OpenLane
from modelfleet.trees import map_tree
from modelfleet.types import Arrays, Json
from modelfleet.workers.supervisor import Policy, RestartBudget

STEP_RAISED = "its step raised"
MAX_BACKUP_BYTES = 1 << 26  # of a state on the host that is copied before the first step of a kind

WORKER_POLICY = Policy(
    start_timeout=300.0, patience=10.0, max_failed_starts=3, max_failed_restarts=3, max_deaths=2
)
"""When a worker that takes a lane's steps is given up, and how many may be lost before the lane's members fail."""

GeneratorState = dict[str, np.ndarray]
"""State of the global random generators, by name."""


class TooWideError(FleetError):
    """A lane's step has run out of memory and its state is as before, so that the lane can be halved."""

    def __init__(self, run: "LaneRun") -> None:
        super().__init__(f"a lane of {len(run.names)} members has run out of memory")
        self.run = run


@dataclass
class EpochReport:
    """Results of one epoch of a lane."""

    epoch: int
    """Epochs finished in this fit."""
    values: dict[str, dict[str, float]]
    """Loss and metrics of the members that took part and have not failed."""
    failures: dict[str, Failure]
    """Members that failed in this epoch."""
    steps: int
    seconds: float


@dataclass(frozen=True)
class Progress:
    """How far a lane's run has come, beside the state of its members. Plain values that can be sent and stored."""

    lane: dict[str, Json]
    schedules: Json
    epoch: int
    step: int
    """Steps done in the current epoch."""
    before: tuple[list[int], list[int], list[int]]
    """By member, at the start of the fit: epochs finished, steps taken, and steps that changed the weights."""


@dataclass
class RemoteState:
    """State of a lane while a worker takes its steps, as the worker reported it last."""

    arrays: Arrays = field(default_factory=dict)
    loaded: bool = True
    """True if the lane here holds this state."""
    changed: bool = False
    """True if the lane here was changed, and the worker does not know it yet."""
    stopped: list[str] = field(default_factory=list)
    """Members that were stopped, and the worker does not know it yet."""
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(WORKER_POLICY))
    """Counts the workers that were lost since the lane's last epoch ended."""


@dataclass
class LaneRun:
    """A lane at work in a fit: its feeds, its hyperparameters over time, and how far it has come."""

    lane: Lane
    feed: Feed
    validation: Feed | None
    schedules: Schedules
    epochs: np.ndarray
    """`(member,)`: epochs that each member trains in this fit."""
    share: int = 1
    """Turns that the lane takes while another takes one."""
    max_steps: int = 1
    """Most steps of one turn."""
    steps_per_epoch: np.ndarray | None = None
    """`(member,)`: steps after which each member's epoch ends, even if its data do not."""
    initial_epoch: int = 0
    """Epochs before this fit, for the schedules."""
    may_halve: bool = False
    """True if the lane may be halved when memory runs out."""
    epoch: int = 0
    """Epochs finished in this fit."""
    step_in_epoch: int = 0
    """Steps done in the current epoch."""
    seconds: float = 0.0
    """Time spent in steps."""
    busy: bool = False
    """True while a thread or a worker is taking steps."""
    remote: RemoteState | None = field(default=None, repr=False)
    """Set while a worker takes the steps."""
    generators: GeneratorState | None = field(default=None, repr=False)
    """State of the generators at the start of the current epoch, if a worker takes the steps."""
    _batches: Generator[Batch, None, None] | None = field(default=None, repr=False)
    _epoch_seconds: float = 0.0
    _first_step: int = 0

    def __post_init__(self) -> None:
        # Of all members: the feed itself is narrowed together with the lane.
        self.steps_before = self.lane.steps.copy()
        self.epochs_before = self.lane.epochs.copy()
        self.updates_before = self.lane.engine.steps_taken().copy()
        self.rows = self.feed.rows
        self.batches = self.feed.settings
        self.known_steps = self._limit(self.feed.steps)
        self.raised: Exception | None = None
        """The error of the last step that raised one."""
        self._tried: set[tuple[int, int | None]] = set()
        self._failed: dict[str, Failure] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of the members, in their order."""
        return self.lane.names

    @property
    def wave(self) -> int:
        """Return the wave of the lane."""
        return self.lane.spec.wave

    @property
    def working(self) -> bool:
        """Return True while any member is training."""
        return bool(self.lane.on().any())

    def training(self) -> list[str]:
        """Return the members that are still training."""
        return [name for name, on in zip(self.lane.names, self.lane.on(), strict=True) if on]

    def choose_turn_length(self, *, single: bool = False) -> None:
        """Take as many steps in a turn as the engine prefers, or single ones.

        Steps are single if each is watched, if the hyperparameters change from step to step, or if the members'
        epochs end at different steps.
        """
        limits = self.steps_per_epoch
        single = single or self.schedules.by_step or (limits is not None and bool((limits != limits[0]).any()))
        self.max_steps = 1 if single else self.lane.engine.steps_per_call

    # --- steps ---------------------------------------------------------------------------------------------------

    def turn(self) -> int:
        """Take the next steps. Return their number: 0 if the epoch is over."""
        batch = self.next_batch()
        return 0 if batch is None else self.step(batch)

    def next_batch(self) -> Batch | None:
        """Return the batch of the next turn. None if the epoch is over."""
        if not self.working:
            return None
        if self._batches is None:
            self._batches = self.feed.epoch(self.epoch, start=self.step_in_epoch, several=self.max_steps)
            self._epoch_seconds, self._first_step = 0.0, self.step_in_epoch
        limits = self.steps_per_epoch
        if limits is not None and self.step_in_epoch >= limits[self.lane.on()].max():
            return None
        return next(self._batches, None)

    def step(self, batch: Batch) -> int:
        """Train on a batch. Return the number of steps: 0 if no member is left.

        Raises:
            TooWideError: Memory has run out, and the lane may be halved.
        """
        begun = time.perf_counter()
        batch = self._cut_short(batch)
        columns = self.schedules.at(self.lane.steps - self.steps_before)
        kind = batch.size, batch.steps
        backup = None if kind in self._tried or self.lane.engine.undoes_steps else self._backup()
        try:
            self.lane.train(batch, columns, self._steps_left())
        except StepError as error:
            self._fail_members(error.causes)
            if not self.working:
                return 0
        except Exception as error:
            if not self.lane.engine.out_of_memory(error):
                raise
            self._run_out_of_memory(error, backup)
            return 0
        self._tried.add(kind)
        self.step_in_epoch += batch.steps or 1
        self._epoch_seconds += time.perf_counter() - begun
        return batch.steps or 1

    def end_epoch(self) -> EpochReport:
        """End the epoch: read its metrics, validate, and find the members that have failed."""
        return finish_in_step([self.ending()])[0]

    def ending(self) -> Work[EpochReport]:
        """End the epoch. Yields after every batch of validation data."""
        begun = time.perf_counter()
        self.close()
        self.epoch += 1
        on = self.lane.on()
        values = self.lane.epoch_values()
        self._epoch_seconds += time.perf_counter() - begun  # at the latest here the device has done all steps
        steps = self.step_in_epoch - self._first_step
        self.seconds += self._epoch_seconds
        self.lane.record_time(steps, self._epoch_seconds, first=self.epoch == 1)
        if self.validation is not None:
            for name, column in (yield from self.lane.evaluating(self.validation)).items():
                values[f"val_{name}"] = column
        self.step_in_epoch = 0
        failures = self.find_failures(self.epoch)
        still = on & self.lane.on()
        rows: list[dict[str, float]] = [{} for _ in self.lane.members]
        by_slot = zip(*(column.tolist() for column in values.values()), strict=True)
        for position, numbers in zip(self.lane.slots.tolist(), by_slot, strict=True):
            if still[position]:
                rows[position] = dict(zip(values, numbers, strict=True))
        self.schedules.end_epoch(rows)
        self.lane.epochs[still] += 1
        results = {self.lane.members[position].name: rows[position] for position in np.flatnonzero(still)}
        return EpochReport(self.epoch, results, failures, steps, self._epoch_seconds)

    def begin(self) -> None:
        """Take the members that have no epoch left out of the steps to come."""
        self.lane.rest(np.flatnonzero(self.epochs <= self.epoch))

    def leave(self, stopped: Sequence[str]) -> None:
        """Take out the members that are done or were stopped, and free their slots."""
        self.lane.rest([self.lane.positions[name] for name in stopped])
        self.begin()
        if self.remote is not None:
            self.remote.stopped += stopped
            return
        feeds = [self.feed] if self.validation is None else [self.feed, self.validation]
        self.feed, *rest = self.lane.compact(feeds)
        self.validation = rest[0] if rest else None

    def close(self) -> None:
        """Stop reading ahead."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    # --- failures ------------------------------------------------------------------------------------------------

    def find_failures(self, epoch: int) -> dict[str, Failure]:
        """Set aside the members that have failed in this epoch, and return them."""
        lane, found = self.lane, {}
        codes = lane.engine.trouble()
        for slot in np.flatnonzero(codes):
            position = int(lane.slots[slot])
            if lane.on()[position]:
                found[position] = Failure(epoch, self._updates(int(slot)) + 1, REASONS[int(codes[slot])])
        for what, feed in (("data", self.feed), ("validation data", self.validation)):
            for slot, error in (feed.failures if feed is not None else {}).items():
                position = int(lane.slots[slot])
                if lane.on()[position] and position not in found:
                    step = int(lane.steps[position] - self.steps_before[position]) + (what == "data")
                    reason = f"its {what} raised {type(error).__name__}: {error}"
                    found[position] = Failure(epoch, step, reason)
        lane.rest(list(found), failed=True)
        failed, self._failed = self._failed, {}
        return {**{lane.members[position].name: failure for position, failure in found.items()}, **failed}

    def _fail_members(self, causes: Mapping[int, Exception]) -> None:
        """Set aside the members, by slot, whose steps raised."""
        self.raised = next(iter(causes.values()))
        for slot, error in causes.items():
            if isinstance(error, CannotFuseError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # the error of the model itself
            name = self.lane.members[self.lane.slots[slot]].name
            reason = f"{STEP_RAISED} {type(error).__name__}: {error}"
            # A turn may have several steps, so that the step is known from the updates.
            self._failed[name] = Failure(self.epoch + 1, self._updates(slot) + 1, reason)
        self.lane.rest([self.lane.positions[name] for name in self._failed], failed=True)

    def _updates(self, slot: int) -> int:
        """Return how many steps of this fit have changed the weights of a member."""
        return int(self.lane.engine.steps_taken()[slot] - self.updates_before[self.lane.slots[slot]])

    def _backup(self) -> Arrays | None:
        """Return a copy of the state before the first step of a kind, which may run out of memory half-way.

        All steps of one kind take the same memory, so later ones need no copy. The host's memory hardly ever runs
        out with an error, so a large state there is not copied either.
        """
        if self.lane.device.startswith("cpu") and self.lane.engine.bytes > MAX_BACKUP_BYTES:
            return None
        return {name: np.array(array) for name, array in self.lane.arrays().items()}

    def _run_out_of_memory(self, error: Exception, backup: Arrays | None) -> None:
        self.close()
        engine = self.lane.engine
        reason = "the device ran out of memory"
        if not engine.undoes_steps:
            if backup is not None:
                self.lane.load_arrays(backup)
                if self.may_halve and len(self.training()) > 1:
                    raise TooWideError(self) from error
            when = (
                "in the middle of the run; the weights may be between two steps"
                if backup is None
                else "at the first step"
            )
            reason = f"{reason} {when}"
        for name in self.training():
            slot = int(np.flatnonzero(self.lane.slots == self.lane.positions[name])[0])
            self._failed[name] = Failure(self.epoch + 1, self._updates(slot) + 1, reason)
        self.lane.rest([self.lane.positions[name] for name in self._failed], failed=True)

    # --- state and progress --------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Bring the members' state here, if a worker takes the steps."""
        if self.remote is not None and not self.remote.loaded:
            self.lane.load_arrays(self.remote.arrays)
            self.remote.loaded = True

    def push(self) -> None:
        """Have the worker, if there is one, load the members' state before its next step."""
        if self.remote is not None:
            self.remote.changed = True

    def arrays(self) -> Arrays:
        """Return the members' state on the host, wherever the steps are taken."""
        if self.remote is not None and not self.remote.loaded:
            return self.remote.arrays
        return self.lane.arrays()

    def progress(self) -> Progress:
        """Return how far the run has come."""
        before = self.epochs_before.tolist(), self.steps_before.tolist(), self.updates_before.tolist()
        return Progress(self.lane.progress(), self.schedules.state(), self.epoch, self.step_in_epoch, before)

    def resume(self, lane: dict[str, Json], epoch: int, step: int) -> None:
        """Continue from where an earlier run of the same lane was; its state and schedules are restored apart."""
        positions = self.lane.resume(lane).tolist()
        self.epoch, self.step_in_epoch = epoch, step
        if len(positions) < len(self.lane.members):
            self.feed = self.feed.select(positions)
            self.validation = self.validation and self.validation.select(positions)

    # --- small parts ---------------------------------------------------------------------------------------------

    def _steps_left(self) -> int:
        """Return the steps until the end of the fit, as far as they are known."""
        on = self.lane.on()
        if not on.any():
            return 0
        known = self._limit(self.feed.steps)
        per_epoch = self.step_in_epoch + 1 if known is None else int(known.max())
        return max(0, (int(self.epochs[on].max()) - self.epoch) * per_epoch - self.step_in_epoch)

    def _limit(self, steps: np.ndarray | None) -> np.ndarray | None:
        """Return the steps `(slot,)` of the members' epochs, which `steps_per_epoch` may cut short."""
        if steps is None or self.steps_per_epoch is None:
            return steps
        return np.minimum(steps, self.steps_per_epoch[self.lane.slots])

    def _cut_short(self, batch: Batch) -> Batch:
        """Return only as many steps of a batch as the epoch has left, without members whose epoch is over."""
        if self.steps_per_epoch is None:
            return batch
        left = self.steps_per_epoch[self.lane.slots] - self.step_in_epoch
        if batch.steps is not None:  # the same number is left for all
            most = int(left[0])
            if batch.steps <= most:
                return batch
            return Batch(map_tree(lambda leaf: leaf[:most], batch.data), batch.shared, batch.counts, most)
        if (left > 0).all():
            return batch
        pieces = [replace(one, counts=one.counts * (left > 0), others=()) for one in batch.by_shape]
        return replace(pieces[0], others=tuple(pieces[1:]))


def make_runs(opened: Sequence[OpenLane], feeding: Feeding) -> list[LaneRun]:
    """Return the runs of open lanes. Their validation data are checked."""
    job = feeding.job
    epochs, shares = job.by_name("epochs"), job.by_name("share")
    validation: list[Feed | None] = [None] * len(opened)
    if job.validation is not None:
        validation = [feeding.feed(one.lane, "validation") for one in opened]
        for one, feed in zip(opened, validation, strict=True):
            assert feed is not None
            feeding.check(one.lane, feed, "validation")
    runs = []
    for one, own_validation in zip(opened, validation, strict=True):
        lane = one.lane
        own_epochs = np.array([epochs[name] for name in lane.names])
        schedules = lane.members[0].framework.Schedules(
            lane.schedules,
            lane.columns,
            lane.engine.task,
            job.limit_steps(one.feed.steps, lane.names),
            own_epochs,
            names=lane.names,
            initial_epoch=job.initial_epoch,
        )
        lane.engine.clear_trouble()
        share = max(shares[name] or 1 for name in lane.names)
        runs.append(
            LaneRun(
                lane,
                one.feed,
                own_validation,
                schedules,
                own_epochs,
                share,
                steps_per_epoch=job.step_limits(lane.names),
                initial_epoch=job.initial_epoch,
            )
        )
    return runs
