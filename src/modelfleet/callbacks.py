"""Callbacks: your own code at the end of the steps and epochs of a fit."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from modelfleet.argument_checks import check_flag, check_not_negative, check_path, check_whole
from modelfleet.directions import Mode, direction
from modelfleet.errors import InputError
from modelfleet.frameworks.conversions import wrap_keras_callbacks
from modelfleet.history import History, plain
from modelfleet.types import Json, Model
from modelfleet.unknown_names import nearest

Snapshot: TypeAlias = Any
"""A copy of a member's weights, as `run.snapshot` returns it."""


class Run(Protocol):
    """Running fit, as callbacks see it."""

    fleet: Any
    """`Fleet` that is trained."""
    history: History
    epoch: int
    """Number of finished epochs: of all members, or of those in `active` if lanes do not wait for each other. The
    epochs before `initial_epoch` are included."""
    epochs: int
    """Number of the last epoch."""
    step: int
    """Number of steps taken so far."""
    active: tuple[str, ...]
    """Members that are training. At the end of an epoch, those that took part in it and have not failed."""

    def stop(self, name: str, reason: str = ...) -> None:
        """Stop a member at the end of this epoch and free its slot. A second call changes nothing."""
        ...

    def snapshot(self, name: str) -> Snapshot:
        """Return a copy of the member's current weights."""
        ...

    def sync(self, name: str) -> Model:
        """Return the member's model with its current weights; a Keras model also with its optimizer state."""
        ...

    def take(self, name: str) -> None:
        """Read the state of the member's model, and continue the training with it."""
        ...

    def restore(self, name: str, snapshot: Snapshot) -> None:
        """Give a member the weights of a snapshot, whether it is still training or not."""
        ...

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint of the whole run once all callbacks of this event have been called."""
        ...


class Callback:
    """Base class for your own code during a fit. Override the methods you need.

    If your callback keeps state, override `state` and `restore_state`, too, and `arrays` and `restore_arrays` for
    weights. A run that is resumed from a checkpoint then continues as the unbroken run would.

        class StopSlowStarters(mf.Callback):
            def on_epoch_end(self, run):
                for name in run.active:
                    if run.epoch == 1 and run.history[name]["loss"][-1] > 2:
                        run.stop(name, "a slow start")

    Attributes:
        together: True if the callback looks at several members at once. A lane that has finished an epoch then
            waits for the others, and `on_epoch_end` is called once for all members. With False, it is called
            whenever a lane has finished an epoch, for the members of that lane (`run.active`), and no lane waits.
    """

    together = True

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Raise `InputError` if the callback needs a metric that the fit will not record.

        Called before the first step if the callback's `metric` needs validation data, and there are none.

        Args:
            metrics: The names of all metrics that will be recorded, such as "loss" and "val_loss".
        """

    def on_fit_start(self, run: Run) -> None:
        """Called before the first step. In a resumed run, `run.epoch` is above `run.history.initial_epoch`."""

    def on_step_end(self, run: Run) -> None:
        """Called after every step, if `wants_steps`."""

    def on_epoch_end(self, run: Run) -> None:
        """Called after every epoch, when its metrics are in `run.history`."""

    def on_fit_end(self, run: Run) -> None:
        """Called when the fit is over, or was interrupted."""

    @property
    def wants_steps(self) -> bool:
        """True if `on_step_end` should be called."""
        return getattr(self.on_step_end, "__func__", None) is not Callback.on_step_end

    def state(self) -> dict[str, Json]:
        """Return the state to keep in a checkpoint, as values that JSON can hold."""
        return {}

    def restore_state(self, state: Mapping[str, Json]) -> None:
        """Restore what `state` returned."""

    def arrays(self) -> dict[str, Snapshot]:
        """Return the snapshots to keep in a checkpoint, by member."""
        return {}

    def restore_arrays(self, arrays: Mapping[str, Snapshot]) -> None:
        """Restore what `arrays` returned."""


class EarlyStopping(Callback):
    """Stop each member whose metric has not improved for `patience` epochs. The others continue.

        fleet.fit(data, validation=held_out, epochs=100, callbacks=[mf.EarlyStopping(patience=5)])

    Args:
        metric: The metric to watch.
        patience: How many epochs to wait for an improvement.
        min_delta: An improvement counts only if it is larger than this. NaN is never an improvement.
        mode: "min" or "max" says which values are better. "auto" decides by the metric's name.
        restore_best: Give every member the weights of its best epoch at the end.

    Raises:
        InputError: If an argument is out of range, or "auto" can't tell which values of the metric are better. If
            the fit will not record the metric, `fit` raises it before the first step.
    """

    together = False

    def __init__(
        self,
        metric: str = "val_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:
        if not isinstance(metric, str):
            raise InputError(f'EarlyStopping: metric is {metric!r}, expected the name of a metric: "val_loss".')
        check_whole("EarlyStopping: patience", patience, unit="epochs")
        check_not_negative("EarlyStopping: min_delta", min_delta)
        check_flag("EarlyStopping: restore_best", restore_best)
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.mode = direction(metric, mode)
        self.restore_best = restore_best
        self._forget()

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Raise `InputError` if the metric to watch will not be recorded."""
        if self.metric not in metrics:
            raise self._unrecorded("this fit will not record", metrics)

    def on_fit_start(self, run: Run) -> None:
        """Forget earlier fits, unless the run was resumed."""
        if run.epoch == run.history.initial_epoch:
            self._forget()

    def on_epoch_end(self, run: Run) -> None:
        """Note which members improved, and stop those that have not for too long."""
        for name in run.active:
            series = run.history[name].get(self.metric)
            if series is None:
                raise self._unrecorded(f"is not recorded for member {name!r}", run.history[name])
            epoch, value = len(series), series[-1]
            since = self._since.setdefault(name, epoch - 1)
            if self._improves(value, self._best.get(name)):
                self._best[name], self._since[name] = value, epoch
                if self.restore_best:
                    self._snapshots[name] = run.snapshot(name)
            elif epoch - since >= self.patience:
                self._restore(name, run)
                run.stop(name, f"{self.metric} has not improved for {epoch - since} epochs")

    def on_fit_end(self, run: Run) -> None:
        """Give the members that were not stopped their best weights, if `restore_best`."""
        for name in list(self._snapshots):
            self._restore(name, run)

    def state(self) -> dict[str, Json]:
        """Return each member's best value, and the epoch from which its patience counts."""
        best = {name: plain(value) for name, value in self._best.items()}
        return {"best": best, "since": dict(self._since)}

    def restore_state(self, state: Mapping[str, Json]) -> None:
        """Restore what `state` returned."""
        self._best = {name: float(value) for name, value in state["best"].items()}
        self._since = {name: int(epoch) for name, epoch in state["since"].items()}

    def arrays(self) -> dict[str, Snapshot]:
        """Return the best weights of the members that are still training."""
        return dict(self._snapshots)

    def restore_arrays(self, arrays: Mapping[str, Snapshot]) -> None:
        """Restore what `arrays` returned."""
        self._snapshots = dict(arrays)

    def _forget(self) -> None:
        self._best: dict[str, float] = {}
        self._since: dict[str, int] = {}  # the epoch of the best value, or the one before the first
        self._snapshots: dict[str, Snapshot] = {}

    def _improves(self, value: float, best: float | None) -> bool:
        if best is None or math.isnan(value):
            return not math.isnan(value)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta

    def _restore(self, name: str, run: Run) -> None:
        if name in self._snapshots:
            run.restore(name, self._snapshots.pop(name))
            run.history.kept[name] = run.history.initial_epoch + self._since[name]

    def _unrecorded(self, problem: str, metrics: Collection[str]) -> InputError:
        advice = "watch one of these"
        if self.metric.startswith("val_") and not any(metric.startswith("val_") for metric in metrics):
            advice = f"give fit validation data, or {advice}"
        elif (near := nearest(self.metric, metrics)) is not None:
            advice = f"watch {near!r}, or another one of these"
        return InputError(
            f"EarlyStopping watches {self.metric!r}, which {problem}. "
            f"Recorded: {', '.join(metrics) or 'nothing'}. Instead, {advice}."
        )


class Checkpoint(Callback):
    """Save the whole run to a folder, so that a run that was killed can continue.

    Run the same script again: a `fit` that finds a checkpoint in the folder continues from there. So do the
    shuffles of a loader that draws from the framework's own generator.

        fleet.fit(data, epochs=100, callbacks=[mf.Checkpoint("run", every=5)])

    Args:
        folder: The folder to save to.
        every: Save after this many epochs, and after the last one.
        every_steps: Save after this many steps instead, and after the last epoch.
        resume: Continue from the checkpoint that is in the folder, if there is one.
        verify: Compare checksums before resuming, and refuse a damaged checkpoint.

    Raises:
        InputError: An argument is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 1,
        every_steps: int | None = None,
        resume: bool = True,
        verify: bool = True,
    ) -> None:
        check_path("Checkpoint: folder", folder)
        check_whole("Checkpoint: every", every, unit="epochs")
        if every_steps is not None:
            check_whole("Checkpoint: every_steps", every_steps, unit="steps")
        check_flag("Checkpoint: resume", resume)
        check_flag("Checkpoint: verify", verify)
        self.folder = Path(folder).absolute()  # a callback may change the working directory
        self.every = every
        self.every_steps = every_steps
        self.resume = resume
        self.verify = verify

    @property
    def wants_steps(self) -> bool:
        """True if the run is saved by steps."""
        return self.every_steps is not None

    def on_step_end(self, run: Run) -> None:
        """Save if the number of steps says so."""
        if self.every_steps is not None and run.step % self.every_steps == 0:
            run.save(self.folder)

    def on_epoch_end(self, run: Run) -> None:
        """Save if the number of epochs says so."""
        by_epochs = self.every_steps is None and run.epoch % self.every == 0
        # Not in on_fit_end: by then another callback may have restored the best weights, and a run resumed from
        # those would differ from the unbroken one.
        if by_epochs or run.epoch >= run.epochs:
            run.save(self.folder)


def wrap_callbacks(callbacks: Sequence[object]) -> list[Callback]:
    """Return all callbacks as modelfleet's own. Those of a framework become one, in place of the first of them."""
    if not isinstance(callbacks, Iterable):
        raise InputError(f"callbacks is {callbacks!r}; expected a list of callbacks: callbacks=[...].")
    given = list(callbacks)
    own = [callback for callback in given if isinstance(callback, Callback)]
    others = [callback for callback in given if not isinstance(callback, Callback)]
    if not others:
        return own
    place = next(index for index, callback in enumerate(given) if callback is others[0])
    return [*own[:place], wrap_keras_callbacks(others), *own[place:]]


def refuse_missing_validation(callbacks: Sequence[Callback]) -> None:
    """Raise InputError for a callback whose metric needs validation data, if there are none."""
    for callback in callbacks:
        metric = getattr(callback, "metric", None)
        if isinstance(metric, str) and metric.startswith("val_"):
            callback.check_metrics(["loss"])
