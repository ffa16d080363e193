"""Totals, the bottleneck, and the forms in which a timeline is shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tests.schedules.specs import chain, devices

from modelfleet.schedules import (
    EdgeSpec,
    EdgeTotals,
    Event,
    GraphSpec,
    NodeSpec,
    NodeTotals,
    Operation,
    Timeline,
    build,
    simulate,
)


def simulated(spec: GraphSpec, ranks: int, micro_batches: int) -> Timeline:
    return simulate(build(spec, devices(ranks), micro_batches=micro_batches), spec)


def pair(*, head: float = 1.0, transfer: float = 0.0) -> GraphSpec:
    return GraphSpec(
        (NodeSpec("encoder", (0,)), NodeSpec("head", (1,), forward=head, backward=2 * head)),
        (EdgeSpec("encoder→head", "encoder", "head", bytes=1_000_000, seconds=transfer),),
    )


def test_totals_count_what_was_computed_and_not_what_was_waited_for() -> None:
    timeline = simulated(pair(transfer=0.5), 2, 2)
    nodes = timeline.by_node()
    assert nodes["encoder"].forward == 2.0
    assert nodes["encoder"].backward == 4.0
    assert timeline.by_edge() == {"encoder→head": EdgeTotals(4, 4_000_000, 2.0)}
    assert timeline.bubbles == tuple(1 - 6.0 / timeline.seconds for _ in range(2))
    assert timeline.bubble == timeline.bubbles[0]


def test_a_timeline_may_begin_at_any_time() -> None:
    timeline = simulated(pair(), 2, 2)
    later = replace(
        timeline, events=tuple(replace(e, start=e.start + 1e6, end=e.end + 1e6) for e in timeline.events)
    )
    assert later.seconds == timeline.seconds
    assert later.bubble == pytest.approx(timeline.bubble)
    assert later.bottleneck() == timeline.bottleneck()


def test_an_empty_timeline_has_no_bottleneck() -> None:
    empty = Timeline(("cpu",), ())
    assert (empty.seconds, empty.bubble, empty.bottleneck()) == (0.0, 0.0, "Nothing was computed.")
    assert "Nothing was computed" in str(empty)


@pytest.mark.parametrize(
    ("spec", "micro_batches", "sentences"),
    [
        (
            pair(head=4.0),
            32,
            "'head' on cpu:1 limits the speed: this device computes for 384 s of 387 s, the others for 96 s on "
            "average. Cut the graph elsewhere, or give 'head' more devices.",
        ),
        (
            pair(),
            2,
            "with 2 of them on 2 devices, the devices are idle for 33% of the time. Use more micro-batches.",
        ),
        (pair(transfer=9.0), 8, "The transfers along 'encoder→head' limit the speed: they carry 16 MB in 144 s"),
        (pair(), 100, "Nothing stands out: the devices compute for 99% of the time."),
        (
            GraphSpec((NodeSpec("alone", (0,)),)),
            1,
            "Nothing stands out: the devices compute for 100% of the time.",
        ),
    ],
)
def test_the_bottleneck_is_named_with_what_would_help(spec: GraphSpec, micro_batches: int, sentences: str) -> None:
    assert sentences in simulated(spec, len(spec.nodes), micro_batches).bottleneck()


def test_what_the_bottleneck_says_would_help_does_help() -> None:
    few, many = (simulated(pair(), 2, m) for m in (2, 8))
    assert many.bubble < few.bubble
    slow, fast = (simulated(pair(transfer=t), 2, 8) for t in (9.0, 0.5))
    assert fast.seconds < slow.seconds
    two = GraphSpec((pair().nodes[0], replace(pair(head=4.0).nodes[1], ranks=(1, 2))), pair().edges)
    assert simulated(two, 3, 32).seconds < simulated(pair(head=4.0), 2, 32).seconds


def test_the_text_shows_what_was_measured_beside_what_was_planned() -> None:
    planned = simulated(pair(), 2, 2)
    measured = replace(simulated(pair(head=2.0), 2, 2), planned=planned)
    lines = str(measured).splitlines()
    assert lines[0] == "15 s (planned 9 s), idle 40% (33%)"
    assert lines[2].split() == ["device", "computes", "idle", "peak", "memory"]
    assert lines[4] == "cpu:1   12 s (6 s)  20% (33%)  2 MB (2 MB)"
    assert "head     4 s (2 s)  8 s (4 s)" in str(measured)
    assert "encoder→head  4          4 MB   0 s (0 s)" in str(measured)
    assert lines[-1] == measured.bottleneck()


def test_the_trace_has_a_row_per_device_and_transfers_that_may_overlap(tmp_path: Path) -> None:
    timeline = simulated(pair(transfer=0.5), 2, 3)
    timeline.chrome_trace(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert names == {0: "cpu:0", 1: "cpu:1"}
    (forward,) = [entry for entry in entries if entry["name"] == "forward head[0]"]
    assert (forward["tid"], forward["ts"], forward["dur"]) == (1, 0.0, 2.5e6)
    assert forward["args"] == {"waited": 1.5, "bytes": 0}
    begun = [entry["id"] for entry in entries if entry["ph"] == "b"]
    ended = [entry["id"] for entry in entries if entry["ph"] == "e"]
    assert sorted(begun) == sorted(ended) == sorted(set(begun))
    assert len(begun) == 4 * 3


def test_the_trace_has_what_was_planned_beside_what_was_measured(tmp_path: Path) -> None:
    measured = replace(simulated(pair(head=2.0), 2, 3), planned=simulated(pair(), 2, 3))
    measured.chrome_trace(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {0: "measured", 1: "planned"}
    took = {entry["pid"]: entry["dur"] for entry in entries if entry["name"] == "backward head[0]"}
    assert took == {0: 4e6, 1: 2e6}
    begun = [entry["id"] for entry in entries if entry["ph"] == "b"]
    assert len(begun) == len(set(begun)) == 2 * 12


def test_the_picture_has_a_bar_for_every_computation_and_a_panel_for_the_plan() -> None:
    timeline = simulated(chain(3), 3, 4)
    figure = timeline.plot()
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cpu:0", "cpu:1", "cpu:2"]
    assert sorted(text.get_text() for text in axes.texts) == sorted(str(m) for m in range(4) for _ in range(6))
    measured, planned = timeline.plot(timeline).axes
    assert measured.get_title(loc="left").startswith("measured: 12 s")
    assert planned.get_title(loc="left").startswith("planned: 12 s")
    longer = simulated(chain(3), 3, 8)
    assert all(axes.get_xlim() == (0.0, longer.seconds) for axes in replace(timeline, planned=longer).plot().axes)


def test_a_measured_timeline_need_not_have_all_kinds_of_events(tmp_path: Path) -> None:
    timeline = Timeline(("cuda:0",), (Event(0, Operation("apply", "only"), 1.0, 3.0, 0.5),))
    assert timeline.by_node() == {"only": NodeTotals(apply=1.5, waited=0.5)}
    timeline.plot().savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
    assert "cuda:0" in str(timeline)
