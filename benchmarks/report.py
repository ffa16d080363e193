"""What was measured, as tables for a reader and as JSON for a program."""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.entrants import FLEET, Contest
from benchmarks.harness import ColdResult, Result
from benchmarks.rows import COLD, TORCH, Row

LINEAR = 1.1  # a member may cost this much more than in the fleet before it: the machine's noise, not growth


@dataclass(frozen=True)
class Ratio:
    """How much faster modelfleet is than a peer: by the best rounds, and over the rounds side by side."""

    value: float
    low: float
    high: float
    bar: float | None
    instead: bool = False
    """Whether another bar was reached that may stand for this one."""

    @property
    def reached(self) -> bool | None:
        """Whether the bar is reached; `None` without one."""
        return None if self.bar is None else self.value >= self.bar or self.instead


@dataclass
class Report:
    """Everything of one run."""

    quick: bool
    rows: list[tuple[Row | Contest, list[Result]]] = field(default_factory=list)
    cold: list[ColdResult] = field(default_factory=list)
    growth: dict[int, Result] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What modelfleet itself could not do."""
        own = [(_title(row), result) for row, results in self.rows for result in results]
        own += [(f"growth, {members:,} members", result) for members, result in self.growth.items()]
        told = [f"{title}: {result.problem}" for title, result in own if result.peer == FLEET and result.problem]
        return told + [
            f"{COLD.title}: {cold.problem}" for cold in self.cold if cold.peer == FLEET and cold.problem
        ]


def ratio(row: Row | Contest, results: list[Result], peer: Result) -> Ratio | None:
    """modelfleet against `peer` on `row`, or `None` where one of them has nothing to show."""
    fleet = next(result for result in results if result.peer == FLEET)
    if fleet.problem or peer.problem or peer is fleet:
        return None
    bar, instead = row.bar(peer.peer), False
    if isinstance(row, Contest) and peer.peer in row.either:
        others = [other for other in results if other.peer in row.either and not other.problem]
        instead = any(fleet.rate / other.rate >= row.bars[other.peer] for other in others)
    work = fleet.member_steps / peer.member_steps
    beside = [work * theirs / ours for ours, theirs in zip(fleet.seconds, peer.seconds, strict=True)]
    return Ratio(fleet.rate / peer.rate, min(beside), max(beside), bar, instead)


def cold_ratio(results: list[ColdResult]) -> Ratio | None:
    """modelfleet's cold start against torch's."""
    fleet, torch = results
    if fleet.problem or torch.problem:
        return None
    beside = [theirs / ours for ours, theirs in zip(fleet.seconds, torch.seconds, strict=True)]
    return Ratio(min(torch.seconds) / min(fleet.seconds), min(beside), max(beside), COLD.over_torch)


def growth_lines(found: dict[int, Result]) -> list[dict[str, Any]]:
    """Time and memory by fleet size, and what a member costs against the size before it."""
    lines: list[dict[str, Any]] = [
        {
            "members": members,
            "ms_per_step": 1e3 * members / result.rate,
            "us_per_member_step": 1e6 / result.rate,
            "peak_bytes": result.memory,
            "bytes_per_member": result.memory / members,
        }
        for members, result in found.items()
        if not result.problem
    ]
    for before, line in pairwise(lines):
        line["time_growth"] = line["us_per_member_step"] / before["us_per_member_step"]
        line["memory_growth"] = line["bytes_per_member"] / before["bytes_per_member"]
        line["reached"] = max(line["time_growth"], line["memory_growth"]) <= LINEAR
    return lines


def show(report: Report, console: Console) -> None:
    """Print the tables."""
    for _, group in groupby(report.rows, lambda line: line[0].name):
        lines = list(group)
        row, results = lines[0]
        console.print(_case_table(lines) if _case(row) else _row_table(row, results))
    if report.cold:
        console.print(_cold_table(report.cold))
    if report.growth:
        console.print(_growth_table(growth_lines(report.growth)))
    for problem in report.problems:
        console.print(f"[red]{problem}")
    if report.quick:
        console.print("--quick: a smoke test with tiny counts; these are no measurements.")


def _row_table(row: Row | Contest, results: list[Result]) -> Table:
    table = _table(row.title, "", f"{row.unit}/s", "spread", "modelfleet is", "to reach", "")
    for result in results:
        if result.problem:
            table.add_row(result.peer, "–", "", result.problem)
            continue
        compared = _cells(ratio(row, results, result))
        table.add_row(result.peer, f"{result.rate:,.0f}", f"+{result.spread:.0%}", *compared)
    told = [f"{result.peer}: {what} {value:.3g}" for result in results for what, value in result.notes.items()]
    if told:
        table.caption, table.caption_justify = "\n".join(told), "left"
    return table


def _case(row: Row | Contest) -> str:
    return row.case if isinstance(row, Contest) else ""


def _title(row: Row | Contest) -> str:
    return f"{row.title}, {_case(row)}" if _case(row) else row.title


def _case_table(lines: list[tuple[Row | Contest, list[Result]]]) -> Table:
    """A line for every case and peer, with the seconds of the quickest rounds for the same work."""
    table = _table(lines[0][0].title, "", "modelfleet", "peer", "modelfleet is", "to reach", "")
    for row, results in lines:
        fleet = next(result for result in results if result.peer == FLEET)
        if fleet.problem:
            table.add_row(_case(row), "–", "", fleet.problem)
        elif (most := within(row, fleet)) is not None:
            limit = row.most_seconds if isinstance(row, Contest) else None
            table.add_row(_case(row), _seconds(fleet.best), "", "", f"≤ {limit:g} s", _verdict(most))
        for peer in results:
            if fleet.problem or peer is fleet:
                continue
            where = _case(row) if len(results) == 2 else f"{_case(row)}, {peer.peer}"
            if peer.problem:
                table.add_row(where, _seconds(fleet.best), "–", peer.problem)
                continue
            theirs = fleet.member_steps / peer.rate
            compared = _cells(ratio(row, results, peer), spread=False)
            table.add_row(where, _seconds(fleet.best), _seconds(theirs), *compared)
    peers = {peer.peer for _, results in lines for peer in results if peer.peer != FLEET}
    told = [f"peer: {', '.join(sorted(peers))}"] if len(peers) == 1 else []
    told += [
        f"{_case(row)}, {result.peer}: {what} {value:.3g}"
        for row, results in lines
        for result in results
        for what, value in result.notes.items()
    ]
    if told:
        table.caption, table.caption_justify = "\n".join(told), "left"
    return table


def within(row: Row | Contest, fleet: Result) -> bool | None:
    """Whether modelfleet took no longer than a contest without peers allows; `None` for all others."""
    if not isinstance(row, Contest) or row.most_seconds is None or fleet.problem:
        return None
    return fleet.best <= row.most_seconds


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _cold_table(results: list[ColdResult]) -> Table:
    table = _table(COLD.title, "", "seconds", "with imports", "modelfleet is", "to reach", "")
    for cold in results:
        if cold.problem:
            table.add_row(cold.peer, "–", "", cold.problem)
            continue
        compared = cold_ratio(results) if cold.peer == TORCH else None
        table.add_row(cold.peer, f"{min(cold.seconds):.2f}", f"{min(cold.with_imports):.2f}", *_cells(compared))
    return table


def _table(title: str, *headings: str) -> Table:
    """A table with a left column and figures to the right of it; it fits 80 columns, as logs have them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left", no_wrap=not position)
    return table


def _cells(compared: Ratio | None, *, spread: bool = True) -> list[str]:
    """The ratio by the best rounds, its range over the rounds, the bar and the verdict."""
    if compared is None:
        return []
    cells = [f"{compared.value:.3g} ×" + (f" ({compared.low:.3g}–{compared.high:.3g})" if spread else "")]
    return cells if compared.bar is None else [*cells, f"≥ {compared.bar:.3g} ×", _verdict(compared.reached)]


def _verdict(reached: bool | None) -> str:
    return "" if reached is None else "[green]yes" if reached else "[red]no"


def _growth_table(lines: list[dict[str, Any]]) -> Table:
    title = "Growth: MLP 16-32-32-4, own data each; × is a member's cost against the line above"
    table = _table(title, "members", "ms/step", "µs/member", "×", "peak MB", "KB/member", "×", "linear")
    for line in lines:
        table.add_row(
            f"{line['members']:,}",
            f"{line['ms_per_step']:.2f}",
            f"{line['us_per_member_step']:.1f}",
            f"{line['time_growth']:.2f}" if "time_growth" in line else "",
            f"{line['peak_bytes'] / 1e6:.0f}",
            f"{line['bytes_per_member'] / 1e3:.0f}",
            f"{line['memory_growth']:.2f}" if "memory_growth" in line else "",
            _verdict(line.get("reached")),
        )
    return table


def save(report: Report, path: Path) -> None:
    """Write everything as JSON."""
    rows = [
        {
            "row": row.name,
            "title": row.title,
            "case": _case(row),
            "steady": not (isinstance(row, Contest) and row.fresh),
            "peers": [
                asdict(result)
                | ({} if result.problem else {"rate": result.rate, "spread": result.spread})
                | {"modelfleet_is": _plain(ratio(row, results, result))}
                | ({"within": within(row, result)} if result.peer == FLEET else {})
                for result in results
            ],
        }
        for row, results in report.rows
    ]
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": report.quick,
        "machine": machine(),
        "rows": rows,
        "cold_start": {
            "peers": [asdict(cold) for cold in report.cold],
            "modelfleet_is": _plain(cold_ratio(report.cold)) if report.cold else None,
        },
        "growth": growth_lines(report.growth),
        "problems": report.problems,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _plain(compared: Ratio | None) -> dict[str, Any] | None:
    return None if compared is None else asdict(compared) | {"reached": compared.reached}


def machine() -> dict[str, Any]:
    """The processor and the versions that the numbers belong to."""
    versions: dict[str, str | None] = {}
    for package in ("modelfleet", "torch", "jax", "keras", "tensorflow", "ray", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
