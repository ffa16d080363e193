"""Timelines as a picture. Imported by `Timeline.plot` only, since matplotlib is optional."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Patch

from modelfleet.plotting import Picture
from modelfleet.schedules.operations import BACKWARDS, COMPUTATIONS

if TYPE_CHECKING:
    from modelfleet.schedules.timeline import Timeline

Color = tuple[float, float, float, float]

_WAITING, _TRANSFER = "#d9d9d9", "#7a7a7a"
_HEIGHT = 0.7
_MOST_NUMBERS = 250  # bars; the numbers of more can't be read


def draw(timelines: Sequence[tuple[str, "Timeline"]]) -> Picture:
    """Draw timelines below each other on one axis of time.

    A backward is darker than its forward, and a backward for the weights alone is darker still.
    """
    rows = sum(len(timeline.devices) for _, timeline in timelines)
    figure = Picture(figsize=(10, 1.2 + 0.45 * rows + 0.6 * len(timelines)), dpi=150, layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    nodes = list(dict.fromkeys(name for _, timeline in timelines for name in timeline.by_node()))
    colors = {name: colormaps["tab10"](index % 10) for index, name in enumerate(nodes)}
    for axes, (title, timeline) in zip(panels, timelines, strict=True):
        _draw_bars(axes, timeline, colors)
        _draw_transfers(axes, timeline)
        _label(axes, timeline, title)
    panels[-1].set_xlim(0, max(timeline.seconds for _, timeline in timelines) or 1.0)
    panels[-1].set_xlabel("seconds")
    handles = [Patch(color=_light(colors[name]), label=name.replace("$", r"\$")) for name in nodes]
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False)
    return figure


def _light(color: Color) -> Color:
    red, green, blue, _ = color
    return (0.5 + red / 2, 0.5 + green / 2, 0.5 + blue / 2, 1.0)


def _dark(color: Color) -> Color:
    red, green, blue, _ = color
    return (0.7 * red, 0.7 * green, 0.7 * blue, 1.0)


def _draw_bars(axes: Axes, timeline: "Timeline", colors: dict[str, Color]) -> None:
    start = timeline.start
    computations = [event for event in timeline.events if event.operation.kind in COMPUTATIONS]
    for event in timeline.events:
        kind = event.operation.kind
        bottom = event.rank - _HEIGHT / 2
        if event.waited:
            axes.broken_barh([(event.start - start, event.waited)], (bottom, _HEIGHT), color=_WAITING, linewidth=0)
        if kind in COMPUTATIONS or kind == "apply":
            color = colors[event.operation.node]
            face = _dark(color) if kind == "backward_weight" else color if kind in BACKWARDS else _light(color)
            spans = [(event.begun - start, event.seconds)]
            axes.broken_barh(spans, (bottom, _HEIGHT), facecolor=face, edgecolor="white", linewidth=0.4)
    if len(computations) <= _MOST_NUMBERS:
        for event in computations:
            middle = event.begun - start + event.seconds / 2
            number = str(event.operation.micro)
            axes.text(middle, event.rank, number, ha="center", va="center", fontsize=6, clip_on=True)


def _draw_transfers(axes: Axes, timeline: "Timeline") -> None:
    start = timeline.start
    lines = [
        [(event.begun - start, event.operation.peer), (event.end - start, event.rank)]
        for event in timeline.events
        if event.operation.kind == "receive"
    ]
    axes.add_collection(LineCollection(lines, colors=_TRANSFER, linewidths=0.6, alpha=0.7))


def _label(axes: Axes, timeline: "Timeline", title: str) -> None:
    idle = f"{timeline.seconds:.3g} s, idle {timeline.bubble:.0%}"
    axes.set_title(f"{title}: {idle}" if title else idle, loc="left", parse_math=False)
    axes.set_yticks(range(len(timeline.devices)), timeline.devices)
    axes.set_ylim(len(timeline.devices) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
