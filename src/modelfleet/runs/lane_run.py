"""A lane's run: its part in one fit, from the first step to the last report."""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from modelfleet.errors import FleetError
from modelfleet.failures import Failure
from modelfleet.feeds import Batch, Feed
from modelfleet.frameworks.adapter_protocol import Schedules
from modelfleet.frameworks.errors import REASONS, CannotFuseError, StepError
from modelfleet.frameworks.global_generators import State as GeneratorState
from modelfleet.garbage import forget_frames
from modelfleet.lanes.lane import Columns, Lane
from modelfleet.lanes.work import Work
from modelfleet.runs.columns_ahead import ColumnsAhead
from modelfleet.runs.factors import Factors
from modelfleet.runs.remote_state import RemoteState
from modelfleet.trees import map_tree
from modelfleet.types import Json, State

MAX_BACKUP_BYTES = 1 << 26  # a larger state on the host is not copied before the first step of a kind


class TooWideError(FleetError):
    """Raised if a lane's step has run out of memory. The state is as before, so the lane can be halved."""

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
    """Progress of a lane's run, without the state of its members. Plain values that can be sent and stored."""

    lane: dict[str, Json]
    schedules: Json
    epoch: int
    step: int
    """Steps done in the current epoch."""
    before: dict[str, list[int]]
    """`LaneRun.before`."""
    factors: dict[str, list[float]] = field(default_factory=dict)
    """State of `LaneRun.factors`."""


@dataclass
class LaneRun:
    """Part of one lane in a fit: its feeds, its hyperparameters over time, and its progress."""

    lane: Lane
    feed: Feed
    validation: Feed | None
    schedules: Schedules
    epochs: np.ndarray
    """`(member,)`: epochs that each member trains in this fit."""
    turns: int = 1
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
    read_up: bool = False
    """True if the feed has no more batches in this epoch."""
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
        updates = self.lane.engine.steps_taken().copy()
        self.before = {"epochs": self.lane.epochs.copy(), "steps": self.lane.steps.copy(), "updates": updates}
        """At the start of the fit: epochs finished, steps taken, and steps that changed the weights."""
        self.factors = Factors(self.lane.names, self.lane.columns)
        self._ahead = ColumnsAhead(self.schedules, self.factors, self.lane.expect)
        self.rows = self.feed.rows
        self.batches = self.feed.settings
        self.known_steps = self._limit(self.feed.steps)
        self.raised: Exception | None = None
        """Error of the last step that raised."""
        self.ran_out_of_memory = False
        self._tried: set[tuple[int, int | None]] = set()
        self._failed: dict[str, Failure] = {}
        self._losses: dict[str, list[float]] = {}  # of single steps, by member

    @property
    def names(self) -> list[str]:
        """Return the names of the members, in their order."""
        return self.lane.names

    @property
    def working(self) -> bool:
        """Return True while any member is training."""
        return bool(self.lane.on().any())

    @property
    def at_end(self) -> bool:
        """Return True if all steps of the epoch are done, and the epoch has not been ended yet."""
        on = self.lane.on()
        known = None if self.known_steps is None else self.known_steps[on].max(initial=0)
        return self.read_up or (known is not None and self.step_in_epoch >= known)

    @property
    def steps_done(self) -> np.ndarray:
        """Return `(member,)`: the steps taken in this fit."""
        return self.lane.steps - self.before["steps"]

    def training(self) -> list[str]:
        """Return the members that are still training."""
        return [name for name, on in zip(self.lane.names, self.lane.on(), strict=True) if on]

    @property
    def feeds(self) -> list[Feed]:
        """Return the feeds of the training data and, if there are any, of the validation data."""
        return [self.feed] if self.validation is None else [self.feed, self.validation]

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
        over = limits is not None and self.step_in_epoch >= limits[self.lane.on()].max()
        batch = None if over else next(self._batches, None)
        self.read_up = batch is None
        return batch

    def step(self, batch: Batch) -> int:
        """Train on a batch. Return the number of steps: 0 if no member is left.

        Raises:
            TooWideError: Memory has run out, and the lane may be halved.
        """
        begun = time.perf_counter()
        batch = self._cut_short(batch)
        columns = self._columns(batch)
        kind = batch.size, batch.steps
        engine = self.lane.engine
        backup = None if kind in self._tried or engine.undoes_steps else self._backup()
        stamp = engine.stamp() if self.may_halve and backup is None else None
        recorded = len(self.lane.losses or ())
        try:
            self.lane.train(batch, columns, self._steps_left())
        except StepError as error:
            self._fail_raised(error.causes)
            if not self.working:
                return 0
        except Exception as error:
            if not engine.out_of_memory(error):
                raise
            forget_frames(error)  # they hold the tensors of the step, and with them the memory
            if self.lane.losses is not None and backup is not None:
                self.lane.losses.forget_after(recorded)
            self._run_out_of_memory(error, backup, unchanged=stamp is not None and engine.stamp() == stamp)
            return 0
        self._tried.add(kind)
        self.step_in_epoch += batch.steps or 1
        self._epoch_seconds += time.perf_counter() - begun
        return batch.steps or 1

    def ending(self) -> Work[EpochReport]:
        """End the epoch: read its metrics, validate, and find failures. Yields after every validation batch."""
        begun = time.perf_counter()
        self.close()
        self.epoch += 1
        on = self.lane.on()
        values = self.lane.epoch_values()
        self.add_losses(self.lane.take_losses())
        self._epoch_seconds += time.perf_counter() - begun  # the device has done all steps by now
        steps = self.step_in_epoch - self._first_step
        self.lane.record_time(steps, self._epoch_seconds, first=self.epoch == 1)
        if self.validation is not None:
            for name, column in (yield from self.lane.evaluating(self.validation)).items():
                values[f"val_{name}"] = column
        self.step_in_epoch, self.read_up = 0, False
        failures = self.find_failures(self.epoch)
        still = on & self.lane.on()
        rows: list[dict[str, float]] = [{} for _ in self.lane.members]
        by_slot = zip(*(column.tolist() for column in values.values()), strict=True)
        for position, numbers in zip(self.lane.slots.tolist(), by_slot, strict=True):
            if still[position]:
                rows[position] = dict(zip(values, numbers, strict=True))
        self.schedules.end_epoch(rows)
        self._ahead.forget()
        self.lane.epochs[still] += 1
        results = {self.lane.members[position].name: rows[position] for position in np.flatnonzero(still)}
        return EpochReport(self.epoch, results, failures, steps, self._epoch_seconds)

    def add_losses(self, losses: Mapping[str, Sequence[float]]) -> None:
        """Keep the losses of single steps until somebody takes them."""
        for name, own in losses.items():
            self._losses.setdefault(name, []).extend(own)

    def take_losses(self) -> dict[str, list[float]]:
        """Return the losses of the steps since the last call by member, if they are recorded."""
        self.add_losses(self.lane.take_losses())
        found, self._losses = self._losses, {}
        return found

    def begin(self) -> None:
        """Take members without epochs left out of the training."""
        done = [name for name, epochs in zip(self.names, self.epochs, strict=True) if epochs <= self.epoch]
        self.lane.rest(done)

    def leave(self, stopped: Sequence[str]) -> None:
        """Take out the members that are done or were stopped, and free their slots."""
        self.lane.rest(stopped)
        self.begin()
        if self.remote is not None:
            self.remote.stopped += stopped
            return
        kept = self.lane.compact()
        if kept is not None:
            self._ahead.forget()
            self._feed_slots(kept)

    def give_up_reading(self) -> None:
        """Have threads that wait for this lane's loaders stop, after Ctrl-C. Any thread may call it."""
        for feed in self.feeds:
            feed.give_up()

    def close(self) -> None:
        """Stop reading ahead."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    # --- failures ------------------------------------------------------------------------------------------------

    def find_failures(self, epoch: int) -> dict[str, Failure]:
        """Set aside the members that have failed in this epoch, and return them."""
        lane, training = self.lane, set(self.training())
        found: dict[str, Failure] = {}
        codes = lane.engine.trouble()
        for slot in np.flatnonzero(codes).tolist():
            found[lane.name_in(slot)] = Failure(epoch, self._updates(slot) + 1, REASONS[int(codes[slot])])
        for what, feed in zip(("data", "validation data"), self.feeds, strict=False):
            for slot, error in feed.failures.items():
                step = int(self.steps_done[lane.slots[slot]]) + (what == "data")
                reason = f"its {what} raised {type(error).__name__}: {error}"
                found.setdefault(lane.name_in(slot), Failure(epoch, step, reason))
        found = {name: failure for name, failure in found.items() if name in training}
        lane.rest(found, failed=True)
        failed, self._failed = self._failed, {}
        return {**found, **failed}

    def _fail_raised(self, causes: Mapping[int, Exception]) -> None:
        """Set aside the members, by slot, whose steps raised."""
        self.raised = next(iter(causes.values()))
        reasons = {}
        for slot, error in causes.items():
            if isinstance(error, CannotFuseError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # the error of the model itself
            reasons[slot] = f"its step raised {type(error).__name__}: {error}"
        self._fail(reasons)

    def _fail(self, reasons: Mapping[int, str]) -> None:
        """Set aside the members in some slots. The report of this epoch has the reasons."""
        for slot, reason in reasons.items():
            # A turn may have several steps, so the step is found from the number of updates.
            failure = Failure(self.epoch + 1, self._updates(slot) + 1, reason)
            self._failed[self.lane.name_in(slot)] = failure
        self.lane.rest(self._failed, failed=True)

    def _updates(self, slot: int) -> int:
        """Return how many steps of this fit have changed the weights of a member."""
        return int(self.lane.engine.steps_taken()[slot] - self.before["updates"][self.lane.slots[slot]])

    def _backup(self) -> State | None:
        """Return a copy of the state before the first step of a kind, which may run out of memory half-way.

        All steps of one kind take the same memory, so later ones need no copy. The host's memory hardly ever runs
        out with an error, so a large state there is not copied either.
        """
        if self.lane.device.startswith("cpu") and self.lane.engine.bytes > MAX_BACKUP_BYTES:
            return None
        return self.lane.read(self.names, host=True)

    def _run_out_of_memory(self, error: Exception, backup: State | None, *, unchanged: bool) -> None:
        """Halve the lane if its state is that from before the step, or can be; otherwise set its members aside."""
        self.close()
        self.ran_out_of_memory = True
        reason = "the device ran out of memory"
        if backup is not None:
            self.lane.write(self.names, backup)
        if (backup is not None or unchanged) and self.may_halve and len(self.training()) > 1:
            raise TooWideError(self) from error
        if backup is not None:
            reason += " at the first step"
        elif not unchanged and not self.lane.engine.undoes_steps:
            reason += " in the middle of the run; the weights may be between two steps"
        self._fail(dict.fromkeys(np.flatnonzero(self.lane.on()[self.lane.slots]).tolist(), reason))

    # --- state and progress --------------------------------------------------------------------------------------

    def bring_here(self, *, to_change: bool = False) -> Lane:
        """Return the lane with the members' current state, which a worker may have reported.

        Args:
            to_change: True if the caller changes the state. A worker then loads it before its next step.
        """
        if self.remote is not None:
            if self.remote.state is not None:
                self.lane.write(self.names, self.remote.state)
                self.remote.state = None
            self.remote.changed |= to_change
        return self.lane

    def host_state(self) -> State:
        """Return the members' current state on the host, wherever the steps are taken."""
        reported = None if self.remote is None else self.remote.state
        return self.lane.read(self.names, host=True) if reported is None else reported

    def progress(self) -> Progress:
        """Return how far the run has come."""
        before = {name: column.tolist() for name, column in self.before.items()}
        schedules, factors = self.schedules.state(), self.factors.state()
        return Progress(self.lane.progress(), schedules, self.epoch, self.step_in_epoch, before, factors)

    def resume(self, lane: dict[str, Json], epoch: int, step: int) -> None:
        """Continue from the progress of an earlier run of the same lane. Does not restore state and schedules."""
        self.lane.resume(lane)
        self.epoch, self.step_in_epoch = epoch, step
        if self.lane.width < len(self.names):
            self._feed_slots(self.lane.slots.tolist())

    # --- small parts ---------------------------------------------------------------------------------------------

    def _feed_slots(self, slots: list[int]) -> None:
        """Feed only the members in these slots from now on."""
        self.feed = self.feed.select(slots)
        self.validation = self.validation and self.validation.select(slots)

    def _columns(self, batch: Batch) -> Columns:
        """Return the hyperparameters of the step of a batch."""
        if not (self.schedules.by_step and self.lane.engine.looks_ahead):
            return self.factors.applied(self.schedules.at(self.steps_done))
        known = self.known_steps
        left = None if known is None else int(known[self.lane.on()].max(initial=0)) - self.step_in_epoch
        return self._ahead.at(self.steps_done, self.lane.stepping(batch), left)

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
