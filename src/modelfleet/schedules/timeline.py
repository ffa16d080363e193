"""When each operation ran, or would run: totals, and what limits the speed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from modelfleet.formatting import size
from modelfleet.frames import import_package
from modelfleet.schedules.operations import BACKWARDS, COMPUTATIONS, Operation
from modelfleet.schedules.trace import write_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WORTH_SAYING = 0.1  # the share of idle time from which something limits the speed


@dataclass(frozen=True)
class Event:
    """Says when a rank went through an operation.

    Attributes:
        rank: The rank.
        operation: The operation.
        start: When the rank came to it. For a transfer that goes on beside computations, when it was begun.
        end: When it was done.
        waited: How much of this time, at its beginning, was spent waiting for other ranks.
        bytes: What a transfer carried.
    """

    rank: int
    operation: Operation
    start: float
    end: float
    waited: float = 0.0
    bytes: int = 0

    @property
    def begun(self) -> float:
        """When the waiting was over."""
        return self.start + self.waited

    @property
    def seconds(self) -> float:
        """The time without waiting."""
        return self.end - self.begun


@dataclass(frozen=True)
class NodeTotals:
    """Holds what all computations of a node took together, on all its ranks."""

    forward: float = 0.0
    backward: float = 0.0
    apply: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class EdgeTotals:
    """Holds what all transfers along an edge carried and took together, in both directions."""

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Holds when each operation of a schedule ran, or would run.

    Print a timeline to see what each device and node did, beside what was planned.

    Attributes:
        devices: The device of every rank.
        events: What happened, in any order.
        peak_bytes: The most that each rank held at any time, if it is known.
        planned: The simulated timeline of the same schedule, if there is one.
    """

    devices: tuple[str, ...]
    events: tuple[Event, ...]
    peak_bytes: tuple[int, ...] | None = None
    planned: "Timeline | None" = None

    @cached_property
    def start(self) -> float:
        """When the first operation began."""
        return min((event.start for event in self.events), default=0.0)

    @cached_property
    def seconds(self) -> float:
        """The time from the beginning of the first operation to the end of the last one."""
        return max((event.end for event in self.events), default=0.0) - self.start

    def busy(self, rank: int) -> float:
        """Return how long a rank computed."""
        return sum(event.seconds for event in self._by_rank[rank] if _computes(event))

    @cached_property
    def _by_rank(self) -> tuple[list[Event], ...]:
        events: tuple[list[Event], ...] = tuple([] for _ in self.devices)
        for event in self.events:
            events[event.rank].append(event)
        return events

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the time in which each rank does not compute."""
        if not self.seconds:
            return (0.0,) * len(self.devices)
        return tuple(max(0.0, 1 - self.busy(rank) / self.seconds) for rank in range(len(self.devices)))

    @property
    def bubble(self) -> float:
        """The share of the time in which the ranks do not compute, on average."""
        return sum(self.bubbles) / len(self.devices) if self.devices else 0.0

    def by_node(self) -> dict[str, NodeTotals]:
        """Return what the computations of each node took, by the node's name."""
        found: dict[str, NodeTotals] = {}
        for event in filter(_computes, self.events):
            kind = event.operation.kind
            totals = found.get(event.operation.node, NodeTotals())
            found[event.operation.node] = NodeTotals(
                totals.forward + (event.seconds if kind == "forward" else 0.0),
                totals.backward + (event.seconds if kind in BACKWARDS else 0.0),
                totals.apply + (event.seconds if kind == "apply" else 0.0),
                totals.waited + event.waited,
            )
        return found

    def by_edge(self) -> dict[str, EdgeTotals]:
        """Return what was transferred along each edge, by the edge's name. Receives are counted, not sends."""
        found: dict[str, EdgeTotals] = {}
        for event in self.events:
            if event.operation.kind == "receive":
                totals = found.get(event.operation.edge, EdgeTotals())
                found[event.operation.edge] = EdgeTotals(
                    totals.transfers + 1, totals.bytes + event.bytes, totals.seconds + event.seconds
                )
        return found

    def bottleneck(self) -> str:
        """Return a sentence that names what limits the speed, and one that says what would help.

        A rank's idle time has three causes: another rank has more to compute than this one, a transfer to this
        rank is under way, or ranks wait for each other because there are few micro-batches. The largest, on
        average over the ranks, is the bottleneck.
        """
        ranks, total = range(len(self.devices)), self.seconds
        busy = [self.busy(rank) for rank in ranks]
        if not total or not any(busy):
            return "Nothing was computed."
        mean, most = sum(busy) / len(busy), max(busy)
        in_transfers = sum(self._idle_in_transfers(rank) for rank in ranks) / len(busy)
        causes: dict[float, Callable[[], str]] = {
            max(0.0, total - most - in_transfers): self._too_few_micro_batches,
            in_transfers: self._slow_transfers,
            most - mean: self._uneven,
        }
        largest = max(causes)
        if largest < _WORTH_SAYING * total:
            return (
                f"Nothing stands out: the devices compute for {1 - self.bubble:.0%} of the time. Only faster "
                "devices, or more of them, would help."
            )
        return causes[largest]()

    def _uneven(self) -> str:
        ranks = range(len(self.devices))
        rank = max(ranks, key=self.busy)
        others = [self.busy(other) for other in ranks if other != rank]
        own = replace(self, events=tuple(self._by_rank[rank])).by_node()
        node = max(own, key=lambda name: own[name].forward + own[name].backward + own[name].apply)
        return (
            f"'{node}' on {self.devices[rank]} limits the speed: this device computes for {_s(self.busy(rank))} "
            f"of {_s(self.seconds)}, the others for {_s(sum(others) / len(others))} on average. Cut the graph "
            f"elsewhere, or give '{node}' more devices."
        )

    def _slow_transfers(self) -> str:
        edges = self.by_edge()
        edge = max(edges, key=lambda name: edges[name].seconds)
        waited = sum(self._idle_in_transfers(rank) for rank in range(len(self.devices))) / len(self.devices)
        return (
            f"The transfers along '{edge}' limit the speed: they carry {size(edges[edge].bytes)} in "
            f"{_s(edges[edge].seconds)}, and devices wait for transfers for {_s(waited)} of {_s(self.seconds)} on "
            "average. Use a faster link, cut the graph where less is sent, or place both nodes on one device."
        )

    def _too_few_micro_batches(self) -> str:
        micro = len({event.operation.micro for event in self.events if event.operation.kind in COMPUTATIONS})
        return (
            f"The number of micro-batches limits the speed: with {micro} of them on {len(self.devices)} devices, "
            f"the devices are idle for {self.bubble:.0%} of the time. Use more micro-batches."
        )

    def _idle_in_transfers(self, rank: int) -> float:
        """Return how long a rank did not compute while a transfer to it was under way."""
        own = self._by_rank[rank]
        computing = _union((event.begun, event.end) for event in own if _computes(event))
        transfers = _union((event.begun, event.end) for event in own if event.operation.kind == "receive")
        both = _union([*computing, *transfers])
        return _length(both) - _length(computing)

    def plot(self, planned: "Timeline | None" = None) -> "Figure":
        """Draw a row of bars per device, and the transfers between them as lines.

        Args:
            planned: A timeline to draw below, such as the simulated one; by default that of this timeline.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        import_package("matplotlib.figure", "timeline.plot()")
        from modelfleet.schedules.drawing import draw

        planned = planned or self.planned
        return draw([("", self)] if planned is None else [("measured", self), ("planned", planned)])

    def chrome_trace(self, path: str | Path) -> None:
        """Write the timeline as a JSON file for Perfetto and Chrome's about:tracing."""
        write_trace(self, Path(path))

    def __str__(self) -> str:
        from modelfleet.schedules.table import as_text

        return as_text(self)


def _computes(event: Event) -> bool:
    return event.operation.kind in COMPUTATIONS or event.operation.kind == "apply"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans that do not overlap and cover the same time."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
