"""Learning curves as a picture. Imported by `History.plot` only, since matplotlib is optional."""

import io
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from modelfleet.formatting import count

_QUIET, _ACCENT, _BAD = "#4c6a8a", "#d9480f", "#b02a37"
_LONGEST_LABEL = 24  # characters


class Best(NamedTuple):
    """Names the member to highlight, and the point of its curve that its current weights belong to."""

    name: str
    epoch: int
    value: float


class Picture(Figure):
    """Shows a figure in notebooks.

    A notebook shows a plain `Figure` only after `%matplotlib inline` or an import of pyplot, which changes the
    session's settings. This one brings its own PNG.
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def draw_curves(
    curves: Mapping[str, Sequence[float]],
    metric: str,
    *,
    failed: Collection[str],
    best: Best | None,
    start: int = 0,
) -> Picture:
    """Draw the curve of every member, with a cross where a failed member ends and the best one highlighted.

    Epochs count on from `start`.
    """
    figure = Picture(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    values = {name: np.asarray(curve, float) for name, curve in curves.items()}
    points = {
        name: np.column_stack([np.arange(1, len(curve) + 1) + start, curve]) for name, curve in values.items()
    }

    # One explosion must not flatten the others: the failed members count only if there are no others.
    sound = _finite([curve for name, curve in values.items() if name not in failed])
    _scale(axes, sound if sound.size else _finite(list(values.values())))
    _draw_lines(axes, list(points.values()))
    _draw_crosses(axes, [points[name] for name in points if name in failed])
    if best is not None:
        _draw_best(axes, points[best.name], best)

    longest = max(map(len, values.values()))
    axes.set_xlim((start + 0.5, start + 1.5) if longest == 1 else (start + 1, start + longest))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_xlabel("epoch")
    axes.set_ylabel(metric, parse_math=False)
    title = f"{metric}: {count(len(values), 'member')}" + (f", {len(failed):,} failed" if failed else "")
    axes.set_title(title, loc="left", parse_math=False)
    return figure


def _finite(curves: Sequence[np.ndarray]) -> np.ndarray:
    numbers = np.concatenate([*curves, np.empty(0)])
    return numbers[np.isfinite(numbers)]


def _scale(axes: Axes, numbers: np.ndarray) -> None:
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 1.0)
    if low > 0 and high > 50 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.2)
    else:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
        axes.set_ylim(low - margin, high + margin)


def _draw_lines(axes: Axes, points: Sequence[np.ndarray]) -> None:
    alpha = float(np.clip(4 / len(points) ** 0.65, 0.02, 0.75))
    axes.add_collection(LineCollection(list(points), colors=_QUIET, linewidths=0.8, alpha=alpha))
    # A line through one point can't be seen.
    single = [curve[0] for curve in points if np.isfinite(curve[:, 1]).sum() == 1 == len(curve)]
    if single:
        axes.plot(*np.transpose(single), "o", color=_QUIET, markersize=4, markeredgewidth=0, alpha=alpha)


def _draw_crosses(axes: Axes, points: Sequence[np.ndarray]) -> None:
    ends = np.concatenate([*(curve[np.isfinite(curve[:, 1])][-1:] for curve in points), np.empty((0, 2))])
    if len(ends):
        # The axes are scaled for the others: the cross of a member that exploded sits on their edge.
        heights = np.clip(ends[:, 1], *axes.get_ylim())
        faint = min(1.0, 3 / len(ends) ** 0.5)
        axes.plot(ends[:, 0], heights, "x", color=_BAD, markersize=5, alpha=faint, clip_on=False)


def _draw_best(axes: Axes, points: np.ndarray, best: Best) -> None:
    axes.plot(points[:, 0], points[:, 1], color=_ACCENT, linewidth=2)
    end = best.epoch, best.value
    axes.plot(*end, "o", color=_ACCENT, markersize=5, clip_on=False)
    label = best.name if len(best.name) <= _LONGEST_LABEL else f"{best.name[: _LONGEST_LABEL - 1]}…"
    axes.annotate(
        f"{label}\n{best.value:.4g}",
        end,
        xytext=(8, 0),
        textcoords="offset points",
        color=_ACCENT,
        va="center",
        parse_math=False,  # a name may hold a $
        annotation_clip=False,
    )
