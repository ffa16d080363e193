"""What happened in a fit: every member's metrics, epoch by epoch, and who failed or was stopped."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from modelfleet.errors import FleetError, InputError, MissingExtraError, StoreError, unknown
from modelfleet.frameworks.protocol import REASONS
from modelfleet.words import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Mode = Literal["auto", "min", "max"]

# A metric is known by the last word of its name: "val_mean_squared_error" is an error.
_LOWER = {
    "loss",
    "error",
    "mse",
    "mae",
    "rmse",
    "msle",
    "rmsle",
    "mape",
    "nll",
    "bce",
    "crossentropy",
    "perplexity",
}
_HIGHER = {"accuracy", "acc", "auc", "auroc", "auprc", "r2", "f1", "precision", "recall", "iou", "dice"}
_TOP_K = re.compile(r"(^|_)top_?(k|\d+)$")


def direction(metric: str, mode: str = "auto") -> Literal["min", "max"]:
    """Whether lower ("min") or higher ("max") values of a metric are better; `mode` insists."""
    if mode == "min" or mode == "max":
        return mode
    if mode != "auto":
        raise unknown("mode", mode, ("auto", "min", "max"))
    name = re.sub(r"[^a-z0-9]+", "_", metric.lower()).replace("cross_entropy", "crossentropy")
    words = name.removesuffix("_score").split("_")
    if "neg" not in words:  # scikit-learn's neg_mean_squared_error is better when higher
        if words[-1] in _LOWER:
            return "min"
        if words[-1] in _HIGHER or _TOP_K.search(name):
            return "max"
    raise InputError(
        f'it is not known whether a higher or a lower {metric!r} is better. Say so: mode="min" or mode="max".'
    )


@dataclass(frozen=True)
class Failure:
    """Why a member was set aside: in which epoch (from 1), at which step of that fit, and the reason."""

    epoch: int
    step: int
    reason: str

    @property
    def diverged(self) -> bool:
        """Whether its numbers went bad, rather than that something raised or died."""
        return self.reason in REASONS.values()

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step:,}: {self.reason}"


class History:
    """The metrics of every member, one value per epoch.

    `failed` holds the members that were set aside, `stopped` the epoch at which a member was stopped early,
    and `kept` the epoch whose weights a member has been given back, if they are not its last.

        history["m07"]["val_loss"]          # [0.71, 0.43, 0.38]
        fleet[history.best("val_accuracy")]
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._values: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        self.failed: dict[str, Failure] = {}
        self.stopped: dict[str, int] = {}
        self.kept: dict[str, int] = {}

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
        metric = self._metric(None)
        if metric in self.metrics and (ranking := self._ranked(metric)):
            parts.append(f"best {ranking[0][0]!r} with {metric} {ranking[0][1]:.4g}")
        parts += [f"{len(self.failed):,} failed"] * bool(self.failed)
        parts += [f"{len(self.stopped):,} stopped early"] * bool(self.stopped)
        return f"History({', '.join(parts)})"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all recorded metrics, the first recorded first."""
        return tuple(dict.fromkeys(metric for values in self._values.values() for metric in values))

    @property
    def epochs(self) -> int:
        """The most epochs that any member has recorded."""
        return max(map(_length, self._values.values()), default=0)

    def record(self, name: str, values: Mapping[str, float]) -> None:
        """Append one epoch of a member. A metric that is missing in one epoch is NaN there."""
        recorded = self[name]
        if recorded.keys() != values.keys():
            epochs = _length(recorded)
            for metric in values:
                recorded.setdefault(metric, [math.nan] * epochs)
        for metric, series in recorded.items():
            series.append(float(values.get(metric, math.nan)))
        self.kept.pop(name, None)

    def fail(self, name: str, failure: Failure) -> None:
        """Note that a member was set aside."""
        self[name]  # an unknown member is an error
        self.failed[name] = failure

    def extend(self, other: "History") -> None:
        """Append the epochs of a later fit. A member that trained again sheds its earlier failure or stop."""
        for name in other:
            later = other[name]
            before = _length(self._values.setdefault(name, {}))
            touched = bool(later) or name in other.failed or name in other.stopped
            if not touched:
                continue
            for outcome in (self.failed, self.stopped, self.kept):
                outcome.pop(name, None)
            for epoch in range(_length(later)):
                self.record(name, {metric: series[epoch] for metric, series in later.items()})
            if name in other.failed:
                failure = other.failed[name]
                self.failed[name] = replace(failure, epoch=failure.epoch + before)
            if name in other.stopped:
                self.stopped[name] = other.stopped[name] + before
            if name in other.kept:
                self.kept[name] = other.kept[name] + before

    def latest(self, metric: str) -> dict[str, float]:
        """The value of every member that has not failed, as of the weights it has now; NaN left out."""
        if metric not in self.metrics:
            raise self._unrecorded(metric)
        latest: dict[str, float] = {}
        for name, values in self._values.items():
            if metric in values and name not in self.failed:
                value = values[metric][self.kept.get(name, 0) - 1]  # epochs count from 1: 0 is the last
                if not math.isnan(value):
                    latest[name] = value
        return latest

    def ranking(self, metric: str | None = None, *, mode: Mode = "auto") -> list[tuple[str, float]]:
        """The members and their latest values, best first; without the failed and those at NaN.

        `metric` is val_loss if that was recorded, else loss, unless given. `mode` says what is better:
        "min", "max", or "auto", which knows losses, errors, accuracies and the like by their names.
        """
        metric = self._metric(metric)
        sign = 1 if direction(metric, mode) == "min" else -1
        return sorted(self.latest(metric).items(), key=lambda item: sign * item[1])

    def best(self, metric: str | None = None, *, mode: Mode = "auto") -> str:
        """The name of the best member by its latest value: the first of `ranking`."""
        ranking = self.ranking(metric, mode=mode)
        if not ranking:
            raise InputError(
                f"no member has a number for {self._metric(metric)!r}: {len(self.failed):,} of {len(self):,} "
                f"failed, the others are at NaN. {self._advice()}"
            )
        return ranking[0][0]

    def frame(self) -> "DataFrame":
        """A pandas DataFrame with a row per member and epoch: member, epoch (from 1), and the metrics."""
        pandas = _package("pandas", "history.frame()")
        metrics = self.metrics
        columns: dict[str, list[Any]] = {column: [] for column in ("member", "epoch", *metrics)}
        for name, values in self._values.items():
            epochs = _length(values)
            columns["member"] += [name] * epochs
            columns["epoch"] += range(1, epochs + 1)
            for metric in metrics:
                columns[metric] += values.get(metric, [math.nan] * epochs)
        return pandas.DataFrame(columns)

    def plot(self, metric: str | None = None, path: str | Path | None = None, *, mode: Mode = "auto") -> "Figure":
        """Draw every member's learning curve, the best one highlighted, and save the picture to `path`.

        Failed members end with a cross. Where neither the metric's name nor `mode` says what is better,
        none is highlighted.
        """
        figure_module = _package("matplotlib.figure", "history.plot()")
        metric = self._metric(metric)
        if metric not in self.metrics:
            raise self._unrecorded(metric)
        if mode != "auto":
            direction(metric, mode)  # a misspelt mode is an error
        figure = figure_module.Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
        ranking = self._ranked(metric, mode)
        _draw(figure, self, metric, ranking[0] if ranking else None)
        if path is not None:
            figure.savefig(path)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """The history in strict JSON's terms, for `from_dict`."""
        return {
            "metrics": {
                name: {metric: [plain(value) for value in series] for metric, series in values.items()}
                for name, values in self._values.items()
            },
            "failed": {name: asdict(failure) for name, failure in self.failed.items()},
            "stopped": dict(self.stopped),
            "kept": dict(self.kept),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The history that `to_dict` gave."""
        try:
            history = cls(stored["metrics"])
            for name, values in stored["metrics"].items():
                history[name].update((metric, [float(v) for v in series]) for metric, series in values.items())
            history.failed = {name: Failure(**failure) for name, failure in stored["failed"].items()}
            history.stopped = {name: int(epoch) for name, epoch in stored["stopped"].items()}
            history.kept = {name: int(epoch) for name, epoch in stored["kept"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the stored history can't be read ({type(error).__name__}: {error}).") from error
        return history

    def _advice(self) -> str:
        reasons = "history.failed has the reasons"
        others = len(self.failed) < len(self)  # at NaN
        diverged = others or any(failure.diverged for failure in self.failed.values())
        return f"{reasons}; often a lower lr helps." if diverged else f"{reasons}."

    def _metric(self, metric: str | None) -> str:
        return metric or ("val_loss" if "val_loss" in self.metrics else "loss")

    def _ranked(self, metric: str, mode: Mode = "auto") -> list[tuple[str, float]]:
        """The ranking, or nothing where it is not known what is better."""
        try:
            return self.ranking(metric, mode=mode)
        except InputError:
            return []

    def _unrecorded(self, metric: str) -> InputError:
        if not self.metrics and self.failed:
            return InputError(
                f"there is no {metric!r}: {len(self.failed):,} of {len(self):,} failed in their first epoch. "
                f"{self._advice()}"
            )
        if not self.metrics:
            return InputError(f"there is no {metric!r} yet: no epoch has been recorded. Run fit first.")
        return unknown("metric", metric, self.metrics)


def plain(value: float) -> float | str:
    """A number as strict JSON can hold it; `float` turns it back."""
    return value if math.isfinite(value) else str(value)


class _MissingPackageError(MissingExtraError):
    """As its parent, for a package that no extra of modelfleet brings."""

    def __init__(self, package: str, purpose: str) -> None:
        FleetError.__init__(
            self,
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Bring it with: pip install {package}",
        )


def _package(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there; something that it needs is not
        raise _MissingPackageError(package, purpose) from error


def _length(values: Mapping[str, list[float]]) -> int:
    return max(map(len, values.values()), default=0)


def _draw(figure: "Figure", history: History, metric: str, best: tuple[str, float] | None) -> None:
    """All curves of one metric on one figure."""
    import numpy as np
    from matplotlib.collections import LineCollection
    from matplotlib.ticker import MaxNLocator

    quiet, accent, bad = "#4c6a8a", "#d9480f", "#b02a37"
    curves = {name: np.asarray(history[name][metric], float) for name in history if metric in history[name]}
    sound = [curve for name, curve in curves.items() if name not in history.failed]
    numbers = np.concatenate([*sound, np.empty(0)])
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        numbers = np.concatenate([*curves.values()])
        numbers = numbers[np.isfinite(numbers)]

    axes = figure.add_subplot()
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 1.0)
    if low > 0 and high > 50 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.2)
    else:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
        axes.set_ylim(low - margin, high + margin)

    alpha = float(np.clip(4 / len(curves) ** 0.65, 0.02, 0.75))
    points = {name: np.column_stack([np.arange(1, len(curve) + 1), curve]) for name, curve in curves.items()}
    axes.add_collection(LineCollection(list(points.values()), colors=quiet, linewidths=0.8, alpha=alpha))
    # A line through one point can't be seen.
    alone = [curve[0] for curve in points.values() if np.isfinite(curve[:, 1]).sum() == 1 == len(curve)]
    if alone:
        axes.plot(*np.transpose(alone), "o", color=quiet, markersize=4, markeredgewidth=0, alpha=alpha)

    ends = [curve[np.isfinite(curve[:, 1])][-1:] for name, curve in points.items() if name in history.failed]
    crosses = np.concatenate([*ends, np.empty((0, 2))])
    if len(crosses):
        # The axes are scaled for the others: an exploded member's cross sits on their edge.
        heights = np.clip(crosses[:, 1], *axes.get_ylim())
        faint = min(1.0, 3 / len(crosses) ** 0.5)
        axes.plot(crosses[:, 0], heights, "x", color=bad, markersize=5, alpha=faint, clip_on=False)

    if best is not None:
        name, value = best
        curve = points[name]
        axes.plot(curve[:, 0], curve[:, 1], color=accent, linewidth=2)
        at = (history.kept.get(name, len(curve)), value)
        axes.plot(*at, "o", color=accent, markersize=5, clip_on=False)
        shown = name if len(name) <= 24 else f"{name[:23]}…"
        axes.annotate(
            f"{shown}\n{value:.4g}",
            at,
            xytext=(8, 0),
            textcoords="offset points",
            color=accent,
            va="center",
            parse_math=False,  # a name may hold a $
            annotation_clip=False,
        )

    longest = max(map(len, curves.values()))
    axes.set_xlim((0.5, 1.5) if longest == 1 else (1, longest))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_xlabel("epoch")
    axes.set_ylabel(metric, parse_math=False)
    failed = f", {len(history.failed):,} failed" if history.failed else ""
    axes.set_title(f"{metric}: {count(len(curves), 'member')}{failed}", loc="left", parse_math=False)
