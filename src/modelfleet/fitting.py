"""One fit: runs its lanes, and keeps the history, callbacks, checkpoints and progress."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from modelfleet import checkpoints
from modelfleet.callbacks import Callback
from modelfleet.errors import BusyError, InputError
from modelfleet.exchange import Distill
from modelfleet.failures import Failure, all_failed
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.history import History
from modelfleet.interrupts import StopRequest
from modelfleet.lanes import Lane, LaneSpec
from modelfleet.planning.plan import Plan
from modelfleet.progress import Reporter
from modelfleet.runs.changed_numbers import ChangedNumbers
from modelfleet.runs.events import Event, Reports, RunOptions, Sharing, StepsTaken
from modelfleet.runs.lane_run import LaneRun
from modelfleet.runs.loaders import Loaders
from modelfleet.runs.member_access import MemberAccess
from modelfleet.runs.teaching import Teaching
from modelfleet.types import Model, State


class FleetOfFit(Protocol):
    """Part of a fleet that its fit uses. Callbacks get the `Fleet` itself."""

    @property
    def names(self) -> list[str]:
        """Return the members' names."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, name: str) -> Model: ...


class Fit:
    """A fit that is running. Callbacks see it as `run` (`callbacks.Run`).

    Args:
        fleet: The fleet.
        plan: The plan that is executed.
        runs: The runs of its lanes.
        sharing: Runs the lanes.
        halve: Returns two runs in place of one that has run out of memory.
        callbacks: The callbacks.
        reporter: Shows the progress.
        generators: State of the random generators before any loader has drawn from them.
        in_step: True if the lanes read one loader.
        devices: The names of the fleet's devices.
        hyperparameters: What each member was built and compiled with, for the history.
    """

    def __init__(
        self,
        fleet: FleetOfFit,
        plan: Plan,
        runs: Sequence[LaneRun],
        sharing: Sharing,
        halve: Callable[[LaneRun], list[LaneRun]],
        callbacks: Sequence[Callback],
        reporter: Reporter,
        generators: global_generators.State,
        *,
        in_step: bool,
        devices: Sequence[str],
        hyperparameters: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.fleet = fleet
        self.plan = plan
        self.runs = list(runs)
        self._past = max(run.initial_epoch for run in runs)  # epochs of lanes count from here
        self.history = History(fleet.names, hyperparameters, self._past)
        self.epoch = self._past
        self.step = 0
        self.epochs = self._past + max(int(run.epochs.max()) for run in runs)
        self.active: tuple[str, ...] = ()
        self.members = MemberAccess(fleet.names, lambda name: self._idle_run(name, "an exchange"))
        self.callbacks = list(callbacks)
        own = ((run.lane.members, run.lane.tasks) for run in (self.runs if self.callbacks else ()))
        self.changed_numbers = ChangedNumbers(pair for both in own for pair in zip(*both, strict=True))
        self._loaders = Loaders(self.runs)
        self.generators = {**generators, **self._loaders.state()}
        """State of the random generators at the start of the current epoch."""
        self.devices = list(devices)
        self.epoch_seconds: float | None = None
        """Time of an epoch of all lanes, after the first one."""
        self._sharing, self._halve_run = sharing, halve
        self._reporter = reporter
        self._run_of = {name: run for run in self.runs for name in run.names}
        self._stopping: dict[str, str] = {}
        self._to_save: list[Path] = []
        self._ctrl_c = StopRequest()
        self._over = False
        self._last_step = 0, 0  # the last epoch and step that callbacks have seen
        self._shown = 0
        self._first_shown: tuple[int, float] | None = None
        self._epoch_start = time.monotonic()
        distilling = [callback for callback in self.callbacks if isinstance(callback, Distill)]
        self._options = RunOptions(
            together=in_step or any(callback.together for callback in self.callbacks),
            watched=any(callback.wants_steps for callback in self.callbacks),
            stopped=lambda: self._ctrl_c.pressed or self._over,
            in_step=in_step or bool(distilling),
            halve=self._halve,
            teach=Teaching(distilling[0], self.runs) if distilling else None,
        )

    # --- for callbacks -------------------------------------------------------------------------------------------

    def stop(self, name: str, reason: str = "stopped by a callback") -> None:
        """Stop a member at the end of this epoch and free its slot."""
        self._run(name)
        self._stopping.setdefault(name, reason)

    def snapshot(self, name: str) -> State:
        """Return a copy of a member's current weights."""
        ((_, state),) = self._idle_run(name, "run.snapshot").bring_here().read_apart([name], WEIGHTS)
        return state

    def restore(self, name: str, snapshot: State) -> None:
        """Give a member the weights of a snapshot, whether it is still training or not."""
        self._idle_run(name, "run.restore").bring_here(to_change=True).write([name], snapshot)

    def sync(self, name: str) -> Model:
        """Write a member's current state into its model, and return the model."""
        lane = self._idle_run(name, "run.sync").bring_here()
        lane.scatter([name])
        return lane.members[lane.positions[name]].model

    def take(self, name: str) -> None:
        """Read a member's state from its model, and continue the training with it."""
        self._idle_run(name, "run.take").bring_here(to_change=True).gather([name])

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint of the whole run when all callbacks of this event are done."""
        self._to_save.append(Path(folder))

    # --- for verbs within a callback, and for a framework's own callbacks ----------------------------------------

    def sync_all(self, verb: str) -> None:
        """Write the current state of all members into their models, for a verb that a callback has called."""
        for run, names in self._current_runs():
            self._refuse_busy(run, f"fleet.{verb}")
            run.bring_here().scatter(names)

    def specs(self) -> list[LaneSpec]:
        """Return the lanes that the members are in now."""
        return [replace(run.lane.spec, members=tuple(names)) for run, names in self._current_runs()]

    def epochs_of(self, name: str) -> int:
        """Return the number of a member's last epoch."""
        run = self._run(name)
        return self._past + int(run.epochs[run.lane.positions[name]])

    def steps_of(self, name: str) -> int | None:
        """Return how many steps a member's epoch has. None if only its loader knows."""
        run = self._run(name)
        return None if run.known_steps is None else int(run.known_steps[run.lane.positions[name]])

    def validates(self, name: str) -> bool:
        """Return True if a member has validation data."""
        return self._run(name).validation is not None

    def lane_here(self, name: str) -> Lane | None:
        """Return a member's lane if its steps are taken in this process."""
        run = self._idle_run(name, "run.lane_here")
        return run.lane if run.remote is None else None

    def framework(self, name: str) -> Adapter:
        """Return the adapter of a member's framework."""
        return self._run(name).lane.members[0].framework

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> History:
        """Train until every member is done, or until Ctrl-C."""
        begun = time.monotonic()
        self._resume()
        self._announce()
        has_shares = any(run.turns != 1 for run in self.runs)  # shares count turns, so each must be one step
        for run in self.runs:
            run.may_halve = not self._options.in_step
            run.choose_turn_length(single=self._options.watched or self._options.in_step or has_shares)
            run.begin()
        self.active = self._training()
        stopped_by: str | None = "an error"
        try:
            with self._ctrl_c.listening():
                self._call("on_fit_start")
                with self._events() as events:
                    for event in events:
                        if isinstance(event, StepsTaken):
                            self._handle_step(event.run)
                        else:
                            self._handle_epoch(event.reports)
                        self._save()
            if self._ctrl_c.pressed:
                self._record_last_steps()
            stopped_by = "Ctrl-C" if self._ctrl_c.pressed else None
            self.active = self._training()
            self._finish_members()
            self._call("on_fit_end")
            self._refuse_all_failed()
        finally:
            for run in self.runs:
                run.close()
                run.lane.give_slots(run.names)
                run.lane.engine.stop()
            self._reporter.end(self.history, time.monotonic() - begun, stopped_by)
        return self.history

    @contextmanager
    def _events(self) -> Iterator[Iterator[Event]]:
        """Run the lanes. If a callback raises, lanes in threads and workers stop before this returns."""
        events = self._sharing(self.runs, self._options)
        try:
            yield events
        finally:
            self._over = True
            if self._ctrl_c.pressed:
                for run in self.runs:
                    run.give_up_reading()
            if isinstance(events, Generator):
                events.close()

    def _handle_step(self, stepped: LaneRun) -> None:
        now = stepped.epoch, stepped.step_in_epoch
        if self._options.watched:
            stepping = [run for run in self.runs if run.working and not (run.at_end and run.epoch == now[0])]
            if now <= self._last_step or any((run.epoch, run.step_in_epoch) < now for run in stepping):
                return  # callbacks see a step when all lanes have taken it
        self._last_step = now
        self.step = max(int(run.steps_done.max()) for run in self.runs)
        # Of the lanes that train, the one with the longest epochs stands for the fit.
        leader = max(
            [run for run in self.runs if run.working] or self.runs,
            key=lambda run: 0 if run.known_steps is None else int(run.known_steps.max()),
        )
        compiling = any(run.lane.engine.compiling for run in self.runs)
        note = "compiling in the background" if compiling else None
        self._reporter.step(leader.step_in_epoch, self._past + leader.epoch + 1, note)
        self._call("on_step_end")

    def _handle_epoch(self, reports: Reports) -> None:
        self.epoch = self._past + max(report.epoch for _, report in reports)
        took_part: set[str] = set()
        for run, report in reports:
            self._record_steps(run, report.epoch)
            for name, values in report.values.items():
                self.history.record(name, values)
            self._record_failures(report.failures)
            took_part |= report.values.keys()
        self.active = tuple(name for name in self.fleet.names if name in took_part)
        self._call("on_epoch_end")
        for run, _ in reports:
            run.leave(self._take_stopped(run))
        self.active = self._training()
        self.generators = {**global_generators.state(), **self._loaders.state()}
        for run, _ in reports:  # a loader that a worker reads draws there
            if run.remote is not None:
                self.generators.update(run.generators or {})
        self._show()

    def _take_stopped(self, run: LaneRun) -> list[str]:
        """Return the members of a lane that callbacks have stopped."""
        stopped = [name for name in run.training() if name in self._stopping]
        for name in run.names:
            self._stopping.pop(name, None)
        for name in stopped:
            self.history.stopped[name] = self._past + run.epoch
        return stopped

    def _halve(self, run: LaneRun) -> None:
        """Replace a lane that has run out of memory by two."""
        self._record_steps(run, run.epoch + 1)
        halves = self._halve_run(run)
        run.lane.rest(run.training())
        self.runs += halves
        self._run_of.update({name: half for half in halves for name in half.names})

    def _finish_members(self) -> None:
        """End the members' training as their framework does. Weights that a callback has put back stay."""
        for run, names in self._current_runs():
            positions = [run.lane.positions[name] for name in names if name not in self.history.kept]
            if positions:
                run.bring_here(to_change=True).engine.finish(positions)

    def _record_last_steps(self) -> None:
        """Record the steps and failures since the last epoch, in a run that was cut short."""
        for run in self.runs:
            run.bring_here()
            self._record_steps(run, run.epoch + 1)
            self._record_failures(run.find_failures(run.epoch + 1))

    def _record_steps(self, run: LaneRun, epoch: int) -> None:
        """Record the losses of single steps, which belong to this epoch of a lane."""
        for name, losses in run.take_losses().items():
            self.history.record_steps(name, self._past + epoch, losses)

    def _record_failures(self, failures: Mapping[str, Failure]) -> None:
        for name, failure in failures.items():
            self.history.fail(name, replace(failure, epoch=self._past + failure.epoch))

    def _refuse_all_failed(self) -> None:
        """Raise AllFailedError if every member has failed: such a fit must not look like a success."""
        failed = self.history.failed
        if len(failed) == len(self.fleet):
            raise all_failed(failed, self.history, self._cause())

    def _cause(self) -> BaseException | None:
        """Return the exception of a member's step or data, if it was raised in this process."""
        for run in self.runs:
            if run.raised is not None:
                return run.raised
        feeds = [feed for run in self.runs for feed in run.feeds]
        return next((error for feed in feeds for error in feed.failures.values()), None)

    # --- progress ------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        steps = [run.known_steps for run in self.runs]
        rows = [run.feed.rows for run in self.runs]
        self._reporter.start(
            self.fleet.names,
            self.epochs,
            None if any(s is None for s in steps) else max(int(s.max()) for s in steps if s is not None),
            None if any(r is None for r in rows) else sum(int(r.sum()) for r in rows if r is not None),
        )

    def _show(self) -> None:
        """Report an epoch when the slowest lane has ended it."""
        working = [run for run in self.runs if run.working]
        done = min((run.epoch for run in working), default=max(run.epoch for run in self.runs))
        if done <= self._shown:
            return
        now = time.monotonic()
        if self._first_shown is None:
            self._first_shown = done, now
            self.epoch_seconds = (now - self._epoch_start) / (done - self._shown)
        else:
            first, then = self._first_shown
            self.epoch_seconds = (now - then) / (done - first)
        self._shown = done
        self._reporter.epoch(self._past + done, self.history, self.active, now - self._epoch_start)
        self._epoch_start = now

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        for run in self.runs if self._to_save else ():
            self._record_steps(run, run.epoch + 1)
        if self._to_save:
            self._loaders.warn_of_remote()
        for folder in dict.fromkeys(self._to_save):
            checkpoints.save(folder, self)
        self._to_save.clear()

    def _resume(self) -> None:
        for callback in checkpoints.resumable(self.callbacks):
            found = checkpoints.resume(callback.folder, self, verify=callback.verify)
            if found is not None:
                hyperparameters = self.history.hyperparameters
                self.epoch, self.step, self.history, self.generators = found
                self.history.hyperparameters = hyperparameters
                self._shown = self.epoch - self._past
                for run in self.runs:
                    run.generators = self.generators
                self._loaders.rewind(self.generators, first=self.epoch == self._past)
                return

    # --- small parts ---------------------------------------------------------------------------------------------

    def _training(self) -> tuple[str, ...]:
        on = {name for run in self.runs for name in run.training()}
        return tuple(name for name in self.fleet.names if name in on)

    def _run(self, name: str) -> LaneRun:
        if name not in self._run_of:
            raise InputError(f"there is no member {name!r} in this fit.")
        return self._run_of[name]

    def _idle_run(self, name: str, verb: str) -> LaneRun:
        run = self._run(name)
        self._refuse_busy(run, verb)
        return run

    def _refuse_busy(self, run: LaneRun, verb: str) -> None:
        if run.busy and run.working:
            raise BusyError(
                f"{verb} in a callback: member {run.names[0]!r} is in the middle of an epoch, in another thread "
                f"or process. Use a modelfleet.Callback with together = True: then all members wait for it."
            )

    def _current_runs(self) -> list[tuple[LaneRun, list[str]]]:
        """Return the runs with the members that each has now. Those of a lane that was halved are elsewhere."""
        found = [(run, [name for name in run.names if self._run_of[name] is run]) for run in self.runs]
        return [(run, names) for run, names in found if names]

    def _call(self, method: str) -> None:
        for callback in self.callbacks:
            if method != "on_step_end" or callback.wants_steps:
                getattr(callback, method)(self)
