"""Plans of graphs: which node runs where, in which order, and what that will take. A frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from modelfleet.formatting import count, size
from modelfleet.schedules import GraphSpec, Schedule, Timeline, peak_bytes, simulate
from modelfleet.types import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class GraphPlan:
    """What a chain or a graph will do for one batch, and why.

    Print it, compare it, or draw it with `plot`. Measured times do not count in a comparison.

    Attributes:
        devices: The device of every rank.
        rows: The devices of every node.
        spec: The nodes and edges with their measured times and sizes.
        schedule: The operations of every rank, proved to end.
        strategy: How the ranks run: "threads", "processes" or "ray".
        batch_size: The number of rows that the times are for.
        notes: What you should know, such as what BatchNorm sees in micro-batches.
        tried: False if no data were given: then the nodes count as equal, and no times are known.
        measured: What the last run measured; None before.
    """

    devices: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]
    spec: GraphSpec = field(compare=False)
    schedule: Schedule = field(compare=False)
    strategy: str
    batch_size: int
    notes: tuple[str, ...] = ()
    tried: bool = True
    measured: Timeline | None = field(default=None, compare=False)

    @cached_property
    def timeline(self) -> Timeline:
        """Return when each operation of a step is expected to run."""
        return simulate(self.schedule, self.spec)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return the most bytes of activations that each rank holds at once."""
        return peak_bytes(self.schedule, self.spec)

    def __str__(self) -> str:
        timeline = self.timeline
        micro = self.schedule.micro_batches
        lines = [
            f"{count(len(self.spec.nodes), 'node')} on {count(len(self.devices), 'device')}, {self.strategy}: "
            f"{self.schedule.name}, {'1 micro-batch' if micro == 1 else f'{micro} micro-batches'} a batch"
        ]
        if self.tried:
            lines[0] += f" of {self.batch_size} rows, about {_time(timeline.seconds)} a step"
        lines[0] += f", {timeline.bubble:.0%} idle"
        lines += self._costs() if self.tried else self._places()
        lines += [f"  {note}" for note in self.notes]
        if self.measured is not None:
            lines.append(str(self.measured))
        return "\n".join(lines)

    def _places(self) -> list[str]:
        """Return a line for every node, and one for the edges."""
        width = max(len(node.name) for node in self.spec.nodes)
        lines = [f"  {node.name:<{width}}  {', '.join(self.rows[node.name])}" for node in self.spec.nodes]
        return [*lines, *([f"  {', '.join(edge.name for edge in self.spec.edges)}"] if self.spec.edges else [])]

    def _costs(self) -> list[str]:
        """Return a line for every node, edge and device."""
        lines = []
        width = max(len(node.name) for node in self.spec.nodes)
        for node in self.spec.nodes:
            times = f"forward {_time(node.forward)}"
            if node.name in self.spec.with_backward:
                times += f", backward {_time(node.backward)}"
            frozen = "" if node.trained else ", frozen"
            lines.append(
                f"  {node.name:<{width}}  {', '.join(self.rows[node.name])}: {times}, keeps "
                f"{size(node.kept_bytes)} a micro-batch{frozen}"
            )
        for edge in self.spec.edges:
            kind = "" if edge.differentiable else ", no gradient"
            lines.append(f"  {edge.name}: {size(edge.bytes)} a micro-batch{kind}")
        for device, peak in zip(self.devices, self.peak_bytes, strict=True):
            lines.append(f"  {device} holds at most {size(peak)} of activations")
        return lines

    def to_dict(self) -> dict[str, Json]:
        """Return the plan as values that JSON can hold."""
        return {
            "devices": list(self.devices),
            "rows": {name: list(row) for name, row in self.rows.items()},
            "strategy": self.strategy,
            "batch_size": self.batch_size,
            "schedule": self.schedule.to_dict(),
            "seconds": self.timeline.seconds,
            "bubble": self.timeline.bubble,
            "peak_bytes": list(self.peak_bytes),
            "notes": list(self.notes),
        }

    def plot(self) -> "Figure":
        """Draw the timeline: what was measured above what was planned, or the plan alone before a run."""
        return (self.timeline if self.measured is None else self.measured).plot()

    def chrome_trace(self, path: str | Path) -> None:
        """Write the timeline as a trace for Chrome's `about:tracing` or Perfetto."""
        (self.timeline if self.measured is None else self.measured).chrome_trace(path)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
