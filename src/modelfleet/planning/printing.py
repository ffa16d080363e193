"""Printing plans: a summary line, a table of lanes, and the reasons, each of them once."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from modelfleet.formatting import count, duration, size, some
from modelfleet.lanes import LaneSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelfleet.planning.plan import Plan


@dataclass(frozen=True)
class _Row:
    """Lanes that differ only in their members, and so are shown in one line."""

    numbers: list[int]
    lanes: list[LaneSpec]

    @property
    def label(self) -> str:
        first, last = self.numbers[0], self.numbers[-1]
        text = f"{first}" if first == last else f"{first}–{last}"
        return f"{text}, wave {self.lanes[0].wave + 1}" if self.lanes[0].wave else text


def as_text(plan: "Plan") -> str:
    """Return a plan as text, as wide as the terminal, or 110 columns if there is none."""
    from rich.console import Console

    terminal = Console()
    width = terminal.width if terminal.is_terminal else 110
    # Without force_jupyter rich would display the table in a notebook instead of writing it to the file.
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=False, force_jupyter=False)
    console.print(as_renderable(plan))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def as_renderable(plan: "Plan") -> "RenderableType":
    """Return a plan as something that rich prints."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    rows = _rows(plan.lanes)
    table = Table(title=_summary(plan), title_justify="left")
    for column in ("lane", "members", "device", "parameters", "memory", "steps", "program"):
        table.add_column(column, overflow="fold")
    for row in rows:
        lane = row.lanes[0]
        lanes = "" if len(row.lanes) == 1 else f"{len(row.lanes)} × "
        table.add_row(
            row.label,
            Text(some([name for lane in row.lanes for name in lane.members])),
            lane.device or "–",
            f"{lanes}{lane.width} × {lane.parameters:,}",
            lanes + _memory(lane),
            _steps(lane),
            Text(lane.program),
        )
    reasons: dict[str, list[_Row]] = {}
    for row in rows:
        reasons.setdefault(row.lanes[0].reason, []).append(row)
    lines = [Padding(Text(f"{_lanes(own)}: {reason}"), (0, 0, 0, 1)) for reason, own in reasons.items() if reason]
    if plan.note:
        lines.append(Padding(Text(plan.note), (0, 0, 0, 1)))
    return Group(table, *lines)


def _lanes(rows: Sequence[_Row]) -> str:
    several = sum(len(row.lanes) for row in rows) > 1
    return f"{'lanes' if several else 'lane'} {', '.join(row.label for row in rows)}"


def _rows(lanes: Sequence[LaneSpec]) -> list[_Row]:
    """Return the rows of a table: neighbouring lanes that differ only in their members share a row."""
    rows: list[_Row] = []
    last: Hashable = None
    for number, lane in enumerate(lanes):
        alike = lane.reason, lane.device, lane.wave, lane.width, lane.parameters, lane.program, lane.steps
        if rows and alike == last:
            rows[-1].numbers.append(number)
            rows[-1].lanes.append(lane)
        else:
            rows.append(_Row([number], [lane]))
        last = alike
    return rows


def _summary(plan: "Plan") -> str:
    members = sum(lane.width for lane in plan.lanes)
    parts = [f"{count(members, 'member')} in {count(len(plan.lanes), 'lane')}"]
    if len(plan.lanes) > 1:
        parts[0] += f", {plan.sharing}"
    if plan.predicted_seconds is not None:
        parts.append(f"predicted {duration(plan.predicted_seconds)}")
    if plan.seconds_per_epoch is not None:
        parts.append(f"the last run took {duration(plan.seconds_per_epoch)} an epoch")
    if plan.measuring_seconds >= 0.01:
        parts.append(f"measuring took {duration(plan.measuring_seconds)}")
    return "; ".join(parts)


def _memory(lane: LaneSpec) -> str:
    if lane.working_bytes is None:
        return size(lane.state_bytes)
    return f"{size(lane.state_bytes)}\n+ {size(lane.working_bytes)}"


def _steps(lane: LaneSpec) -> str:
    if lane.steps is None:
        return "–"
    lines = [f"{lane.steps:,}"]
    if lane.predicted_seconds_per_step is not None:
        lines.append(f"of ≈ {milliseconds(lane.predicted_seconds_per_step)}")
    if lane.seconds_per_step is not None:
        lines.append(f"took {milliseconds(lane.seconds_per_step)}")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """Return a time in words."""
    return f"{1000 * seconds:.3g} ms"
