"""Simulated times, and what ranks hold meanwhile."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from tests.schedules.specs import Case, cases, chain, devices

from modelfleet.errors import DeadlockError, InputError
from modelfleet.schedules import (
    EdgeSpec,
    GraphSpec,
    NodeSpec,
    Operation,
    Schedule,
    ScheduleName,
    build,
    peak_bytes,
    simulate,
)

PAIR = GraphSpec(
    (NodeSpec("a", (0,), kept_bytes=100, output_bytes=10), NodeSpec("b", (1,), kept_bytes=1000)),
    (EdgeSpec("a→b", "a", "b", bytes=10, seconds=5.0),),
)


def pair(*lists: tuple[Operation, ...]) -> Schedule:
    return Schedule("by hand", devices(2), 1, lists)


def test_a_computation_waits_for_the_transfer_of_its_input() -> None:
    timeline = simulate(build(PAIR, devices(2), micro_batches=1, train=False), PAIR)
    assert [(str(e.operation), e.rank, e.start, e.end, e.waited, e.bytes) for e in timeline.events] == [
        ("forward a[0]", 0, 0.0, 1.0, 0.0, 0),
        ("forward b[0]", 1, 0.0, 7.0, 6.0, 0),
        ("send a→b[0] to rank 1", 0, 1.0, 6.0, 0.0, 10),
        ("receive a→b[0] from rank 0", 1, 1.0, 6.0, 0.0, 10),
    ]
    assert timeline.seconds == 7.0
    assert timeline.busy(1) == 1.0


def test_blocking_ranks_wait_in_the_transfer_itself() -> None:
    timeline = simulate(build(PAIR, devices(2), micro_batches=1, train=False), PAIR, blocking=True)
    assert [(e.operation.kind, e.start, e.end, e.waited) for e in timeline.events] == [
        ("forward", 0.0, 1.0, 0.0),
        ("receive", 0.0, 6.0, 1.0),
        ("send", 1.0, 6.0, 0.0),
        ("forward", 6.0, 7.0, 0.0),
    ]


def test_transfers_from_one_rank_to_another_go_one_after_the_other() -> None:
    timeline = simulate(build(PAIR, devices(2), micro_batches=3, train=False, schedule="gpipe"), PAIR)
    arrivals = [event.end for event in timeline.events if event.operation.kind == "receive"]
    assert arrivals == [6.0, 11.0, 16.0]


def test_transfers_that_run_at_once_take_as_long_as_the_longest() -> None:
    spec = replace(PAIR, edges=(*PAIR.edges, EdgeSpec("skip", "a", "b", seconds=2.0)))
    there = [Operation("send", micro=0, edge=edge, peer=1) for edge in ("a→b", "skip")]
    here = [Operation("receive", micro=0, edge=edge, peer=0) for edge in ("a→b", "skip")]
    forward = Operation("forward", "a", 0), Operation("forward", "b", 0)
    for at_once, seconds in ((False, 9.0), (True, 7.0)):
        there[1], here[1] = replace(there[1], with_previous=at_once), replace(here[1], with_previous=at_once)
        schedule = pair((forward[0], *there), (*here, forward[1]))
        assert simulate(schedule, spec, blocking=True).seconds == seconds


def test_a_sum_waits_for_all_of_its_ranks() -> None:
    timeline = simulate(build(PAIR, devices(2), micro_batches=1), PAIR)
    sums = {event.rank: event for event in timeline.events if event.operation.kind == "sum"}
    assert (sums[0].start, sums[0].end, sums[0].waited) == (16.0, 16.0, 0.0)
    assert (sums[1].start, sums[1].end, sums[1].waited) == (9.0, 16.0, 7.0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_no_rank_does_two_things_at_once_and_blocking_takes_as_long_or_longer(case: Case) -> None:
    schedule = case.build()
    free, blocking = (simulate(schedule, case.spec, blocking=blocking) for blocking in (False, True))
    for timeline in (free, blocking):
        for rank in range(case.ranks):
            events = [event for event in timeline.events if event.rank == rank]
            if timeline is free:
                events = [event for event in events if event.operation.kind not in ("send", "receive")]
            events.sort(key=lambda event: (event.start, event.end))
            assert all(before.end <= after.start + 1e-9 for before, after in pairwise(events))
    work = sum(
        node.seconds(operation.kind)
        for own in schedule.operations
        for operation in own
        for node in case.spec.nodes
        if operation.node == node.name
    )
    assert sum(free.busy(rank) for rank in range(case.ranks)) == pytest.approx(work)
    assert blocking.seconds >= free.seconds - 1e-9


def test_two_steps_take_twice_as_long() -> None:
    spec = chain(3)
    step = build(spec, devices(3), micro_batches=4)
    assert simulate(step.then(step), spec).seconds == 2 * simulate(step, spec).seconds


def test_activations_outputs_and_received_tensors_are_held_until_their_last_use() -> None:
    quick = replace(PAIR, edges=(replace(PAIR.edges[0], seconds=0.0),))
    schedule = build(quick, devices(2), micro_batches=3, schedule="gpipe")
    # What the nodes keep, and one output or gradient that goes from one to the other.
    assert peak_bytes(schedule, PAIR) == (3 * 100 + 10, 3 * 1000 + 10)
    assert peak_bytes(build(quick, devices(2), micro_batches=3, train=False), PAIR) == (10, 10)


def test_the_halves_of_a_backward_keep_activations_until_the_second() -> None:
    spec = GraphSpec(
        (NodeSpec("a", (0,)), NodeSpec("b", (1,), kept_bytes=1000)), (EdgeSpec("a→b", "a", "b", bytes=10),)
    )
    schedule = build(spec, devices(2), micro_batches=4, schedule="zero-bubble")
    assert peak_bytes(schedule, spec)[1] == 2 * 1000 + 10


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 3 * 2 + 10), ("1f1b", 2 + 10), ("zero-bubble", 2 + 10)])
def test_what_is_recomputed_is_held_during_a_backward_only(schedule: ScheduleName, most: int) -> None:
    spec = GraphSpec((NodeSpec("only", (0,), kept_bytes=2, recomputed_bytes=10),))
    assert peak_bytes(build(spec, devices(1), micro_batches=3, schedule=schedule), spec) == (most,)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([Operation("forward", "b", 0)], "has not computed or received a→b"),
        ([Operation("send", micro=0, edge="a→b", peer=0)], r"can't do 'send a→b\[0\] to cpu:0'"),
        ([Operation("backward", "a", 0)], "can't do 'backward a"),
        ([Operation("free", "a", 0, "a→b")], "it does not hold it"),
        (
            [Operation("forward", "a", 0), Operation("free", "a", 0, "a→b"), Operation("forward", "b", 0)],
            "or has freed it",
        ),
        ([Operation("forward", "a", 0), Operation("backward_weight", "a", 0)], "the gradient of a→b"),
        ([Operation("forward", "z", 0)], "has no node 'z'. Its nodes are a, b"),
        ([Operation("free", "a", 0, "z")], "it does not hold it"),
    ],
)
def test_a_rank_that_uses_what_it_does_not_have_is_refused(own: list[Operation], message: str) -> None:
    with pytest.raises(InputError, match=message):
        peak_bytes(pair(tuple(own), ()), PAIR)


def test_a_node_backwards_before_it_is_forwards_is_refused() -> None:
    only = GraphSpec((NodeSpec("a", (0,)),))
    early = Operation("backward", "a", 0), Operation("forward", "a", 0)
    with pytest.raises(InputError, match=r"it has not computed forward a\[0\]"):
        peak_bytes(pair(early, ()), only)
    whole = Operation("forward", "a", 0), Operation("backward_weight", "a", 0)
    with pytest.raises(InputError, match=r"it has not computed backward_input a\[0\]"):
        peak_bytes(pair(whole, ()), only)


def test_a_schedule_that_would_hang_is_not_simulated() -> None:
    with pytest.raises(DeadlockError):
        simulate(pair((Operation("send", micro=0, edge="a→b", peer=1),), ()), PAIR)


def test_an_edge_that_the_graph_does_not_have_is_named() -> None:
    schedule = pair((), (Operation("receive", micro=0, edge="z", peer=0),))
    with pytest.raises(InputError, match="the edge 'z', which the graph does not have"):
        peak_bytes(schedule, PAIR)
