"""What `build` makes ends, and computes what the undivided graph computes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from tests.schedules.graphs import NamedGraph, backward_value, forward_value
from tests.schedules.specs import ANY_GRAPH, Case, cases, chain, devices
from tests.schedules.threads import run

from modelfleet.errors import InputError
from modelfleet.schedules import EdgeSpec, GraphSpec, NodeSpec, Operation, Schedule, ScheduleName, build, check


def fan(**of_b: bool) -> GraphSpec:
    """a feeds b and c, which feed d; b has two replicas."""
    return GraphSpec(
        (NodeSpec("a", (0,)), NodeSpec("b", (1, 2), **of_b), NodeSpec("c", (3,)), NodeSpec("d", (0,))),
        tuple(EdgeSpec(f"{s}→{t}", s, t) for s, t in ("ab", "ac", "bd", "cd")),
    )


def computations(schedule: Schedule) -> Counter[tuple[str, str]]:
    return Counter(
        (operation.kind, operation.node)
        for own in schedule.operations
        for operation in own
        if operation.kind.startswith(("forward", "backward"))
    )


@settings(max_examples=700, deadline=None, derandomize=True)
@given(cases())
def test_a_built_schedule_computes_on_threads_what_the_undivided_graph_computes(case: Case) -> None:
    schedule = case.build()
    spec = case.spec if case.train else case.spec.untrained()
    graph = NamedGraph(spec, case.micro_batches)
    assert run(schedule, graph)
    every = [(node.name, micro) for node in spec.nodes for micro in range(case.micro_batches)]
    assert graph.kept == {key: forward_value(spec, *key) for key in every}
    assert not any(graph.tensors.values()), "all tensors are freed"
    learnt = {(node, pair) for (_, node), pairs in graph.gradients.items() for pair in pairs}
    assert learnt == {(n, (m, backward_value(spec, n, m))) for n, m in every if n in spec.with_backward}
    assert graph.applied == {(rank, node.name) for node in spec.nodes if node.trained for rank in node.ranks}
    assert graph.steps == (set(range(case.ranks)) if case.train else set())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_steps_one_after_the_other_end(case: Case) -> None:
    schedule = case.build()
    check(schedule.then(schedule))
    exchange = Schedule(
        "exchange",
        schedule.devices,
        case.micro_batches,
        tuple((Operation("sum", "average", ranks=tuple(range(case.ranks))),) for _ in range(case.ranks)),
    )
    check(schedule.then(exchange).then(schedule))


def test_gpipe_does_all_forwards_and_then_the_last_micro_batch_first() -> None:
    text = str(build(chain(2), devices(2), micro_batches=3, schedule="gpipe"))
    assert text.splitlines() == [
        "gpipe: 3 micro-batches on 2 devices",
        "cpu:0  s0: F0 F1 F2 B2 B1 B0 sum(step) apply(s0)",
        "cpu:1  s1: F0 F1 F2 B2 B1 B0 sum(step) apply(s1)",
    ]


def test_1f1b_does_a_backward_as_soon_as_it_can() -> None:
    text = str(build(chain(3), devices(3), micro_batches=4))
    assert text.splitlines()[1:] == [
        "cpu:0  s0: F0 F1 F2 B0 F3 B1 B2 B3 sum(step) apply(s0)",
        "cpu:1  s1: F0 F1 B0 F2 B1 F3 B2 B3 sum(step) apply(s1)",
        "cpu:2  s2: F0 B0 F1 B1 F2 B2 F3 B3 sum(step) apply(s2)",
    ]


def test_interleaved_has_the_order_of_megatron() -> None:
    text = str(build(chain(4, 2), devices(2), micro_batches=4, schedule="interleaved"))
    assert text.splitlines()[1:] == [
        "cpu:0  s0: F0 F1 s2: F0 F1 s0: F2 s2: B0 s0: F3 s2: B1 F2 s0: B0 s2: F3 s0: B1 s2: B2 B3 s0: B2 B3 "
        "sum(step) apply(s0) apply(s2)",
        "cpu:1  s1: F0 F1 s3: F0 B0 F1 B1 s1: F2 B0 F3 B1 s3: F2 B2 F3 B3 s1: B2 B3 sum(step) apply(s1) apply(s3)",
    ]


def test_zero_bubble_fills_idle_time_with_the_halves_for_the_weights() -> None:
    schedule = build(chain(3), devices(3), micro_batches=4, schedule="zero-bubble")
    counts = computations(schedule)
    assert counts["backward_input", "s1"] == counts["backward_weight", "s1"] == 4
    assert counts["backward", "s0"] == 4, "the first stage has no inputs that need gradients: there are no halves"
    assert str(schedule).splitlines()[-1].startswith("cpu:2  s2: F0 I0 F1 I1")


@pytest.mark.parametrize("schedule", ANY_GRAPH)
def test_frozen_nodes_have_a_backward_only_if_gradients_must_pass(schedule: ScheduleName) -> None:
    spec = GraphSpec(
        (NodeSpec("a", (0,), trained=False), NodeSpec("b", (1,)), NodeSpec("c", (2,), trained=False)),
        (EdgeSpec("a→b", "a", "b"), EdgeSpec("b→c", "b", "c")),
    )
    built = build(spec, devices(3), micro_batches=3, schedule=schedule)
    counts = computations(built)
    assert not any(node == "a" for kind, node in counts if kind != "forward")
    assert not counts["backward_weight", "c"]
    assert counts["backward_input" if schedule == "zero-bubble" else "backward", "c"] == 3
    back = {operation.edge for own in built.operations for operation in own if operation.gradient}
    assert back == {"b→c"}
    assert [o.node for own in built.operations for o in own if o.kind == "apply"] == ["b"]


def test_a_detached_edge_brings_no_gradient_back() -> None:
    spec = GraphSpec(
        (NodeSpec("a", (0,)), NodeSpec("b", (1,))), (EdgeSpec("a→b", "a", "b", differentiable=False),)
    )
    schedule = build(spec, devices(2), micro_batches=2)
    assert not any(operation.gradient for own in schedule.operations for operation in own)
    assert computations(schedule)["backward", "a"] == 2


def test_gradients_of_replicas_are_summed_before_the_numbers_of_the_step() -> None:
    schedule = build(fan(), devices(4), micro_batches=4)
    sums = [[o.describe(schedule.devices) for o in own if o.kind == "sum"] for own in schedule.operations]
    step = "sum step over cpu:0, cpu:1, cpu:2, cpu:3"
    replicas = "sum b over cpu:1, cpu:2"
    assert sums == [[step], [replicas, step], [replicas, step], [step]]


def test_a_frozen_replica_has_nothing_to_sum() -> None:
    schedule = build(fan(trained=False), devices(4), micro_batches=4)
    assert {o.node for own in schedule.operations for o in own if o.kind == "sum"} == {"step"}


def test_replicas_take_turns_and_are_kept_busy() -> None:
    spec = GraphSpec(
        (NodeSpec("a", (0,), backward=1.0), NodeSpec("b", (1, 2, 3), forward=3.0, backward=3.0)),
        (EdgeSpec("a→b", "a", "b"),),
    )
    rows = str(build(spec, devices(4), micro_batches=6)).splitlines()
    assert rows[2:] == [
        "cpu:1  b: F0 B0 F3 B3 sum(b) sum(step) apply(b)",
        "cpu:2  b: F1 B1 F4 B4 sum(b) sum(step) apply(b)",
        "cpu:3  b: F2 B2 F5 B5 sum(b) sum(step) apply(b)",
    ]


def test_the_played_step_knows_that_transfers_between_two_ranks_take_turns() -> None:
    """Over one link c's input arrives at 6, and d's at 11: in between e has its turn, whose input arrives at 8."""
    spec = GraphSpec(
        (
            NodeSpec("a", (0,)),
            NodeSpec("b", (2,), forward=3.0),
            *(NodeSpec(name, (1,)) for name in "cde"),
        ),
        tuple(EdgeSpec(f"{s}→{t}", s, t, seconds=5.0) for s, t in ("ac", "ad", "be")),
    )
    schedule = build(spec, devices(3), micro_batches=1, train=False)
    assert [operation.node for operation in schedule.operations[1] if operation.kind == "forward"] == [
        "c",
        "e",
        "d",
    ]


def test_without_training_there_are_forwards_and_transfers_only() -> None:
    schedule = build(fan(), devices(4), micro_batches=2, train=False)
    kinds = {operation.kind for own in schedule.operations for operation in own}
    assert kinds == {"forward", "send", "receive", "free"}


def test_a_frozen_node_does_not_run_far_ahead_of_those_that_read_it() -> None:
    spec = GraphSpec(
        (NodeSpec("a", (0,), trained=False, forward=0.1), NodeSpec("b", (1,))), (EdgeSpec("a→b", "a", "b"),)
    )
    ahead = most = 0
    for operation in build(spec, devices(2), micro_batches=9).operations[1]:
        ahead += (operation.kind == "receive") - (operation.kind == "forward")
        most = max(most, ahead)
    assert most <= 2


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (chain(2), {"schedule": "2f2b"}, "schedule='2f2b' is unknown. Choose one of gpipe, 1f1b"),
        (chain(2), {"micro_batches": 0}, "micro_batches=0 was given"),
        (chain(2), {"micro_batches": 2.0}, "micro_batches=2.0 was given"),
        (chain(3), {}, "Node 's2' is on rank 2, but the ranks are 0 to 1"),
        (GraphSpec(()), {}, "no nodes"),
        (
            GraphSpec((NodeSpec("a", (0, 1)),)),
            {"micro_batches": 1},
            "Use at least 2 micro-batches, or fewer replicas",
        ),
        (chain(4, 1), {"schedule": "interleaved"}, r"stage 's1' is on ranks \(0,\), where \(1,\) was expected"),
        (
            GraphSpec((NodeSpec("a", (0,)), NodeSpec("b", (1,)))),
            {"schedule": "interleaved"},
            "do not stand in a row",
        ),
    ],
)
def test_what_can_not_be_built_is_refused(spec: GraphSpec, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(spec, devices(2), **{"micro_batches": 4, **options})  # pyrefly: ignore


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ("aa", "", "Two nodes are named 'a'"),
        ("ab", "ab ab", "Two edges are named 'ab'"),
        ("ab", "ba", "leads from 'b' to 'a', which is not after it"),
        ("ab", "aa", "leads from 'a' to 'a'"),
        ("ab", "ac", "names the node 'c', which the graph does not have"),
    ],
)
def test_a_graph_that_is_none_is_refused(nodes: str, edges: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GraphSpec(tuple(NodeSpec(n, (0,)) for n in nodes), tuple(EdgeSpec(e, e[0], e[1]) for e in edges.split()))


@pytest.mark.parametrize("ranks", [(), (1, 1)])
def test_a_node_without_ranks_or_twice_on_one_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="Node 'a' has replicas on ranks"):
        NodeSpec("a", ranks)
