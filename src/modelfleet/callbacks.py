"""Callbacks: what a fit does at the end of its steps and epochs, beside training."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from modelfleet.errors import InputError
from modelfleet.history import History, Mode, direction, plain


class Run(Protocol):
    """A fit under way, as callbacks see it."""

    fleet: Any
    history: History
    epoch: int
    """Epochs finished: by all, or by the members of `active` if lanes do not wait for each other."""
    epochs: int
    """Epochs to do."""
    step: int
    """Steps taken in all."""
    active: tuple[str, ...]
    """The members that are training; at an epoch's end, those that took part in it and have not failed."""

    def stop(self, name: str, reason: str = ...) -> None:
        """Stop a member at the end of this epoch and free its slot. Stopping it twice is once."""
        ...

    def snapshot(self, name: str) -> Any:
        """A copy of the member's weights as they are now."""
        ...

    def sync(self, name: str) -> Any:
        """The member's model, with its weights (of Keras: and its optimizer's state) as they are now."""
        ...

    def take(self, name: str) -> None:
        """Take what the member's model holds now back into the training."""
        ...

    def restore(self, name: str, snapshot: Any) -> None:
        """Give a member, training or not, the weights of a snapshot."""
        ...

    def save(self, folder: str | Path) -> None:
        """Keep a checkpoint of the whole run, as it is when every callback of this moment has been called."""
        ...


class Callback:
    """Something of one's own to do during a fit: subclass it and override what you need.

    A callback that remembers anything overrides `state` and `restore_state` too, and `arrays` and
    `restore_arrays` for weights, so that a run resumed from a checkpoint goes on as the unbroken one would.

        class StopSlowStarters(mf.Callback):
            def on_epoch_end(self, run):
                for name in run.active:
                    if run.epoch == 1 and run.history[name]["loss"][-1] > 2:
                        run.stop(name, "a slow start")
    """

    together = True
    """Whether it looks at several members at once. Then a lane that has ended its epoch waits for the others, and
    `on_epoch_end` is called once for all. If not, it is called when any lane has ended an epoch, for its members
    (`run.active`), and nobody waits."""

    def on_fit_start(self, run: Run) -> None:
        """Called before the first step; `run.epoch` is above 0 in a resumed run."""

    def on_step_end(self, run: Run) -> None:
        """Called after every step, if `wants_steps`."""

    def on_epoch_end(self, run: Run) -> None:
        """Called after every epoch, when its metrics are in `run.history`."""

    def on_fit_end(self, run: Run) -> None:
        """Called when the fit is over, or was interrupted."""

    @property
    def wants_steps(self) -> bool:
        """Whether `on_step_end` does anything."""
        return type(self).on_step_end is not Callback.on_step_end

    def state(self) -> dict[str, Any]:
        """What to remember in a checkpoint, in JSON's terms."""
        return {}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""

    def arrays(self) -> dict[str, Any]:
        """The snapshots to remember in a checkpoint, by member."""
        return {}

    def restore_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Take back what `arrays` gave."""


class EarlyStopping(Callback):
    """Stop each member whose metric has not got better for `patience` epochs; the others train on.

    Better is by more than `min_delta`, and NaN never is. `mode` is "min", "max", or "auto", which goes by the
    metric's name. With `restore_best` every member ends with the weights of its best epoch.
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
        if patience < 1:
            raise InputError(f"EarlyStopping: patience is {patience}, expected at least 1 epoch.")
        if not 0 <= min_delta < math.inf:
            raise InputError(f"EarlyStopping: min_delta is {min_delta}, expected a number of at least 0.")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.mode = direction(metric, mode)
        self.restore_best = restore_best
        self._forget()

    def on_fit_start(self, run: Run) -> None:
        """Start afresh, unless the run is a resumed one."""
        if run.epoch == 0:
            self._forget()

    def on_epoch_end(self, run: Run) -> None:
        """Note who got better, and stop who has not for too long."""
        for name in run.active:
            series = run.history[name].get(self.metric)
            if series is None:
                raise self._unrecorded(name, run.history)
            epoch, value = len(series), series[-1]
            since = self._since.setdefault(name, epoch - 1)
            if self._better(value, self._best.get(name)):
                self._best[name], self._since[name] = value, epoch
                if self.restore_best:
                    self._snapshots[name] = run.snapshot(name)
            elif epoch - since >= self.patience:
                self._restore(name, run)
                run.stop(name, f"{self.metric} has not got better for {epoch - since} epochs")

    def on_fit_end(self, run: Run) -> None:
        """Give the members that were not stopped their best weights, if asked to."""
        for name in list(self._snapshots):
            self._restore(name, run)

    def state(self) -> dict[str, Any]:
        """Each member's best value, and the epoch since which it has waited for a better one."""
        best = {name: plain(value) for name, value in self._best.items()}
        return {"best": best, "since": dict(self._since)}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self._best = {name: float(value) for name, value in state["best"].items()}
        self._since = {name: int(epoch) for name, epoch in state["since"].items()}

    def arrays(self) -> dict[str, Any]:
        """The best weights of the members that still train."""
        return dict(self._snapshots)

    def restore_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Take back what `arrays` gave."""
        self._snapshots = dict(arrays)

    def _forget(self) -> None:
        self._best: dict[str, float] = {}
        self._since: dict[str, int] = {}  # the epoch of the best value, or the one before the first
        self._snapshots: dict[str, Any] = {}

    def _better(self, value: float, best: float | None) -> bool:
        if best is None or math.isnan(value):
            return not math.isnan(value)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta

    def _restore(self, name: str, run: Run) -> None:
        if name in self._snapshots:
            run.restore(name, self._snapshots.pop(name))
            run.history.kept[name] = self._since[name]

    def _unrecorded(self, name: str, history: History) -> InputError:
        recorded = ", ".join(history[name]) or "nothing"
        advice = "watch one of these"
        if self.metric.startswith("val_"):
            advice = f"give fit validation data, or {advice}"
        return InputError(
            f"EarlyStopping watches {self.metric!r}, which is not recorded for member {name!r}. "
            f"Recorded: {recorded}. Instead, {advice}."
        )


class Checkpoint(Callback):
    """Keep the whole run in `folder`, so that a run that was killed can go on.

    Saved every `every` epochs, or every `every_steps` steps if given, and after the last epoch. With
    `resume`, a `fit` that finds a checkpoint in the folder goes on from there: run the same script again.
    A loader that shuffles goes on as it would have if it draws from the framework's own generator. A damaged
    checkpoint is noticed by its checksums and refused; `verify=False` does not look.
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
        if every < 1:
            raise InputError(f"Checkpoint: every is {every}, expected at least 1 epoch.")
        if every_steps is not None and every_steps < 1:
            raise InputError(f"Checkpoint: every_steps is {every_steps}, expected at least 1 step, or None.")
        self.folder = Path(folder).absolute()  # wherever a callback may change to
        self.every = every
        self.every_steps = every_steps
        self.resume = resume
        self.verify = verify

    @property
    def wants_steps(self) -> bool:
        """Whether to save by steps."""
        return self.every_steps is not None

    def on_step_end(self, run: Run) -> None:
        """Save, if it is time."""
        if self.every_steps is not None and run.step % self.every_steps == 0:
            run.save(self.folder)

    def on_epoch_end(self, run: Run) -> None:
        """Save, if it is time."""
        by_epochs = self.every_steps is None and run.epoch % self.every == 0
        # Not at the end of the fit: by then another callback may have put the best weights back, and a run
        # resumed from those would not be the unbroken one.
        if by_epochs or run.epoch >= run.epochs:
            run.save(self.folder)
