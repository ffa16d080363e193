"""A shift: a lane at work in a fit."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelfleet.errors import FleetError
from modelfleet.feeds import Batch, Feed
from modelfleet.frameworks import randomness as generators
from modelfleet.frameworks.protocol import REASONS, CannotFuseError, StepError
from modelfleet.history import Failure
from modelfleet.lanes import Lane, Work, in_step
from modelfleet.trees import map_tree

RAISED = "its step raised"
MOST_KEPT = 1 << 26  # bytes


class TooWideError(FleetError):
    """A lane's step has run out of memory, and its state is as it was before: it can be cut in two."""

    def __init__(self, shift: "Shift") -> None:
        super().__init__(f"a lane of {len(shift.names)} members has run out of memory")
        self.shift = shift


@dataclass
class Report:
    """What a lane tells at the end of an epoch."""

    epoch: int
    """Epochs finished in this fit."""
    values: dict[str, dict[str, float]]
    """The loss and the metrics of the members that took part and have not failed."""
    failures: dict[str, Failure]
    """Who was set aside in this epoch, and why."""
    steps: int
    seconds: float


@dataclass
class Shift:
    """A lane at work: what it is fed, for how long, and with which hyperparameters."""

    lane: Lane
    feed: Feed
    validation: Feed | None
    schedules: Any
    epochs: np.ndarray
    """`(member,)`: how many epochs each member trains in this fit."""
    share: int = 1
    """Turns that it takes while another takes one."""
    several: int = 1
    """Steps that a turn has at most."""
    steps_per_epoch: int | None = None
    """Where an epoch ends before its data do."""
    divisible: bool = False
    """Whether it may be cut in two when memory runs out."""
    epoch: int = 0
    """Epochs finished in this fit."""
    position: int = 0
    """Steps done in the epoch at hand."""
    seconds: float = 0.0
    """Spent in steps, so far."""
    busy: bool = False
    """Whether its steps are being taken beside what is done here, by a thread or a worker."""
    away: Any = field(default=None, repr=False)
    """What is known of it while its steps are taken by a worker (`sharing.away.Away`)."""
    randomness: generators.State | None = field(default=None, repr=False)
    """The state of the generators when its epoch began, where that was not here."""
    _batches: Generator[Batch, None, None] | None = field(default=None, repr=False)
    _spent: float = 0.0
    _first: int = 0

    def __post_init__(self) -> None:
        # As they are for all members; the feed itself narrows with the lane.
        self.started = self.lane.steps.copy()
        self.epochs_before = self.lane.epochs.copy()
        self.rows = self.feed.rows
        self.batches = self.feed.settings
        self.known_steps = self._limited(self.feed.steps)
        self.taken = self.lane.engine.steps_taken().copy()
        self._tried: set[tuple[int, int | None]] = set()
        self._lost: dict[str, Failure] = {}
        self.raised: Exception | None = None  # by the last step that did

    @property
    def names(self) -> list[str]:
        """The members, in their order."""
        return self.lane.names

    @property
    def working(self) -> bool:
        """Whether anybody is still training."""
        return bool(self.lane.on().any())

    def take_several(self, *, one: bool = False) -> None:
        """Take as many steps in a turn as the engine likes; one, if each is watched or has its own columns."""
        self.several = 1 if one or self.schedules.by_step else self.lane.engine.several

    def training(self) -> list[str]:
        """Who is still training."""
        return [name for name, on in zip(self.lane.names, self.lane.on(), strict=True) if on]

    # --- steps ---------------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """The batch of the next turn; None if the epoch is over."""
        if not self.working:
            return None
        if self._batches is None:
            several = self.several
            self._batches = self.feed.epoch(self.epoch, start=self.position, several=several)
            self._spent, self._first = 0.0, self.position
        if self.steps_per_epoch is not None and self.position >= self.steps_per_epoch:
            return None
        return next(self._batches, None)

    def step(self, batch: Batch) -> int:
        """Train on a batch; gives how many steps that was: 0 if nobody is left.

        Raises `TooWideError` if memory runs out.
        """
        begun = time.perf_counter()
        batch = self._cut_short(batch)
        columns = self.schedules.at(self.lane.steps - self.started)
        shape = batch.size, batch.steps
        kept = None if shape in self._tried or self.lane.engine.undoes_steps else self._kept()
        try:
            self.lane.train(batch, columns, self._steps_left())
        except StepError as error:
            self._set_aside(error.causes)
            if not self.working:
                return 0
        except Exception as error:
            if not self.lane.engine.out_of_memory(error):
                raise
            self._out_of_memory(error, kept)
            return 0
        self._tried.add(shape)
        self.position += batch.steps or 1
        self._spent += time.perf_counter() - begun
        return batch.steps or 1

    def _set_aside(self, causes: Mapping[int, Exception]) -> None:
        """Take out the members whose steps raised."""
        self.raised = next(iter(causes.values()))
        for slot, error in causes.items():
            if isinstance(error, CannotFuseError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # what the model said
            member = self.lane.members[self.lane.slots[slot]]
            place = self.lane.places[member.name]
            step = int(self.lane.engine.steps_taken()[slot] - self.taken[place]) + 1  # a turn may be of several
            reason = f"{RAISED} {type(error).__name__}: {error}"
            self._lost[member.name] = Failure(self.epoch + 1, step, reason)
        self.lane.rest([self.lane.places[name] for name in self._lost], failed=True)

    def turn(self) -> int:
        """The next steps; 0 if the epoch is over."""
        batch = self.next_batch()
        return 0 if batch is None else self.step(batch)

    def end_epoch(self) -> Report:
        """Close the epoch: its numbers, validation, and who is in trouble."""
        return in_step([self.ending()])[0]

    def ending(self) -> Work[Report]:
        """Close the epoch, validation batch by batch."""
        begun = time.perf_counter()
        self.close()
        self.epoch += 1
        on = self.lane.on()
        values = self.lane.epoch_values()
        self._spent += time.perf_counter() - begun  # here at the latest the device has done all of its steps
        steps = self.position - self._first
        self.seconds += self._spent
        self.lane.paced(steps, self._spent, first=self.epoch == 1)
        if self.validation is not None:
            for name, column in (yield from self.lane.evaluating(self.validation)).items():
                values[f"val_{name}"] = column
        self.position = 0
        failures = self.trouble(self.epoch)
        still = on & self.lane.on()
        rows: list[dict[str, float]] = [{} for _ in self.lane.members]
        by_slot = zip(*(column.tolist() for column in values.values()), strict=True)
        for place, numbers in zip(self.lane.slots.tolist(), by_slot, strict=True):
            if still[place]:
                rows[place] = dict(zip(values, numbers, strict=True))
        self.schedules.end_epoch(rows)
        self.lane.epochs[still] += 1
        told = {self.lane.members[place].name: rows[place] for place in np.flatnonzero(still)}
        return Report(self.epoch, told, failures, steps, self._spent)

    def trouble(self, epoch: int) -> dict[str, Failure]:
        """Take out whom this epoch has brought into trouble; who, and why."""
        lane, found = self.lane, {}
        codes = lane.engine.trouble()
        for slot in np.flatnonzero(codes):
            place = int(lane.slots[slot])
            if lane.on()[place]:
                step = int(lane.engine.steps_taken()[slot] - self.taken[place]) + 1
                found[place] = Failure(epoch, step, REASONS[int(codes[slot])])
        for what, feed in (("data", self.feed), ("validation data", self.validation)):
            for slot, error in (feed.failures if feed is not None else {}).items():
                place = int(lane.slots[slot])
                if lane.on()[place] and place not in found:
                    step = int(lane.steps[place] - self.started[place]) + (what == "data")
                    reason = f"its {what} raised {type(error).__name__}: {error}"
                    found[place] = Failure(epoch, step, reason)
        lane.rest(list(found), failed=True)
        lost, self._lost = self._lost, {}
        return {**{lane.members[place].name: failure for place, failure in found.items()}, **lost}

    def begin(self) -> None:
        """Take those out who have no epoch left."""
        self.lane.rest(np.flatnonzero(self.epochs <= self.epoch))

    def leave(self, stopped: Sequence[str]) -> None:
        """Let members go that are done or were stopped, and free their slots."""
        self.lane.rest([self.lane.places[name] for name in stopped])
        self.begin()
        if self.away is not None:
            self.away.stopped += stopped
            return
        feeds = [self.feed] if self.validation is None else [self.feed, self.validation]
        self.feed, *rest = self.lane.compact(feeds)
        self.validation = rest[0] if rest else None

    def close(self) -> None:
        """Stop reading ahead."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    # --- when memory runs out ------------------------------------------------------------------------------------

    def _kept(self) -> dict[str, np.ndarray] | None:
        """The state before the first step of a kind: a step that runs out of memory may leave it half done.

        Steps of one kind take the same memory; so where the first one does not run out, the others will not. The
        host's memory hardly ever runs out with an error: a large state there is not copied for it.
        """
        if self.lane.device.startswith("cpu") and self.lane.engine.bytes > MOST_KEPT:
            return None
        return {name: np.array(array) for name, array in self.lane.tensors().items()}

    def _out_of_memory(self, error: Exception, kept: dict[str, np.ndarray] | None) -> None:
        self.close()
        engine = self.lane.engine
        reason = "the device ran out of memory"
        if not engine.undoes_steps:
            if kept is not None:
                engine.load(kept)
                if self.divisible and len(self.training()) > 1:
                    raise TooWideError(self) from error
            when = (
                "in the middle of the run; the weights may be between two steps"
                if kept is None
                else "at the first step"
            )
            reason = f"{reason} {when}"
        for name in self.training():
            place = self.lane.places[name]
            slot = int(np.flatnonzero(self.lane.slots == place)[0])
            step = int(engine.steps_taken()[slot] - self.taken[place]) + 1
            self._lost[name] = Failure(self.epoch + 1, step, reason)
        self.lane.rest([self.lane.places[name] for name in self._lost], failed=True)

    # --- where its state is --------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Have the members' state here, wherever the steps are taken."""
        if self.away is not None and not self.away.seen:
            self.lane.engine.load(self.away.tensors)
            self.away.seen = True

    def tensors(self) -> dict[str, np.ndarray]:
        """The members' state, wherever the steps are taken."""
        if self.away is not None and not self.away.seen:
            return self.away.tensors
        return self.lane.tensors()

    def push(self) -> None:
        """Note that the members' state was changed here: where the steps are taken it must be read anew."""
        if self.away is not None:
            self.away.changed = True

    # --- small parts ---------------------------------------------------------------------------------------------

    def _steps_left(self) -> int:
        """The steps from here to the end, as far as they are known."""
        on = self.lane.on()
        if not on.any():
            return 0
        known = self._limited(self.feed.steps)
        per_epoch = self.position + 1 if known is None else int(known.max())
        return max(0, (int(self.epochs[on].max()) - self.epoch) * per_epoch - self.position)

    def _limited(self, steps: np.ndarray | None) -> np.ndarray | None:
        if steps is None or self.steps_per_epoch is None:
            return steps
        return np.minimum(steps, self.steps_per_epoch)

    def _cut_short(self, batch: Batch) -> Batch:
        """Only as many steps of a batch as the epoch has left."""
        if self.steps_per_epoch is None or batch.steps is None:
            return batch
        left = self.steps_per_epoch - self.position
        if batch.steps <= left:
            return batch
        return Batch(map_tree(lambda leaf: leaf[:left], batch.data), batch.shared, batch.counts, left)


@dataclass(frozen=True)
class Stepped:
    """A turn was taken."""

    shift: Shift
    steps: int


@dataclass(frozen=True)
class Ended:
    """Epochs were ended: of one lane, or of all that are training if they go together."""

    reports: list[tuple[Shift, Report]]


Moment = Stepped | Ended
Sharing = Callable[[Sequence[Shift], "Way"], Iterator[Moment]]


@dataclass(frozen=True)
class Way:
    """How the lanes of a fit go."""

    together: bool
    """Whether a lane that has ended its epoch waits for the others."""
    watched: bool
    """Whether every step is told, one at a time."""
    stopped: Callable[[], bool]
    """Whether to stop after the steps at hand."""
    side_by_side: bool
    """Whether lanes read one loader together, and so must be fed in step."""
    halve: Callable[[Shift], None]
    """Puts two lanes in the place of one whose memory has run out."""


def next_wave(shifts: Sequence[Shift]) -> list[Shift]:
    """The lanes that may train now: those of the first wave that is not done."""
    working = [shift for shift in shifts if shift.working]
    if not working:
        return []
    wave = min(shift.lane.part.wave for shift in working)
    return [shift for shift in working if shift.lane.part.wave == wave]


def due(shifts: Sequence[Shift], way: Way) -> list[Shift]:
    """The lanes that take turns now: those of a wave, or all that read one loader, which is read only once."""
    return [shift for shift in shifts if shift.working] if way.side_by_side else next_wave(shifts)


def end_epochs(shifts: Sequence[Shift]) -> list[tuple[Shift, Report]]:
    """Close the epoch of several lanes that go side by side."""
    return list(zip(shifts, in_step([shift.ending() for shift in shifts]), strict=True))
