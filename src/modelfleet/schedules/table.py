"""Timelines as text: what each device and node did, beside what was planned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelfleet.formatting import size

if TYPE_CHECKING:
    from modelfleet.schedules.timeline import Timeline


def as_text(timeline: "Timeline") -> str:
    """Return a line per device, a line per node, and the bottleneck. What was planned is in parentheses."""
    planned = timeline.planned
    total = f"{timeline.seconds:.3g} s" + (f" (planned {planned.seconds:.3g} s)" if planned else "")
    parts = [
        f"{total}, idle {_percent(timeline.bubble, planned.bubble if planned else None)}",
        _align(("device", "computes", "idle", "peak memory"), _devices(timeline)),
        _align(("node", "forward", "backward", "waits"), _nodes(timeline)),
    ]
    if timeline.by_edge():
        parts.append(_align(("edge", "transfers", "bytes", "time"), _edges(timeline)))
    return "\n\n".join([*parts, timeline.bottleneck()])


def _devices(timeline: "Timeline") -> list[Sequence[str]]:
    planned = timeline.planned
    rows: list[Sequence[str]] = []
    for rank, device in enumerate(timeline.devices):
        expected = planned.peak_bytes[rank] if planned and planned.peak_bytes else None
        own = timeline.peak_bytes[rank] if timeline.peak_bytes else None
        rows.append(
            (
                device,
                _seconds(timeline.busy(rank), planned.busy(rank) if planned else None),
                _percent(timeline.bubbles[rank], planned.bubbles[rank] if planned else None),
                ("–" if own is None else size(own)) + ("" if expected is None else f" ({size(expected)})"),
            )
        )
    return rows


def _nodes(timeline: "Timeline") -> list[Sequence[str]]:
    planned = timeline.planned.by_node() if timeline.planned else {}
    rows: list[Sequence[str]] = []
    for name, own in timeline.by_node().items():
        expected = planned.get(name)
        rows.append(
            (
                name,
                _seconds(own.forward, expected.forward if expected else None),
                _seconds(own.backward, expected.backward if expected else None),
                _seconds(own.waited, expected.waited if expected else None),
            )
        )
    return rows


def _edges(timeline: "Timeline") -> list[Sequence[str]]:
    planned = timeline.planned.by_edge() if timeline.planned else {}
    rows: list[Sequence[str]] = []
    for name, own in timeline.by_edge().items():
        expected = planned.get(name)
        time = _seconds(own.seconds, expected.seconds if expected else None)
        rows.append((name, f"{own.transfers:,}", size(own.bytes), time))
    return rows


def _seconds(own: float, planned: float | None) -> str:
    return f"{own:.3g} s" + ("" if planned is None else f" ({planned:.3g} s)")


def _percent(own: float, planned: float | None) -> str:
    return f"{own:.0%}" + ("" if planned is None else f" ({planned:.0%})")


def _align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(line.rstrip() for line in lines)
