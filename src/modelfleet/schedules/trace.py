"""Timelines as trace events, as Chrome's about:tracing and Perfetto read them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelfleet.schedules.operations import TRANSFERS

if TYPE_CHECKING:
    from modelfleet.schedules.timeline import Event, Timeline


def write_trace(timeline: "Timeline", path: Path) -> None:
    """Write a timeline into a JSON file."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": device}}
        for rank, device in enumerate(timeline.devices)
    ]
    events = [entry for number, event in enumerate(timeline.events) for entry in _entries(event, number, timeline)]
    path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _entries(event: "Event", number: int, timeline: "Timeline") -> list[dict[str, Any]]:
    """Return the entries of one event: for a transfer its begin and its end, because transfers overlap."""
    operation = event.operation
    where = {"name": operation.describe(timeline.devices), "cat": operation.kind, "pid": 0, "tid": event.rank}
    details = {"waited": event.waited, "bytes": event.bytes}
    start, end = _microseconds(event.start - timeline.start), _microseconds(event.end - timeline.start)
    if operation.kind in TRANSFERS:
        return [
            {**where, "ph": "b", "id": number, "ts": start, "args": details},
            {**where, "ph": "e", "id": number, "ts": end},
        ]
    return [{**where, "ph": "X", "ts": start, "dur": end - start, "args": details}]


def _microseconds(seconds: float) -> float:
    return seconds * 1e6
