"""A fit under way: what its lanes report, the history, callbacks, checkpoints and the progress shown."""

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelfleet import checkpoints
from modelfleet.callbacks import Callback, Checkpoint
from modelfleet.errors import AllFailedError, BusyError, InputError
from modelfleet.frameworks import randomness
from modelfleet.history import History
from modelfleet.planning.assembly import Part
from modelfleet.progress import Reporter
from modelfleet.sharing.shifts import Moment, Report, Sharing, Shift, Stepped, Way


class Fit:
    """A fit under way. Callbacks see it as `run` (`callbacks.Run`)."""

    def __init__(
        self,
        fleet: Any,
        shifts: Sequence[Shift],
        sharing: Sharing,
        sharing_name: str,
        callbacks: Sequence[Callback],
        reporter: Reporter,
        before: randomness.State,
        *,
        side_by_side: bool,
        devices: Sequence[str] = (),
    ) -> None:
        self.fleet = fleet
        self.shifts = list(shifts)
        self.history = History(fleet.names)
        self.epoch = 0
        self.step = 0
        self.epochs = max(int(shift.epochs.max()) for shift in shifts)
        self.active: tuple[str, ...] = ()
        self.callbacks = list(callbacks)
        self.randomness = dict(before)
        """The state of the generators when the epoch at hand began."""
        self.sharing_name = sharing_name
        self.devices = list(devices)
        self.epoch_seconds: float | None = None
        """What an epoch of everything took, once the first was over."""
        self._sharing = sharing
        self._reporter = reporter
        self._places = {name: shift for shift in self.shifts for name in shift.names}
        self._stopping: dict[str, str] = {}
        self._saving: list[Path] = []
        self._interrupted = False
        self._told = 0, 0  # the epoch and position of the step that callbacks were told of last
        self._shown = 0
        self._first_shown: tuple[int, float] | None = None
        self._epoch_begun = time.monotonic()
        watched = any(callback.wants_steps for callback in self.callbacks)
        together = side_by_side or any(callback.together for callback in self.callbacks)
        self._over = False
        self._way = Way(together, watched, lambda: self._interrupted or self._over, side_by_side, self._halve)

    # --- what callbacks call -------------------------------------------------------------------------------------

    def stop(self, name: str, reason: str = "stopped by a callback") -> None:
        """Stop a member at the end of this epoch and free its slot."""
        self._place(name)
        self._stopping.setdefault(name, reason)

    def snapshot(self, name: str) -> Any:
        """A copy of the member's weights as they are now."""
        shift = self._at_rest(name, "run.snapshot")
        shift.pull()
        return shift.lane.snapshot(shift.lane.places[name])

    def restore(self, name: str, snapshot: Any) -> None:
        """Give a member, training or not, the weights of a snapshot."""
        shift = self._at_rest(name, "run.restore")
        shift.pull()
        shift.lane.restore(shift.lane.places[name], snapshot)
        shift.push()

    def sync(self, name: str) -> Any:
        """The member's model, with its state as it is now."""
        shift = self._at_rest(name, "run.sync")
        shift.pull()
        return shift.lane.sync(shift.lane.places[name])

    def sync_all(self, verb: str) -> None:
        """Bring all members' models to their state of now, for a verb that was called in a callback."""
        for shift in self._placed():
            self._refuse_busy(shift, f"fleet.{verb}")
            shift.pull()
            lane = shift.lane
            own = [name for name in lane.names if self._places[name] is shift]
            if lane.width == len(lane.members) == len(own):
                lane.engine.write_back(lane.members)
            else:
                for name in own:
                    lane.sync(lane.places[name])

    def parts(self) -> list[Part]:
        """The members in the lanes that they are in now."""
        found = []
        for shift in self._placed():
            own = tuple(name for name in shift.names if self._places[name] is shift)
            found.append(replace(shift.lane.part, names=own))
        return found

    def take(self, name: str) -> None:
        """Take what the member's model holds now back into the training."""
        shift = self._at_rest(name, "run.take")
        shift.pull()
        shift.lane.take(shift.lane.places[name])
        shift.push()

    def epochs_of(self, name: str) -> int:
        """How many epochs a member is to train in this fit."""
        shift = self._place(name)
        return int(shift.epochs[shift.lane.places[name]])

    def steps_of(self, name: str) -> int | None:
        """How many steps a member's epoch has; None if only its loader knows."""
        shift = self._place(name)
        return None if shift.known_steps is None else int(shift.known_steps[shift.lane.places[name]])

    def lane_here(self, name: str) -> Any:
        """The member's lane, if its steps are taken in this process; else None."""
        shift = self._at_rest(name, "run.lane_here")
        return shift.lane if shift.away is None else None

    def framework(self, name: str) -> Any:
        """The adapter of a member's framework."""
        return self._place(name).lane.members[0].framework

    def place(self, shift: Shift) -> int:
        """The number of the device that a lane is on."""
        device = shift.lane.device
        return self.devices.index(device) if device in self.devices else 0

    def save(self, folder: str | Path) -> None:
        """Keep a checkpoint of the whole run, as it is when every callback of this moment has been called."""
        self._saving.append(Path(folder))

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> History:
        """Train until every member is done, or Ctrl-C."""
        begun = time.monotonic()
        self._resume()
        self._announce()
        shared = any(shift.share != 1 for shift in self.shifts)  # turns are counted: each is a step
        for shift in self.shifts:
            shift.divisible = not self._way.side_by_side
            shift.take_several(one=self._way.watched or self._way.side_by_side or shared)
            shift.begin()
        self.active = self._training()
        stopped_by: str | None = "an error"
        try:
            with self._listening():
                self._call("on_fit_start")
                with self._moments() as moments:
                    for moment in moments:
                        if isinstance(moment, Stepped):
                            self._stepped(moment)
                        else:
                            self._ended(moment.reports)
                        self._save()
            if self._interrupted:
                self._set_aside()
            stopped_by = "Ctrl-C" if self._interrupted else None
            self.active = self._training()
            self._call("on_fit_end")
            self._refuse_all_failed()
        finally:
            for shift in self.shifts:
                shift.close()
                shift.lane.expand()
                shift.lane.engine.stop()
            self._reporter.end(self.history, time.monotonic() - begun, stopped_by)
        return self.history

    @contextmanager
    def _moments(self) -> Iterator[Iterator[Moment]]:
        """What happens. When a callback raises, lanes that run beside it stop before anybody looks at them."""
        moments = self._sharing(self.shifts, self._way)
        try:
            yield moments
        finally:
            self._over = True
            if isinstance(moments, Generator):
                moments.close()

    def _stepped(self, moment: Stepped) -> None:
        if self._way.watched and not self._all_stepped(moment.shift):
            return
        self._told = moment.shift.epoch, moment.shift.position
        self.step = max(int((shift.lane.steps - shift.started).max()) for shift in self.shifts)
        leader = self._leader()
        self._reporter.step(leader.position, leader.epoch + 1, self._note())
        self._call("on_step_end")

    def _all_stepped(self, shift: Shift) -> bool:
        """Whether a step was taken by all lanes now, and callbacks have not been told of it."""
        working = [other for other in self.shifts if other.working]
        now = shift.epoch, shift.position
        return now > self._told and all((other.epoch, other.position) >= now for other in working)

    def _ended(self, reports: Sequence[tuple[Shift, Report]]) -> None:
        self.epoch = max(report.epoch for _, report in reports)
        took_part: set[str] = set()
        for _, report in reports:
            for name, values in report.values.items():
                self.history.record(name, values)
            for name, failure in report.failures.items():
                self.history.fail(name, failure)
            took_part |= report.values.keys()
        self.active = tuple(name for name in self.fleet.names if name in took_part)
        self._call("on_epoch_end")
        for shift, _ in reports:
            shift.leave(self._stopped(shift))
        self.active = self._training()
        self.randomness = randomness.state()
        for shift, _ in reports:  # loaders that a worker reads draw there
            if shift.away is not None:
                self.randomness.update(shift.randomness or {})
        self._show()

    def _stopped(self, shift: Shift) -> list[str]:
        """The members of a lane that are to stop now."""
        stopped = [name for name in shift.training() if name in self._stopping]
        for name in shift.names:
            self._stopping.pop(name, None)
        for name in stopped:
            self.history.stopped[name] = shift.epoch
        return stopped

    def _halve(self, shift: Shift) -> None:
        """Two lanes for one whose memory has run out."""
        halves = self.fleet._halved(shift)
        shift.lane.rest([shift.lane.places[name] for name in shift.training()])
        self.shifts += halves
        self._places.update({name: half for half in halves for name in half.names})

    def _set_aside(self) -> None:
        """After a run that was cut short: tell whom its last steps have brought into trouble."""
        for shift in self.shifts:
            shift.pull()
            for name, failure in shift.trouble(shift.epoch + 1).items():
                self.history.fail(name, failure)

    def _refuse_all_failed(self) -> None:
        """Raise `AllFailedError` if nobody is left, whatever the reasons: a fit without a result is no success."""
        failed = self.history.failed
        if len(failed) < len(self.fleet):
            return
        # What raised, or a worker that died, tells more of what is wrong than numbers that went bad.
        told = sorted(failed, key=lambda name: (failed[name].diverged, failed[name].epoch, failed[name].step))[0]
        failure = failed[told]
        advice = "Often a lower lr helps, or clip_norm=1.0; look for NaN in the data. " if failure.diverged else ""
        everybody = f"All {len(failed):,} members failed" if len(failed) > 1 else "It was the only member"
        raise AllFailedError(
            f"member {told!r} failed in epoch {failure.epoch}, step {failure.step:,}: {failure.reason}. {advice}"
            f"{everybody}: the history of this error has every reason.",
            self.history,
        ) from (None if failure.diverged else self._cause())

    def _cause(self) -> BaseException | None:
        """What a step or the data of a member raised, if it was here."""
        for shift in self.shifts:
            if shift.raised is not None:
                return shift.raised
        feeds = [feed for shift in self.shifts for feed in (shift.feed, shift.validation) if feed is not None]
        return next((error for feed in feeds for error in feed.failures.values()), None)

    def _show(self) -> None:
        """Tell the reporter when the slowest lane has ended an epoch."""
        working = [shift for shift in self.shifts if shift.working]
        done = min((shift.epoch for shift in working), default=self.epochs)
        if not working:
            done = max(shift.epoch for shift in self.shifts)
        if done > self._shown:
            now = time.monotonic()
            if self._first_shown is None:
                self._first_shown = done, now
                self.epoch_seconds = (now - self._epoch_begun) / (done - self._shown)
            else:
                first, then = self._first_shown
                self.epoch_seconds = (now - then) / (done - first)
            self._shown = done
            self._reporter.epoch(done, self.history, self.active, now - self._epoch_begun)
            self._epoch_begun = now

    # --- keeping -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        for folder in dict.fromkeys(self._saving):
            for shift in self.shifts:
                shift.pull()
            checkpoints.save(folder, self, self.callbacks)
        self._saving.clear()

    def _resume(self) -> None:
        for callback in self.callbacks:
            if isinstance(callback, Checkpoint) and callback.resume and checkpoints.exists(callback.folder):
                found = checkpoints.resume(callback.folder, self, self.callbacks, verify=callback.verify)
                if found is not None:
                    self.epoch, self.step, self.history, self.randomness = found
                    self._shown = self.epoch
                    for shift in self.shifts:
                        shift.randomness = self.randomness
                    self._rewind()
                    return

    def _rewind(self) -> None:
        """Have loaders draw their shuffles as they did when the epoch at hand began."""
        randomness.restore(self.randomness)
        feeds = [*(shift.feed for shift in self.shifts), *(shift.validation for shift in self.shifts)]
        for feed in feeds:
            if feed is not None:
                feed.rewind()
                if self.epoch == 0:  # the first epoch's loaders are all looked into before the fit
                    feed.first()

    # --- small parts ---------------------------------------------------------------------------------------------

    def _leader(self) -> Shift:
        """The lane whose position stands for the fit's: of those that train, the one with the longest epochs."""
        working = [shift for shift in self.shifts if shift.working] or self.shifts
        return max(working, key=lambda shift: 0 if shift.known_steps is None else int(shift.known_steps.max()))

    def _training(self) -> tuple[str, ...]:
        on = {name for shift in self.shifts for name in shift.training()}
        return tuple(name for name in self.fleet.names if name in on)

    def _place(self, name: str) -> Shift:
        if name not in self._places:
            raise InputError(f"there is no member {name!r} in this fit.")
        return self._places[name]

    def _at_rest(self, name: str, verb: str) -> Shift:
        shift = self._place(name)
        self._refuse_busy(shift, verb)
        return shift

    def _refuse_busy(self, shift: Shift, verb: str) -> None:
        if shift.busy and shift.working:
            raise BusyError(
                f"{verb} in a callback: member {shift.names[0]!r} is in the middle of an epoch, in another thread "
                f"or process. Use a modelfleet.Callback with together = True: then all members wait for it."
            )

    def _placed(self) -> list[Shift]:
        """The lanes, without those that others have taken the place of."""
        return list({id(shift): shift for shift in self._places.values()}.values())

    def _call(self, moment: str) -> None:
        for callback in self.callbacks:
            if moment != "on_step_end" or callback.wants_steps:
                getattr(callback, moment)(self)

    def _note(self) -> str | None:
        busy = any(shift.lane.engine.compiling for shift in self.shifts)
        return "compiling in the background" if busy else None

    def _announce(self) -> None:
        steps = [shift.known_steps for shift in self.shifts]
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


@contextmanager
def noticing() -> Iterator[Callable[[], None]]:
    """Notice Ctrl-C while a fit is prepared; gives what raises `KeyboardInterrupt` if there was one.

    What Ctrl-C raises may be lost on the way: Python drops what is raised within a weak reference's callback or a
    `__del__`, as there are in every import.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    pressed = False

    def heard(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        before(number, frame)

    def check() -> None:
        if pressed and before is signal.default_int_handler:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, heard)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
