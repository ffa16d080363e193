"""Printing a split: a table of its stages, what goes between them, and the reasons."""

from io import StringIO
from typing import TYPE_CHECKING

from modelfleet.formatting import size

if TYPE_CHECKING:
    from modelfleet.graph.split import Split


def as_text(split: "Split") -> str:
    """Return a split as text, 110 columns wide."""
    from rich.console import Console
    from rich.table import Table

    count = len(split.stages)
    longest, mean = max(split.seconds), sum(split.seconds) / count
    uneven = f"the longest takes {longest / mean:.2f} × the mean" if mean else "too short to measure"
    table = Table(title=f"{type(split.model).__name__} in {count} stages: {uneven}", title_justify="left")
    for column in ("stage", "forward", "backward", "parameters", "memory", "arrives"):
        table.add_column(column, overflow="fold")
    rows = zip(split.stages, split.timings, split.parameters, split.memory, strict=True)
    for name, timing, parameters, memory in rows:
        table.add_row(
            name,
            _milliseconds(timing.forward),
            _milliseconds(timing.backward),
            f"{parameters:,}",
            size(memory),
            _arriving(split, name),
        )
    # Without force_jupyter rich would display the table in a notebook instead of writing it to the file.
    file = StringIO()
    Console(file=file, width=110, force_terminal=False, force_jupyter=False).print(table)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join([*lines, *(f" {reason}" for reason in split.reasons)])


def _arriving(split: "Split", name: str) -> str:
    """Return what a stage gets from each earlier one: `4.1 kB from stage0`."""
    found: dict[str, int] = {}
    for link in split.links:
        if link.target == name:
            found[link.source] = found.get(link.source, 0) + link.bytes
    return ", ".join(f"{size(total)} from {source or 'the batch'}" for source, total in found.items())


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds else "–"
