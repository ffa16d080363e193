"""`check` accepts what ends on threads with blocking sends, and nothing else."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.specs import cases, chain, crossings, devices, perturbed
from tests.schedules.threads import MicroBatches, run

from modelfleet.errors import DeadlockError, InputError
from modelfleet.schedules import Operation, Schedule, build, check


def schedule_of(*lists: Sequence[Operation]) -> Schedule:
    return Schedule("by hand", devices(len(lists)), 4, tuple(map(tuple, lists)))


def send(edge: str, peer: int, micro: int = 0, *, gradient: bool = False, at_once: bool = False) -> Operation:
    return Operation("send", micro=micro, edge=edge, gradient=gradient, peer=peer, with_previous=at_once)


def receive(edge: str, peer: int, micro: int = 0, *, gradient: bool = False, at_once: bool = False) -> Operation:
    return Operation("receive", micro=micro, edge=edge, gradient=gradient, peer=peer, with_previous=at_once)


def judge(schedule: Schedule) -> str:
    """What `check` says, after it has been compared with a run on threads."""
    program = MicroBatches()
    ended = run(schedule, program)
    try:
        check(schedule)
    except DeadlockError as error:
        assert not ended
        check_circle(schedule, error.circle)
        return "deadlock"
    except InputError:
        assert ended
        assert program.wrong
        return "wrong"
    assert ended
    assert not program.wrong
    return "ends"


Label = tuple[object, ...]


def order(schedule: Schedule) -> dict[int, list[tuple[int, Label]]]:
    """The transfers and sums of each rank by index: the group, and a label that is the same on all ranks."""
    found: dict[int, list[tuple[int, Label]]] = {}
    for rank, own in enumerate(schedule.operations):
        times: Counter[Label] = Counter()
        group = 0
        found[rank] = []
        for operation in own:
            group += not operation.with_previous
            if operation.kind == "sum":
                side = label = ("sum", operation.node, *sorted(operation.ranks))
            else:
                way = (rank, operation.peer) if operation.kind == "send" else (operation.peer, rank)
                label = (operation.edge, operation.gradient, *way)
                side = (operation.kind, *label)
            if operation.kind not in ("send", "receive", "sum"):
                label = side = (operation.kind, rank, len(found[rank]))
            found[rank].append((group, (*label, times[side])))
            times[side] += 1
    return found


def check_circle(schedule: Schedule, circle: Sequence[tuple[int, int, int]]) -> None:
    """Assert that a circle is one: each entry goes on where the one before has ended."""
    labels = order(schedule)
    for (rank, first, then), (next_rank, next_first, _) in zip(circle, [*circle[1:], *circle[:1]], strict=True):
        assert labels[rank][first][0] < labels[rank][then][0]
        assert labels[rank][then][1] == labels[next_rank][next_first][1]


def shortest_by_powers(schedule: Schedule) -> int:
    """The length of the shortest circle: the first power of the matrix of who waits for whom with a diagonal."""
    pairs: set[tuple[Label, Label]] = set()
    for own in order(schedule).values():
        pairs |= {(a, b) for group, a in own for later, b in own if group < later}
    numbers: dict[Label, int] = defaultdict(lambda: len(numbers))
    edges = [(numbers[a], numbers[b]) for a, b in pairs]
    waits = np.zeros((len(numbers), len(numbers)), dtype=bool)
    for a, b in edges:
        waits[a, b] = True
    power = waits
    for length in range(1, len(numbers) + 1):
        if power.diagonal().any():
            return length
        power = power @ waits
    raise AssertionError("there is no circle")


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_perturbed_schedules_are_judged_as_threads_judge_them(data: st.DataObject) -> None:
    judge(data.draw(perturbed(data.draw(cases()).build())))


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(crossings())
def test_crossings_are_judged_as_threads_judge_them_and_the_shortest_circle_is_named(schedule: Schedule) -> None:
    if judge(schedule) == "deadlock":
        with pytest.raises(DeadlockError) as caught:
            check(schedule)
        assert len(caught.value.circle) == shortest_by_powers(schedule)


def test_what_is_drawn_has_all_three_outcomes() -> None:
    found: Counter[str] = Counter()

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(crossings(), st.data())
    def draw(schedule: Schedule, data: st.DataObject) -> None:
        found[judge(schedule)] += 1
        found[judge(data.draw(perturbed(build(chain(3), devices(3), micro_batches=3))))] += 1

    draw()
    assert min(found["ends"], found["deadlock"]) > 20
    assert found["wrong"]


def test_the_message_names_the_shortest_circle() -> None:
    schedule = schedule_of(
        [receive("head", 1, 2, gradient=True), send("encoder", 1, 3)],
        [receive("encoder", 0, 3), Operation("forward", "head", 3), send("head", 0, 2, gradient=True)],
    )
    with pytest.raises(DeadlockError) as caught:
        check(schedule)
    assert str(caught.value).splitlines() == [
        "The schedule 'by hand' can't end, because these operations wait for each other:",
        "  cpu:0 sends micro-batch 3 of `encoder` to cpu:1 only after it has received the gradient of "
        "micro-batch 2 of `head` from cpu:1.",
        "  cpu:1 sends the gradient of micro-batch 2 of `head` to cpu:0 only after it has received "
        "micro-batch 3 of `encoder` from cpu:0.",
        "Swap the two operations on one of these devices, or let them run at once (with_previous=True).",
    ]
    assert sorted(caught.value.circle) == [(0, 0, 1), (1, 0, 2)]


def test_two_ranks_that_send_first_hang_unless_both_transfers_run_at_once() -> None:
    hang = schedule_of([send("a", 1), receive("b", 1)], [send("b", 0), receive("a", 0)])
    with pytest.raises(DeadlockError, match="`a`"):
        check(hang)
    check(schedule_of([send("a", 1), receive("b", 1, at_once=True)], [send("b", 0), receive("a", 0)]))


def test_a_circle_of_all_ranks_is_found_if_there_is_no_shorter_one() -> None:
    ranks = 5
    ring = schedule_of(*([send("a", (r + 1) % ranks), receive("a", (r - 1) % ranks)] for r in range(ranks)))
    with pytest.raises(DeadlockError) as caught:
        check(ring)
    assert len(caught.value.circle) == ranks


def test_sums_in_another_order_hang() -> None:
    x, y = Operation("sum", "x", ranks=(0, 1)), Operation("sum", "y", ranks=(0, 1))
    check(schedule_of([x, y], [x, y]))
    with pytest.raises(DeadlockError, match="enters the sum of `x` over cpu:0, cpu:1 only after it has entered"):
        check(schedule_of([x, y], [y, x]))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (([send("a", 1)], []), "cpu:0 sends micro-batch 0 of `a` to cpu:1, but cpu:1 never receives it"),
        (([], [receive("a", 0)]), "cpu:1 receives micro-batch 0 of `a` from cpu:0, but cpu:0 never sends it"),
        (
            ([send("a", 1)], [receive("a", 0, gradient=True)]),
            "cpu:0 sends micro-batch 0 of `a` to cpu:1, but cpu:1 never receives it",
        ),
        (
            ([Operation("sum", "x", ranks=(0, 1))], []),
            "cpu:0 enters the sum of `x` over cpu:0, cpu:1, which cpu:1 never enters as often",
        ),
    ],
)
def test_what_nobody_else_does_is_named(lists: tuple[list[Operation], ...], message: str) -> None:
    schedule = schedule_of(*lists)
    with pytest.raises(DeadlockError, match=message):
        check(schedule)
    assert judge(schedule) == "deadlock"


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            ([send("a", 1, 0), send("a", 1, 1)], [receive("a", 0, 1), receive("a", 0, 0)]),
            "cpu:0 sends micro-batch 0 of `a` to cpu:1, but cpu:1 expects micro-batch 1 at that time",
        ),
        (([send("a", 7)], []), "names a rank that there is not. The ranks are 0 to 1"),
        (([Operation("sum", "x", ranks=(1,))], []), "Name every rank that takes part once, and cpu:0 among them"),
        (
            ([Operation("forward", "a", 0), send("a", 1, at_once=True)], []),
            "only a send or a receive right after another one can",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(lists: tuple[list[Operation], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(schedule_of(*lists))


def test_a_long_schedule_that_hangs_is_explained() -> None:
    schedule = build(chain(8), devices(8), micro_batches=64)
    first, *rest = schedule.operations
    swapped = list(first)
    own = [index for index, operation in enumerate(first) if operation.kind in ("send", "receive")]
    swapped[own[-1]], swapped[own[0]] = swapped[own[0]], swapped[own[-1]]
    with pytest.raises((DeadlockError, InputError)) as caught:
        check(Schedule("swapped", schedule.devices, 64, (tuple(swapped), *rest)))
    assert isinstance(caught.value, DeadlockError)
    assert len(caught.value.circle) == 2
