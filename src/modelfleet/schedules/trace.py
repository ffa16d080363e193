"""Timelines as trace events, as Chrome's about:tracing and Perfetto read them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelfleet.schedules.operations import TRANSFERS

if TYPE_CHECKING:
    from modelfleet.schedules.timeline import Event, Timeline


def write_trace(timeline: "Timeline", path: Path) -> None:
    """Write a timeline into a JSON file, with what was planned as a process of its own."""
    if timeline.planned is None:
        entries = _process(timeline, 0, "")
    else:
        entries = [*_process(timeline, 0, "measured"), *_process(timeline.planned, 1, "planned")]
    path.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}), encoding="utf-8")


def _process(timeline: "Timeline", process: int, title: str) -> list[dict[str, Any]]:
    """Return the entries of a timeline, with a row for each device."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": rank, "args": {"name": device}}
        for rank, device in enumerate(timeline.devices)
    ]
    if title:
        names.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}})
    events = [
        entry | {"pid": process}
        for number, event in enumerate(timeline.events)
        for entry in _entries(event, f"{process}.{number}", timeline)
    ]
    return [*names, *events]


def _entries(event: "Event", number: str, timeline: "Timeline") -> list[dict[str, Any]]:
    """Return the entries of one event: for a transfer its begin and its end, because transfers overlap."""
    operation = event.operation
    where = {"name": operation.describe(timeline.devices), "cat": operation.kind, "tid": event.rank}
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
