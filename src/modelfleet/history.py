"""History of a fit: every member's metrics, epoch by epoch, and which members failed or were stopped."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from modelfleet.directions import Mode, direction
from modelfleet.errors import InputError, StoreError
from modelfleet.failures import Failure
from modelfleet.formatting import count
from modelfleet.frames import import_package, make_frame
from modelfleet.types import Json
from modelfleet.unknown_names import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class Copied:
    """Says that a member was replaced by a copy of another one, with other hyperparameters."""

    epoch: int
    """Epoch at whose end it was replaced."""
    source: str
    """Member that it became a copy of."""
    hyperparameters: dict[str, float]
    """Hyperparameters from then on, as far as they changed."""


class History:
    """Metrics of every member of a fit, one value per epoch.

    `fleet.fit` returns a history. Index it by a member's name:

        history["m07"]["val_loss"]                  # [0.71, 0.43, 0.38]
        net = fleet[history.best("val_accuracy")]

    Args:
        names: The names of the members.
        hyperparameters: Each member's hyperparameters by name, for `frame`.
        initial_epoch: The number of epochs that were done before. Recorded epochs are counted from there.

    Attributes:
        initial_epoch: The number of the epoch before the first one.
        failed: The `Failure` of every member that was set aside.
        stopped: The epoch at which a member was stopped early.
        kept: The epoch whose weights were restored, for members that did not keep those of their last epoch.
        copied: When a member was replaced by a copy of another one (`mf.Exploit`): `{"m07": [Copied(…), …]}`.
        hyperparameters: Each member's hyperparameters at the start, such as `{"m07": {"lr": 0.001}}`.
    """

    def __init__(
        self,
        names: Iterable[str],
        hyperparameters: Mapping[str, Mapping[str, object]] | None = None,
        initial_epoch: int = 0,
    ) -> None:
        self.initial_epoch = initial_epoch
        self._values: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        self.failed: dict[str, Failure] = {}
        self.stopped: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.copied: dict[str, list[Copied]] = {}
        self._steps: dict[str, dict[int, list[float]]] = {}  # losses of single steps, by member and epoch
        self.hyperparameters: dict[str, dict[str, object]] = {
            name: dict(own) for name, own in (hyperparameters or {}).items()
        }

    def __getitem__(self, name: str) -> dict[str, list[float]]:
        try:
            return self._values[name]
        except KeyError:
            raise unknown("member", name, self._values) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        if not self.metrics:
            return f"History({count(len(self), 'member')}, nothing recorded yet)"
        parts = [
            count(len(self), "member"),
            count(self.epochs, "epoch"),
            f"metrics {', '.join(self.metrics)}",
        ]
        metric = self._default(None)
        if metric in self.metrics and (ranking := self._ranking_if_known(metric)):
            parts.append(f"best {ranking[0][0]!r} with {metric} {ranking[0][1]:.4g}")
        parts += [f"{len(self.failed):,} failed"] * bool(self.failed)
        parts += [f"{len(self.stopped):,} stopped early"] * bool(self.stopped)
        return f"History({', '.join(parts)})"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all recorded metrics, in the order in which they were first recorded."""
        return tuple(dict.fromkeys(metric for values in self._values.values() for metric in values))

    @property
    def epochs(self) -> int:
        """Number of epochs that the longest-trained member has recorded."""
        return max(map(_length, self._values.values()), default=0)

    def record(self, name: str, values: Mapping[str, float]) -> None:
        """Append one epoch of a member. A metric that is missing in an epoch is NaN there."""
        recorded = self[name]
        if recorded.keys() != values.keys():
            epochs = _length(recorded)
            for metric in values:
                recorded.setdefault(metric, [math.nan] * epochs)
        for metric, series in recorded.items():
            series.append(float(values.get(metric, math.nan)))
        self.kept.pop(name, None)

    def record_steps(self, name: str, epoch: int, losses: Iterable[float]) -> None:
        """Append the losses of steps that a member has taken in an epoch."""
        self[name]  # raises for an unknown member
        self._steps.setdefault(name, {}).setdefault(epoch, []).extend(losses)

    def steps(self, name: str) -> dict[str, list[float]]:
        """Return a member's loss at every step: `{"loss": [one per step]}`.

        It is the loss of the step's batch, before the step has changed the weights. If the member failed, the last
        one belongs to the step at which it failed. Metrics are recorded by epoch only.

        Raises:
            InputError: If the member is unknown, or no steps were recorded.
        """
        self[name]  # raises for an unknown member
        self._check_steps()
        return {"loss": [loss for losses in self._steps.get(name, {}).values() for loss in losses]}

    def fail(self, name: str, failure: Failure) -> None:
        """Record that a member was set aside."""
        self[name]  # raises for an unknown member
        self.failed[name] = failure
        before = 0  # a turn may have more steps than the member took
        for losses in self._steps.get(name, {}).values():
            del losses[max(0, failure.step - before) :]
            before += len(losses)

    def extend(self, other: "History") -> None:
        """Append the epochs of a later fit.

        A member that trained again loses its earlier failure or stop. The later fit's hyperparameters replace
        the earlier ones.
        """
        for name in other:
            later = other[name]
            before = _length(self._values.setdefault(name, {})) + self.initial_epoch - other.initial_epoch
            if not later and name not in other.failed and name not in other.stopped:
                continue  # this member took no part
            for outcomes in (self.failed, self.stopped, self.kept):
                outcomes.pop(name, None)
            for epoch in range(_length(later)):
                self.record(name, {metric: series[epoch] for metric, series in later.items()})
            for epoch, losses in other._steps.get(name, {}).items():
                self.record_steps(name, epoch + before, losses)
            if name in other.failed:
                failure = other.failed[name]
                self.failed[name] = replace(failure, epoch=failure.epoch + before)
            if name in other.stopped:
                self.stopped[name] = other.stopped[name] + before
            if name in other.kept:
                self.kept[name] = other.kept[name] + before
            if name in other.copied:
                later_copies = [replace(copy, epoch=copy.epoch + before) for copy in other.copied[name]]
                self.copied[name] = self.copied.get(name, []) + later_copies
        self.hyperparameters.update(other.hyperparameters)

    def latest(self, metric: str) -> dict[str, float]:
        """Return the value that belongs to each member's current weights.

        Members that failed and members whose value is NaN are left out.

        Raises:
            InputError: If the metric was not recorded. The message names the nearest one that was.
        """
        self._check_recorded(metric)
        latest: dict[str, float] = {}
        for name, values in self._values.items():
            if metric in values and name not in self.failed:
                kept = self.kept.get(name)
                value = values[metric][-1 if kept is None else kept - self.initial_epoch - 1]
                if not math.isnan(value):
                    latest[name] = value
        return latest

    def ranking(self, metric: str | None = None, *, mode: Mode = "auto") -> list[tuple[str, float]]:
        """Return the members with their latest values, best first.

        Members that failed and members whose value is NaN are left out.

        Args:
            metric: The metric to compare; by default "val_loss" if it was recorded, else "loss".
            mode: "min" or "max" says which values are better. "auto" decides by the metric's name: it knows
                losses, errors, accuracies and the like.

        Raises:
            InputError: If the metric was not recorded, or "auto" can't tell which values are better.
        """
        metric = self._default(metric)
        self._check_recorded(metric)  # first, so that a misspelt metric is reported as such
        sign = 1 if direction(metric, mode) == "min" else -1
        return sorted(self.latest(metric).items(), key=lambda item: sign * item[1])

    def best(self, metric: str | None = None, *, mode: Mode = "auto") -> str:
        """Return the name of the best member by its latest value: the first of `ranking`.

            net = fleet[history.best("val_accuracy")]

        Args:
            metric: As for `ranking`.
            mode: As for `ranking`.

        Raises:
            InputError: As for `ranking`, or if no member has a number for the metric.
        """
        ranking = self.ranking(metric, mode=mode)
        if not ranking:
            raise InputError(
                f"no member has a number for {self._default(metric)!r}: {len(self.failed):,} of {len(self):,} "
                f"failed, the others are at NaN. {self._advice()}"
            )
        return ranking[0][0]

    def frame(self, by: Literal["epoch", "step"] = "epoch") -> "DataFrame":
        """Return a pandas DataFrame with one row per member and epoch, or per member and step.

        Its columns are `member`, `epoch` (from 1, or after `initial_epoch`), the hyperparameters, and the metrics.
        By step, they are `member`, `epoch`, `step` (from 1), the hyperparameters, and `loss`. A hyperparameter
        that has the name of another column gets the prefix `hyperparameter_`.

        Args:
            by: "epoch", or "step" for the losses that `fit(record_steps=True)` has recorded.

        Raises:
            InputError: If `by` is unknown, or no steps were recorded.
            MissingExtraError: If pandas is not installed.
        """
        if by not in ("epoch", "step"):
            raise unknown("by", by, ("epoch", "step"))
        columns = {name: self._columns(name) if by == "epoch" else self._step_columns(name) for name in self}
        first = ("member", "epoch", "step") if by == "step" else ("member", "epoch")
        hyperparameters = {
            name: self._over_time(name, own["epoch"])
            if name in self.copied
            else self.hyperparameters.get(name, {})
            for name, own in columns.items()
        }
        return make_frame(columns, hyperparameters, first, ("loss",) if by == "step" else self.metrics)

    def _over_time(self, name: str, epochs: Sequence[int]) -> dict[str, list[object]]:
        """Return a member's hyperparameters in some epochs."""
        start, copies = self.hyperparameters.get(name, {}), self.copied[name]
        found: dict[str, list[object]] = {}
        for key in dict.fromkeys([*start, *(key for copy in copies for key in copy.hyperparameters)]):
            changes = [(copy.epoch, copy.hyperparameters[key]) for copy in copies if key in copy.hyperparameters]
            found[key] = [
                next((value for done, value in reversed(changes) if done < epoch), start.get(key))
                for epoch in epochs
            ]
        return found

    def _columns(self, name: str) -> dict[str, list[Any]]:
        """Return a member's epochs and its metrics."""
        start = self.initial_epoch + 1
        return {**self[name], "epoch": list(range(start, start + _length(self[name])))}

    def _step_columns(self, name: str) -> dict[str, list[Any]]:
        """Return a member's steps with their epochs and losses."""
        losses = self.steps(name)["loss"]
        epochs = [epoch for epoch, own in self._steps.get(name, {}).items() for _ in own]
        return {"epoch": epochs, "step": list(range(1, len(losses) + 1)), "loss": losses}

    def plot(self, metric: str | None = None, path: str | Path | None = None, *, mode: Mode = "auto") -> "Figure":
        """Draw every member's learning curve, with the best one highlighted.

        Curves of failed members end with a cross. A notebook shows the figure if this is a cell's last expression.

        Args:
            metric: The metric to draw; by default "val_loss" if it was recorded, else "loss".
            path: A file to save the picture to.
            mode: As for `ranking`. If neither the metric's name nor the mode says which values are better, no
                curve is highlighted.

        Returns:
            The matplotlib figure.

        Raises:
            InputError: If the metric was not recorded, or the mode is unknown.
            MissingExtraError: If matplotlib is not installed.
        """
        import_package("matplotlib.figure", "history.plot()")
        from modelfleet.plotting import Best, draw_curves

        metric = self._default(metric)
        self._check_recorded(metric)
        if mode != "auto":
            direction(metric, mode)  # raises for an unknown mode
        curves = {name: values[metric] for name, values in self._values.items() if metric in values}
        ranking = self._ranking_if_known(metric, mode)
        best = None
        if ranking:
            name, value = ranking[0]
            best = Best(name, self.kept.get(name, self.initial_epoch + len(curves[name])), value)
        figure = draw_curves(curves, metric, failed=self.failed, best=best, start=self.initial_epoch)
        if path is not None:
            figure.savefig(path)
        return figure

    def to_dict(self) -> dict[str, Json]:
        """Return the metrics and outcomes as values that strict JSON can hold, for `from_dict`.

        Hyperparameters are left out, because they may be any objects.
        """
        steps = {
            name: {str(epoch): [plain(loss) for loss in losses] for epoch, losses in epochs.items()}
            for name, epochs in self._steps.items()
        }
        copied = {name: [asdict(copy) for copy in own] for name, own in self.copied.items()}
        return {
            **({"steps": steps} if steps else {}),
            "metrics": {
                name: {metric: [plain(value) for value in series] for metric, series in values.items()}
                for name, values in self._values.items()
            },
            "failed": {name: asdict(failure) for name, failure in self.failed.items()},
            "stopped": dict(self.stopped),
            "kept": dict(self.kept),
            "initial_epoch": self.initial_epoch,
            **({"copied": copied} if copied else {}),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Json]) -> Self:
        """Return the history that `to_dict` stored.

        Raises:
            StoreError: If `stored` is not a history.
        """
        try:
            history = cls(stored["metrics"], initial_epoch=int(stored.get("initial_epoch", 0)))
            for name, values in stored["metrics"].items():
                history[name].update((metric, [float(v) for v in series]) for metric, series in values.items())
            for name, epochs in stored.get("steps", {}).items():
                for epoch, losses in epochs.items():
                    history.record_steps(name, int(epoch), map(float, losses))
            history.failed = {name: Failure(**failure) for name, failure in stored["failed"].items()}
            history.stopped = {name: int(epoch) for name, epoch in stored["stopped"].items()}
            history.kept = {name: int(epoch) for name, epoch in stored["kept"].items()}
            copied = stored.get("copied", {})
            history.copied = {name: [Copied(**copy) for copy in own] for name, own in copied.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the stored history can't be read ({type(error).__name__}: {error}).") from error
        return history

    def _advice(self) -> str:
        reasons = "history.failed has the reasons"
        others_at_nan = len(self.failed) < len(self)
        diverged = others_at_nan or any(failure.diverged for failure in self.failed.values())
        return f"{reasons}; often a lower lr helps." if diverged else f"{reasons}."

    def _default(self, metric: str | None) -> str:
        return metric or ("val_loss" if "val_loss" in self.metrics else "loss")

    def _ranking_if_known(self, metric: str, mode: Mode = "auto") -> list[tuple[str, float]]:
        """Return the ranking, or an empty one if nothing says which values are better."""
        try:
            return self.ranking(metric, mode=mode)
        except InputError:
            return []

    def _check_steps(self) -> None:
        if not self._steps:
            raise InputError("no steps were recorded. Call fit with record_steps=True.")

    def _check_recorded(self, metric: str) -> None:
        metrics = self.metrics
        if metric in metrics:
            return
        if not metrics and self.failed:
            raise InputError(
                f"there is no {metric!r}: {len(self.failed):,} of {len(self):,} members failed in their first "
                f"epoch. {self._advice()}"
            )
        if not metrics:
            raise InputError(f"there is no {metric!r} yet: no epoch has been recorded. Run fit first.")
        raise unknown("metric", metric, metrics)


def plain(value: float) -> float | str:
    """Return a number in a form that strict JSON can hold. `float` turns the result back into the number."""
    return value if math.isfinite(value) else str(value)


def _length(values: Mapping[str, list[float]]) -> int:
    return max(map(len, values.values()), default=0)
