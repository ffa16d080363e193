"""The loop behind `fit`: every lane's steps in turn, epoch by epoch."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelfleet import checkpoints
from modelfleet.callbacks import Callback, Checkpoint
from modelfleet.errors import InputError
from modelfleet.feeds import Batch, Feed
from modelfleet.history import Failure, History
from modelfleet.lanes import Lane
from modelfleet.progress import Reporter


@dataclass
class Shift:
    """A lane at work in a fit: what it is fed, for how long, and with which hyperparameters."""

    lane: Lane
    feed: Feed
    validation: Feed | None
    schedules: Any
    epochs: np.ndarray
    """`(member,)`: how many epochs each member trains in this fit."""
    started: np.ndarray
    """`(member,)`: the steps each had taken before."""

    def __post_init__(self) -> None:
        # As they are for all members; the feed itself narrows with the lane.
        self.rows = self.feed.rows
        self.steps_per_epoch = self.feed.steps
        self.taken = self.lane.engine.steps_taken().copy()

    def steps_left(self, epoch: int, done: int) -> int:
        """The steps from here to the end, as far as they are known."""
        on = self.lane.on()
        if not on.any():
            return 0
        per_epoch = done + 1 if self.feed.steps is None else int(self.feed.steps.max())
        return max(0, (int(self.epochs[on].max()) - epoch) * per_epoch - done)


class Fit:
    """A fit under way. Callbacks see it as `run` (`callbacks.Run`)."""

    def __init__(
        self,
        fleet: Any,
        shifts: Sequence[Shift],
        callbacks: Sequence[Callback],
        reporter: Reporter,
        framework: Any,
        randomness: Any,
    ) -> None:
        self.fleet = fleet
        self.shifts = list(shifts)
        self.history = History(fleet.names)
        self.epoch = 0
        self.step = 0
        self.epochs = max(int(shift.epochs.max()) for shift in shifts)
        self.active: tuple[str, ...] = ()
        self.callbacks = list(callbacks)
        self._reporter = reporter
        self._framework = framework
        self._places = {
            name: (shift, position) for shift in self.shifts for position, name in enumerate(shift.lane.names)
        }
        self._stopping: dict[str, str] = {}
        self._saving: list[Path] = []
        self._interrupted = False
        self._position = 0  # steps done in the epoch at hand
        self._randomness = randomness

    # --- what callbacks call -------------------------------------------------------------------------------------

    def stop(self, name: str, reason: str = "stopped by a callback") -> None:
        """Stop a member at the end of this epoch and free its slot."""
        self._place(name)
        self._stopping.setdefault(name, reason)

    def snapshot(self, name: str) -> Any:
        """A copy of the member's weights as they are now."""
        shift, position = self._place(name)
        return shift.lane.snapshot(position)

    def restore(self, name: str, snapshot: Any) -> None:
        """Give a member, training or not, the weights of a snapshot."""
        shift, position = self._place(name)
        shift.lane.restore(position, snapshot)

    def save(self, folder: str | Path) -> None:
        """Keep a checkpoint of the whole run, as it is when every callback of this moment has been called."""
        self._saving.append(Path(folder))

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> History:
        """Train until every member is done, or Ctrl-C."""
        begun = time.monotonic()
        self._resume()
        self._announce()
        for shift in self.shifts:
            shift.lane.rest(np.flatnonzero(shift.epochs <= self.epoch))
        self.active = self._training()
        stopped_by: str | None = "an error"
        try:
            with self._listening():
                self._call("on_fit_start")
                while self.active and not self._interrupted:
                    self._run_epoch()
            stopped_by = "Ctrl-C" if self._interrupted else None
            self.active = self._training()
            self._call("on_fit_end")
        finally:
            for shift in self.shifts:
                shift.lane.expand()
                shift.lane.engine.programs.stop()
            self._reporter.end(self.history, time.monotonic() - begun, stopped_by)
        return self.history

    def _run_epoch(self) -> None:
        begun = time.monotonic()
        for batches in self._steps():
            for shift, batch in batches:
                columns = shift.schedules.at(shift.lane.steps - shift.started)
                shift.lane.train(batch, columns, shift.steps_left(self.epoch, self._position))
            self.step += 1
            self._position += 1
            self._reporter.step(self._position, self.epoch + 1, self._note())
            self._call("on_step_end")
            self._save()
            if self._interrupted:
                for shift in self.shifts:
                    self._set_aside(shift, self.epoch + 1)
                return
        self.epoch += 1
        self._position = 0
        self._record()
        self._call("on_epoch_end")
        self._leave()
        self._randomness = self._framework.randomness()
        self._save()
        self._reporter.epoch(self.epoch, self.history, self.active, time.monotonic() - begun)

    def _steps(self) -> Iterator[list[tuple[Shift, Batch]]]:
        """The batches of every lane that is training, a step of each at a time."""
        working = [shift for shift in self.shifts if shift.lane.on().any()]
        feeds = {id(shift): shift.feed.epoch(self.epoch, start=self._position) for shift in working}
        try:
            while True:
                step = []
                for shift in working:
                    batch = next(feeds[id(shift)], None)
                    if batch is not None:
                        step.append((shift, batch))
                if not step:
                    return
                yield step
        finally:
            for feed in feeds.values():
                feed.close()

    def _record(self) -> None:
        """Put the epoch's numbers into the history, and set aside who is in trouble."""
        for shift in self.shifts:
            on = shift.lane.on()
            if not on.any():
                continue
            values = shift.lane.epoch_values()
            if shift.validation is not None:
                for name, column in shift.lane.evaluate(shift.validation).items():
                    values[f"val_{name}"] = column
            self._set_aside(shift, self.epoch)
            rows: list[dict[str, float]] = [{} for _ in shift.lane.members]
            still = on & shift.lane.on()
            by_slot = zip(*(column.tolist() for column in values.values()), strict=True)
            for position, numbers in zip(shift.lane.slots.tolist(), by_slot, strict=True):
                if still[position]:
                    rows[position] = dict(zip(values, numbers, strict=True))
                    self.history.record(shift.lane.members[position].name, rows[position])
            shift.schedules.end_epoch(rows)
            shift.lane.epochs[still] += 1
        self.active = self._training()

    def _set_aside(self, shift: Shift, epoch: int) -> None:
        """Take out whom this epoch has brought into trouble."""
        lane = shift.lane
        codes = lane.engine.trouble()
        for slot in np.flatnonzero(codes):
            position = int(lane.slots[slot])
            if lane.on()[position]:
                step = int(lane.engine.steps_taken()[slot] - shift.taken[position]) + 1
                reason = self._framework.REASONS[int(codes[slot])]
                self._fail(shift, position, Failure(epoch, step, reason))
        for what, feed in (("data", shift.feed), ("validation data", shift.validation)):
            for slot, error in (feed.failures if feed is not None else {}).items():
                position = int(lane.slots[slot])
                if lane.on()[position]:
                    step = int(lane.steps[position] - shift.started[position]) + (what == "data")
                    reason = f"its {what} raised {type(error).__name__}: {error}"
                    self._fail(shift, position, Failure(epoch, step, reason))

    def _fail(self, shift: Shift, position: int, failure: Failure) -> None:
        shift.lane.rest([position], failed=True)
        self.history.fail(shift.lane.members[position].name, failure)

    def _leave(self) -> None:
        """Let members go that are done or were stopped, and free their slots."""
        for name in self._stopping:
            shift, position = self._places[name]
            if shift.lane.on()[position]:
                self.history.stopped[name] = self.epoch
                shift.lane.rest([position])
        self._stopping.clear()
        for shift in self.shifts:
            shift.lane.rest(np.flatnonzero(shift.epochs <= self.epoch))
            feeds = [shift.feed] if shift.validation is None else [shift.feed, shift.validation]
            shift.feed, *rest = shift.lane.compact(feeds)
            shift.validation = rest[0] if rest else None
        self.active = self._training()

    # --- keeping -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        for folder in dict.fromkeys(self._saving):
            checkpoints.save(folder, self, self.callbacks, self._framework)
        self._saving.clear()

    def _resume(self) -> None:
        for callback in self.callbacks:
            if isinstance(callback, Checkpoint) and callback.resume and checkpoints.exists(callback.folder):
                found = checkpoints.resume(callback.folder, self, self.callbacks, self._framework)
                if found is not None:
                    self.epoch, self.step, self._position, self.history, self._randomness = found
                    self._rewind()
                    return

    def _rewind(self) -> None:
        """Have loaders draw their shuffles as they did when the epoch at hand began."""
        self._framework.restore_randomness(self._randomness)
        feeds = [*(shift.feed for shift in self.shifts), *(shift.validation for shift in self.shifts)]
        for feed in feeds:
            if feed is not None:
                feed.rewind()
                if self.epoch == 0:  # the first epoch's loaders are all looked into before the fit
                    feed.first()

    @property
    def position(self) -> int:
        """Steps done in the epoch at hand."""
        return self._position

    @property
    def randomness(self) -> Any:
        """The state of the framework's generator when the epoch at hand began."""
        return self._randomness

    # --- small parts ---------------------------------------------------------------------------------------------

    def _training(self) -> tuple[str, ...]:
        on = {
            member.name
            for shift in self.shifts
            for member, on in zip(shift.lane.members, shift.lane.on(), strict=True)
            if on
        }
        return tuple(name for name in self.fleet.names if name in on)

    def _place(self, name: str) -> tuple[Shift, int]:
        if name not in self._places:
            raise InputError(f"there is no member {name!r} in this fit.")
        return self._places[name]

    def _call(self, moment: str) -> None:
        for callback in self.callbacks:
            if moment != "on_step_end" or callback.wants_steps:
                getattr(callback, moment)(self)

    def _note(self) -> str | None:
        busy = any(shift.lane.engine.programs.compiling for shift in self.shifts)
        return "compiling in the background" if busy else None

    def _announce(self) -> None:
        steps = [shift.feed.steps for shift in self.shifts]
        rows = [shift.feed.rows for shift in self.shifts]
        self._reporter.start(
            self.fleet.names,
            self.epochs,
            None if any(s is None for s in steps) else max(int(s.max()) for s in steps if s is not None),
            None if any(r is None for r in rows) else sum(int(r.sum()) for r in rows if r is not None),
        )

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Ctrl-C stops after the step at hand; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def heard(number: int, frame: Any) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        before = signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
