"""The queue's rules one by one, with numbers worked out by hand."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from modelfleet.errors import ClosedError, DeadlineError, FleetError, InputError, QueueFullError, RowsError
from modelfleet.replicas.queue import Queue
from modelfleet.replicas.requests import Request, RowBatch, RowSpan


def make(
    *replicas: str,
    batch_size: int = 8,
    max_queue: int | None = None,
    balance: Any = "least-busy",
    isolation: Any = "rows",
    batch_wait: float = 0.0,
) -> Queue:
    return Queue(
        replicas or ("r0",),
        batch_size=batch_size,
        max_queue=max_queue,
        balance=balance,
        isolation=isolation,
        batch_wait=batch_wait,
    )


def spans(batch: RowBatch | None) -> list[tuple[Any, int, int]]:
    assert batch is not None
    return [(piece.request.user, piece.start, piece.stop) for piece in batch.spans]


def took(queue: Queue, replica: str = "r0", most: int | None = None) -> RowBatch:
    batch = queue.take(replica, 0.0, most)
    assert batch is not None
    return batch


def answer(queue: Queue, batch: RowBatch, now: float = 0.0) -> list[Request]:
    return answers_all(queue, batch, [np.arange(piece.start, piece.stop) for piece in batch.spans], now)


def rows_of(batch: RowBatch) -> list[int]:
    return [row for piece in batch.spans for row in range(piece.start, piece.stop)]


def sort_out(
    queue: Queue, batch: RowBatch, poison: set[tuple[Request, int]], left: list[Any] | None = None
) -> Any:
    """Report a batch as a worker does that has found its poison rows; spans in `left` were not looked at."""
    positions = [(piece.request, row) for piece in batch.spans for row in range(piece.start, piece.stop)]
    untried = {place for start, stop in left or () for place in range(start, stop)}
    tried = [(place, *positions[place]) for place in range(batch.rows) if place not in untried]
    errors = {place: ValueError("poison") for place, *row in tried if tuple(row) in poison}
    good = [(RowSpan(request, row, row + 1), [row]) for place, request, row in tried if place not in errors]
    return queue.record(batch, good, errors, left or (), 0.0)


def answers_all(queue: Queue, batch: RowBatch, outputs: list[Any], now: float) -> list[Request]:
    """Report a batch of which every row was answered, with a tree of outputs for each span."""
    return queue.record(batch, list(zip(batch.spans, outputs, strict=True)), {}, (), now)


def drain(queue: Queue, report: Callable[[RowBatch], object], replica: str = "r0") -> int:
    """Take and report until nothing waits; how many batches it took."""
    batches = 0
    while (batch := queue.take(replica, 0.0)) is not None:
        report(batch)
        batches += 1
    return batches


def test_rows_are_taken_in_order_and_joined_in_order() -> None:
    queue = make(batch_size=4)
    request = queue.submit("ann", None, 10, now=1.0)
    batches = [took(queue), took(queue), took(queue)]
    assert [spans(batch) for batch in batches] == [[("ann", 0, 4)], [("ann", 4, 8)], [("ann", 8, 10)]]
    assert queue.take("r0", 0.0) is None
    assert [answer(queue, batches[n], 5.0 + n) for n in (2, 0)] == [[], []]
    assert answer(queue, batches[1], 9.0) == [request]
    assert request.status == "answered"
    assert request.joined().tolist() == list(range(10))
    assert request.last_answered == 9.0


def test_requests_of_one_user_are_served_in_their_order() -> None:
    queue = make(batch_size=5)
    first, second = (queue.submit("ann", None, 3, now=0.0) for _ in range(2))
    batch = took(queue)
    assert [(piece.request, piece.start, piece.stop) for piece in batch.spans] == [(first, 0, 3), (second, 0, 2)]
    assert answer(queue, batch) == [first]


def test_a_batch_is_filled_in_turns_and_the_ring_goes_on_where_it_stopped() -> None:
    queue = make(batch_size=8)
    for user in "abc":
        queue.submit(user, None, 100, now=0.0)
    # 8 // 3 = 2 rows each, a quarter of the batch, and the 2 that are left go to a. It's b's turn then.
    assert spans(took(queue)) == [("a", 0, 4), ("b", 0, 2), ("c", 0, 2)]
    assert spans(took(queue)) == [("b", 2, 6), ("c", 2, 4), ("a", 4, 6)]
    assert spans(took(queue)) == [("c", 4, 8), ("a", 6, 8), ("b", 6, 8)]


def test_of_many_users_with_many_rows_a_batch_has_four() -> None:
    queue = make(batch_size=32)
    for user in range(10):
        queue.submit(user, None, 20, now=0.0)
    assert spans(took(queue)) == [(0, 0, 8), (1, 0, 8), (2, 0, 8), (3, 0, 8)]
    assert spans(took(queue)) == [(4, 0, 8), (5, 0, 8), (6, 0, 8), (7, 0, 8)]
    assert spans(took(queue)) == [(8, 0, 8), (9, 0, 8), (0, 8, 16), (1, 8, 16)]


def test_several_batches_at_once_where_so_many_rows_wait() -> None:
    queue = Queue(["a", "b"], batch_size=8, max_queue=None, balance="least-busy", isolation="rows")
    queue.submit("a", None, 100, now=0.0)
    first = queue.take("a", 0.0, batches=4)
    assert first is not None
    assert first.rows == 8  # nothing is known of the replicas yet
    for replica in "ab":
        queue.record_speed(replica, 8, 1.0)
    rows = [batch.rows for batch in iter(lambda: queue.take("a", 0.0, batches=4), None)]
    # Of 92 rows half is this replica's, and it takes half of that; towards the end ever less.
    assert rows[:3] == [23, 17, 13]
    assert sum(rows) == 92
    assert max(rows) <= 32


def test_what_small_users_leave_is_dealt_out_again() -> None:
    queue = make(batch_size=9)
    queue.submit("a", None, 1, now=0.0)
    queue.submit("b", None, 100, now=0.0)
    queue.submit("c", None, 1, now=0.0)
    assert spans(took(queue)) == [("a", 0, 1), ("b", 0, 7), ("c", 0, 1)]


def test_with_more_users_than_room_each_gets_one_row() -> None:
    queue = make(batch_size=3)
    for user in range(5):
        queue.submit(user, None, 2, now=0.0)
    assert spans(took(queue)) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    assert spans(took(queue)) == [(3, 0, 1), (4, 0, 1), (0, 1, 2)]


def test_one_with_many_rows_does_not_starve_those_with_few() -> None:
    queue = make(batch_size=32)
    big = queue.submit("big", None, 100_000, now=0.0)
    small = [queue.submit(f"small{n}", None, 10, now=0.0) for n in range(9)]
    # 3 rows each in a round of ten users: their tenth row is in the fourth batch.
    for _ in range(4):
        answer(queue, took(queue))
    assert [request.status for request in small] == ["answered"] * 9
    assert big.next_row == 4 * 32 - 90
    assert queue.counts.waiting_rows == 100_000 - 38


@pytest.mark.parametrize("isolation", ["batch", "device"])
def test_isolated_users_share_no_batch(isolation: Any) -> None:
    queue = make(batch_size=4, isolation=isolation)
    queue.submit("a", None, 6, now=0.0)
    queue.submit("b", None, 1, now=0.0)
    queue.submit("b", None, 1, now=0.0)
    assert spans(took(queue)) == [("a", 0, 4)]
    assert spans(took(queue)) == [("b", 0, 1)]
    assert spans(took(queue)) == [("a", 4, 6)]
    assert spans(took(queue)) == [("b", 0, 1)]  # nor do requests of one user


@pytest.mark.parametrize("isolation", ["batch", "device"])
def test_a_request_that_must_not_be_cut_is_a_batch_whatever_happens(isolation: Any) -> None:
    queue = make("r0", "r1", batch_size=8, isolation=isolation)
    for name in ("r0", "r1"):  # each one's share of what waits would be 5 rows
        queue.record_speed(name, rows=10, seconds=1.0)
    request = queue.submit("a", None, 18, now=0.0)
    parts = [("a", 0, 8)], [("a", 8, 16)], [("a", 16, 18)]
    first = queue.take("r0", 0.0, max_rows=3, batches=4)
    assert spans(first) == parts[0]
    assert first is not None
    queue.put_back(first)
    first, second, third = (took(queue, most=1) for _ in range(3))
    assert (spans(first), spans(second), spans(third)) == parts
    for deaths in range(2):
        assert queue.record_death(second, f"death {deaths}") == []
        second = took(queue)
        assert spans(second) == parts[1]
    assert queue.record_death(second, "the third") == []
    assert answer(queue, first) == []
    assert queue.fail(third, ValueError("bad")) == [request]
    assert isinstance(request.error, RowsError)
    assert list(request.error.rows) == list(range(8, 18))
    assert "on rows 8 to 15 of user 'a', the last one because: the third" in str(request.error.rows[8])
    assert request.error.answers.tolist() == list(range(8))


@pytest.mark.parametrize("isolation", ["batch", "device"])
def test_a_user_on_whose_batch_a_replica_died_still_shares_none(isolation: Any) -> None:
    queue = make(batch_size=8, isolation=isolation)
    for _ in range(3):
        queue.submit("a", None, 2, now=0.0)
    queue.record_death(took(queue), "killed")
    assert [took(queue).rows for _ in range(3)] == [2, 2, 2]


def test_higher_priorities_come_first_and_users_of_one_take_turns() -> None:
    queue = make(batch_size=4)
    queue.submit("low", None, 9, now=0.0)
    queue.submit("a", None, 3, now=0.0, priority=1)
    queue.submit("b", None, 3, now=0.0, priority=1)
    queue.submit("top", None, 1, now=0.0, priority=7)
    queue.submit("low", None, 1, now=0.0, priority=-1)
    # The three places that "top" leaves go to a and b in turns.
    assert spans(took(queue)) == [("top", 0, 1), ("a", 0, 2), ("b", 0, 1)]
    assert spans(took(queue)) == [("b", 1, 3), ("a", 2, 3), ("low", 0, 1)]
    assert spans(took(queue)) == [("low", 1, 5)]
    assert spans(took(queue)) == [("low", 5, 9)]
    assert spans(took(queue)) == [("low", 0, 1)]


def test_rows_that_are_tried_again_do_not_wait_for_higher_priorities() -> None:
    queue = make(batch_size=2)
    queue.submit("low", None, 2, now=0.0, priority=-1)
    queue.record_death(took(queue), "killed")
    for _ in range(10):
        queue.submit("high", None, 2, now=0.0, priority=1)
    assert ("low", 0, 2) in spans(took(queue)) + spans(took(queue))


def test_a_batch_waits_until_it_is_full_or_its_oldest_row_has_waited() -> None:
    queue = make("r0", "r1", batch_size=4, batch_wait=5.0)
    queue.submit("a", None, 1, now=10.0)
    queue.submit("b", None, 2, now=12.0)
    assert queue.take("r0", 14.9) is None
    assert queue.due("r0") == 15.0
    assert spans(queue.take("r0", 15.0)) == [("a", 0, 1), ("b", 0, 2)]
    assert queue.due("r0") is None
    queue.submit("a", None, 9, now=20.0)
    assert [spans(queue.take(name, 20.0)) for name in ("r0", "r1")] == [[("a", 0, 4)], [("a", 4, 8)]]
    assert queue.take("r0", 20.0) is None
    small = queue.take("r0", 20.0, max_rows=1)  # as much as its memory is enough for
    assert spans(small) == [("a", 8, 9)]
    assert small is not None
    queue.put_back(small)
    assert spans(queue.take("r0", 20.0)) == [("a", 8, 9)]  # it has had its turn
    queue.submit("b", None, 1, now=30.0)
    assert queue.take("r0", 30.0) is None
    queue.stop_batch_wait()
    assert spans(queue.take("r0", 30.0)) == [("b", 0, 1)]


def test_a_batch_does_not_wait_for_rows_that_can_not_come() -> None:
    queue = make(batch_size=4, batch_wait=5.0, max_queue=2)
    queue.submit("a", None, 1, now=0.0)
    assert queue.take("r0", 0.0) is None
    queue.submit("b", None, 1, now=0.0)
    assert spans(queue.take("r0", 0.0)) == [("a", 0, 1), ("b", 0, 1)]  # the queue is full
    alone = make(batch_size=4, batch_wait=5.0, isolation="batch")
    alone.submit("a", None, 1, now=0.0)
    assert spans(alone.take("r0", 0.0)) == [("a", 0, 1)]


@pytest.mark.parametrize("options", [{"balance": "sticky"}, {"isolation": "device"}])
def test_users_without_requests_are_forgotten_beyond_those_seen_last(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelfleet.replicas.waiting_areas.MAX_IDLE_USERS", 100)
    queue = make("r0", "r1", **options)
    homes = queue._areas.homes
    assert homes is not None
    held = queue.submit("held", None, 1, now=0.0)
    assert took(queue, homes._by_user["held"]).spans[0].request is held  # and it runs
    for user in range(1000):
        request = queue.submit(user, None, 1, now=0.0)
        if user % 2:
            queue.cancel(request)
        else:
            assert answer(queue, took(queue, homes._by_user[user])) == [request]
    assert set(homes._by_user) == {"held", *range(900, 1000)}
    assert sum(map(len, homes._users.values())) == 101
    assert not homes._open_requests.keys() - {"held"}


def test_pinned_users_wait_for_their_device() -> None:
    queue = make("r0", "r1", isolation="device")
    for user in "abc":
        queue.submit(user, None, 1, now=0.0)
    assert spans(took(queue, "r1")) == [("b", 0, 1)]
    assert queue.take("r1", 0.0) is None
    queue.lose_replica("r0")
    assert queue.take("r0", 0.0) is None
    assert queue.take("r1", 0.0) is None
    queue.submit("d", None, 1, now=0.0)  # new ones go where something lives
    assert spans(took(queue, "r1")) == [("d", 0, 1)]
    queue.restore_replica("r0")
    batch = took(queue, "r0")
    assert spans(batch) == [("a", 0, 1)]
    queue.record_death(batch, "killed")
    assert queue.take("r1", 0.0) is None
    assert spans(took(queue, "r0")) == [("a", 0, 1)]


def test_sticky_users_stay_until_their_replica_is_lost() -> None:
    queue = make("r0", "r1", balance="sticky")
    for user in "abcd":
        queue.submit(user, None, 1, now=0.0)
    first = took(queue, "r0")
    assert spans(first) == [("a", 0, 1), ("c", 0, 1)]
    assert queue.take("r0", 0.0) is None
    queue.submit("a", None, 2, now=0.0)
    queue.record_death(first, "killed")
    queue.lose_replica("r0")
    assert spans(took(queue, "r1")) == [("a", 0, 1), ("c", 0, 1)]
    assert spans(took(queue, "r1")) == [("b", 0, 1), ("d", 0, 1), ("a", 0, 2)]
    queue.restore_replica("r0")
    queue.submit("a", None, 1, now=0.0)
    queue.submit("e", None, 1, now=0.0)
    assert spans(took(queue, "r0")) == [("e", 0, 1)]
    assert spans(took(queue, "r1")) == [("a", 0, 1)]


def test_sticky_users_move_to_the_first_replica_that_is_back() -> None:
    queue = make("r0", "r1", balance="sticky")
    queue.lose_replica("r0")
    queue.lose_replica("r1")
    queue.submit("a", None, 1, now=0.0)
    queue.restore_replica("r1")
    assert spans(took(queue, "r1")) == [("a", 0, 1)]


def test_a_deadline_fails_a_request_with_rows_in_flight_and_late_answers_are_ignored() -> None:
    queue = make(batch_size=4)
    late = queue.submit("ann", None, 10, now=1.0, deadline=3.5)
    queue.submit("bob", None, 5, now=1.0, deadline=9.0)
    fine = queue.submit("cyd", None, 1, now=1.0)
    done, running = took(queue), took(queue)
    assert spans(done) == [("ann", 0, 2), ("bob", 0, 1), ("cyd", 0, 1)]
    assert spans(running) == [("bob", 1, 3), ("ann", 2, 4)]
    answer(queue, done)
    assert queue.next_deadline() == 3.5
    assert queue.expire(3.4) == []
    assert queue.expire(3.5) == [late]
    assert queue.next_deadline() == 9.0
    assert late.status == "failed"
    assert isinstance(late.error, DeadlineError)
    assert isinstance(late.error, TimeoutError)
    assert "8 of 10 rows of user 'ann'" in str(late.error)
    assert "2.5 s after" in str(late.error)
    assert (queue.counts.failed, queue.counts.waiting_rows, queue.counts.running_rows) == (1, 2, 2)
    assert answer(queue, running) == []
    assert list(late.answers) == [(0, 2)]
    assert fine.status == "answered"


def test_answered_requests_with_far_deadlines_are_forgotten() -> None:
    queue = make()
    for _ in range(1000):
        queue.submit("ann", None, 1, now=0.0, deadline=1e9)
        answer(queue, took(queue))
    assert len(queue._deadlines._heap) < 100
    assert queue.next_deadline() is None


def test_cancelling_a_half_taken_request() -> None:
    queue = make(batch_size=4)
    request = queue.submit("ann", None, 10, now=0.0)
    other = queue.submit("ann", None, 1, now=0.0)
    batch = took(queue)
    assert (queue.counts.waiting, queue.counts.waiting_rows, queue.counts.running_rows) == (2, 7, 4)
    assert queue.cancel(request)
    assert not queue.cancel(request)
    assert (queue.counts.waiting, queue.counts.waiting_rows, queue.counts.running_rows) == (1, 1, 0)
    assert answer(queue, batch) == []
    assert request.answers == {}
    assert answer(queue, took(queue)) == [other]
    assert (queue.counts.submitted, queue.counts.answered, queue.counts.cancelled) == (2, 1, 1)
    assert queue.counts.open == 0


def test_cancelled_rows_leave_a_batch_that_is_tried_again() -> None:
    queue = make(batch_size=4)
    request = queue.submit("ann", None, 2, now=0.0)
    queue.submit("bob", None, 2, now=0.0)
    queue.record_death(took(queue), "killed")
    queue.cancel(request)
    again = took(queue)
    assert spans(again) == [("bob", 0, 2)]
    assert again.deaths == 1
    queue.record_death(again, "killed")
    queue.cancel(again.spans[0].request)
    assert queue.take("r0", 0.0) is None


def test_a_full_queue_refuses_with_a_wait() -> None:
    queue = make("r0", "r1", batch_size=4, max_queue=2)
    assert queue.seconds_until_room() == 0.0
    queue.submit("ann", None, 30, now=0.0)
    queue.submit("bob", None, 10, now=0.0)
    with pytest.raises(
        QueueFullError, match=r"user 'cyd'.*2 requests wait, and max_queue=2\. Submit it again"
    ) as error:
        queue.submit("cyd", None, 1, now=0.0)
    assert error.value.wait == 1.0  # nothing is known yet
    queue.record_speed("r0", rows=10, seconds=1.0)
    # 20 rows a request at 10 rows/s of r0, and the same of r1, which is unknown.
    assert queue.seconds_until_room() == pytest.approx(1.0)
    queue.record_speed("r1", rows=30, seconds=1.0)
    assert queue.seconds_until_room() == pytest.approx(0.5)
    queue.lose_replica("r1")
    assert queue.seconds_until_room() == pytest.approx(2.0)
    assert queue.submit("cyd", None, 0, now=0.0).status == "answered"  # takes no place
    assert queue.counts.submitted == 3
    while queue.counts.waiting == 2:
        took(queue)
    queue.submit("cyd", None, 1, now=0.0)


def test_a_request_without_rows_is_answered_at_once() -> None:
    queue = make()
    request = queue.submit("ann", None, 0, now=0.0, deadline=1.0)
    assert (request.status, request.joined()) == ("answered", None)
    assert (queue.counts.submitted, queue.counts.answered) == (1, 1)
    assert queue.next_deadline() is None
    assert queue.take("r0", 0.0) is None


def test_a_slow_replica_takes_its_share_of_what_waits() -> None:
    queue = make("fast", "slow", batch_size=32)
    queue.submit("ann", None, 100, now=0.0)
    queue.record_speed("fast", rows=50, seconds=1.0)
    assert took(queue, "slow").rows == 32  # not all rates are known
    queue.record_speed("slow", rows=10, seconds=1.0)
    assert took(queue, "slow").rows == 12  # 68 / 6, rounded up
    assert took(queue, "fast").rows == 32  # 56 · 5/6 = 47
    assert took(queue, "fast").rows == 20  # 24 · 5/6
    assert took(queue, "slow").rows == 4  # 4 / 6, but an eighth of a batch at least
    queue.submit("ann", None, 30, now=0.0)
    queue.lose_replica("fast")
    assert took(queue, "slow").rows == 30  # all is its own now


def test_equal_replicas_split_what_little_waits() -> None:
    queue = make("r0", "r1", "r2", batch_size=32)
    for name in ("r0", "r1", "r2"):
        queue.record_speed(name, rows=7, seconds=0.1)
    queue.submit("ann", None, 30, now=0.0)
    assert took(queue, "r0").rows == 10
    assert took(queue, "r1", most=5).rows == 5


def test_rates_follow_the_latest_batches() -> None:
    queue = make("r0", "r1", batch_size=100)
    queue.record_speed("r0", rows=1, seconds=100.0)  # it compiled
    queue.record_speed("r1", rows=10, seconds=1.0)
    for _ in range(20):
        queue.record_speed("r0", rows=10, seconds=1.0)
    queue.submit("ann", None, 100, now=0.0)
    assert took(queue, "r0").rows == 50


def test_the_wait_for_the_first_row_is_kept() -> None:
    queue = make(batch_size=2)
    request = queue.submit("ann", None, 3, now=1.0)
    first = queue.take("r0", 2.5)
    queue.take("r0", 4.0)
    assert first is not None
    queue.put_back(first)
    queue.take("r0", 5.0)
    assert (request.submitted, request.first_taken) == (1.0, 2.5)


def test_closing_fails_what_is_open_and_refuses_more() -> None:
    queue = make(batch_size=2)
    requests = [queue.submit(user, None, 2, now=0.0) for user in "abc"]
    answer(queue, took(queue))
    batch = took(queue)
    done = [request for request in requests if request.status == "answered"]
    error = ClosedError("the replicas were closed")
    ended = queue.close(error)
    assert ended == [request for request in requests if request not in done]
    assert all(request.error is error for request in ended)
    assert (queue.counts.open, queue.counts.waiting_rows, queue.counts.running_rows) == (0, 0, 0)
    assert answer(queue, batch) == []
    assert queue.take("r0", 0.0) is None
    with pytest.raises(ClosedError, match=r"user 'd'.*the replicas were closed"):
        queue.submit("d", None, 1, now=0.0)


@pytest.mark.parametrize("again", ["answered", "failed", "died", "returned"])
def test_a_batch_is_reported_once(again: str) -> None:
    queue = make()
    queue.submit("ann", None, 2, now=0.0)
    batch = took(queue)
    answer(queue, batch)
    reports: dict[str, Callable[[], object]] = {
        "answered": lambda: answer(queue, batch),
        "failed": lambda: queue.fail(batch, ValueError()),
        "died": lambda: queue.record_death(batch, "killed"),
        "returned": lambda: queue.put_back(batch),
    }
    with pytest.raises(AssertionError, match="not running"):
        reports[again]()


def test_trees_of_answers_are_joined_leaf_by_leaf() -> None:
    queue = make(batch_size=2)
    request = queue.submit("ann", None, 3, now=0.0)
    for rows in ([0, 1], [2]):
        tree = {
            "logits": np.array(rows)[:, None],
            "pair": [np.array(rows), None],
            "names": [f"n{r}" for r in rows],
        }
        answers_all(queue, took(queue), [tree], 0.0)
    joined = request.joined()
    assert joined["logits"].tolist() == [[0], [1], [2]]
    assert joined["pair"][0].tolist() == [0, 1, 2]
    assert joined["pair"][1] is None
    assert joined["names"] == ["n0", "n1", "n2"]


def test_answers_that_cannot_be_joined_are_the_users_own_trouble() -> None:
    queue = make(batch_size=2)
    request = queue.submit("ann", None, 5, now=0.0)
    answers_all(queue, took(queue), [np.zeros((2, 3))], 0.0)
    answers_all(queue, took(queue), [np.zeros((2, 4))], 0.0)
    assert queue.fail(took(queue), ValueError("bad")) == [request]
    assert isinstance(request.error, InputError)
    with pytest.raises(InputError, match=r"5 rows of user 'ann' came in 2 batches.*same shape per row"):
        request.joined()
    assert queue.counts.failed == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"max_queue": 0}, "max_queue=0"),
        ({"batch_wait": -1}, "batch_wait=-1"),
        ({"balance": "stick"}, "Did you mean 'sticky'"),
        ({"isolation": "row"}, "Did you mean 'rows'"),
    ],
)
def test_options_are_checked_early(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**options)


@pytest.mark.parametrize("names", [[], ["r0", "r0"]])
def test_replicas_have_names_of_their_own(names: list[str]) -> None:
    with pytest.raises(InputError, match="at least one name, and none twice"):
        Queue(names, batch_size=1, max_queue=None, balance="sticky", isolation="rows")


def test_bad_requests_leave_the_books_alone() -> None:
    queue = make(balance="sticky")
    with pytest.raises(InputError, match="named by a list"):
        queue.submit([], None, 1, now=0.0)  # pyrefly: ignore
    with pytest.raises(InputError, match="deadline of user 'ann' is nan"):
        queue.submit("ann", None, 1, now=0.0, deadline=float("nan"))
    with pytest.raises(InputError, match="priority='high' of user 'ann'"):
        queue.submit("ann", None, 1, now=0.0, priority="high")  # pyrefly: ignore
    assert queue.counts.submitted == 0


def test_errors_survive_pickling() -> None:
    full = pickle.loads(pickle.dumps(QueueFullError("full", 0.5)))
    assert (str(full), full.wait) == ("full", 0.5)
    rows = pickle.loads(pickle.dumps(RowsError("some", {1: ValueError("bad")}, [7], [0])))
    assert (str(rows), str(rows.rows[1]), rows.answers, rows.kept) == ("some", "bad", [7], (0,))


def test_filling_a_batch_does_not_look_at_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make(batch_size=32)
    turns = 0
    rings = queue._areas.of_replica("r0").rings
    turn = rings.take_turn

    def counted(*given: Any, **options: Any) -> int:
        nonlocal turns
        turns += 1
        return turn(*given, **options)

    monkeypatch.setattr(rings, "take_turn", counted)
    for user in range(10_000):
        queue.submit(user, None, 1_000_000, now=0.0)
    for user in range(10_000, 12_000):
        queue.cancel(queue.submit(user, None, 1, now=0.0))
    assert took(queue).rows == 32
    assert turns == 4


def test_every_row_is_tried_however_many_fail_first() -> None:
    queue = make(batch_size=8)
    wrong = queue.submit("wrong", None, 1000, now=0.0)
    fine = queue.submit("fine", None, 40, now=0.0)
    drain(queue, lambda batch: sort_out(queue, batch, {(wrong, row) for row in range(100)}))
    assert isinstance(wrong.error, RowsError)
    assert list(wrong.error.rows) == list(range(100))
    assert wrong.error.kept == tuple(range(100, 1000))
    assert len({id(error) for error in wrong.error.rows.values()}) == 1  # equal errors are one object
    assert fine.status == "answered"
    assert queue.counts.waiting_rows == queue.counts.running_rows == 0


def test_a_batch_may_be_parted_where_its_rows_can_not_be_one_array() -> None:
    queue = Queue(["a"], batch_size=8, max_queue=None, balance="least-busy", isolation="rows")
    requests = [queue.submit(user, None, 2, now=0.0) for user in "abc"]
    batch = queue.take("a", 0.0)
    assert batch is not None
    first, second = queue.split(batch, [batch.spans[:1], batch.spans[1:]])
    assert (first.rows, second.rows) == (2, 4)
    assert answers_all(queue, first, [[0, 1]], 0.0) == requests[:1]
    queue.put_back(second)
    again = queue.take("a", 0.0)
    assert again is not None
    assert answers_all(queue, again, [[0, 1], [0, 1]], 0.0) == requests[1:]


def test_users_pinned_to_a_replica_that_is_given_up_fail_and_the_others_do_not() -> None:
    queue = Queue(["a", "b"], batch_size=4, max_queue=None, balance="least-busy", isolation="device")
    on_a, on_b = queue.submit("ada", None, 6, now=0.0), queue.submit("bob", None, 6, now=0.0)
    under_way = queue.take("a", 0.0)
    assert under_way is not None
    error = FleetError("no driver")
    assert queue.give_up_replica("a", error) == [on_a]
    assert (on_a.status, on_a.error, on_b.status) == ("failed", error, "open")
    queue.record_death(under_way, "it is gone")
    with pytest.raises(ClosedError, match="user 'ada' is pinned to a replica that is gone: no driver"):
        queue.submit("ada", None, 1, now=0.0)
    eve = queue.submit("eve", None, 1, now=0.0)  # a new user has a replica that is there
    batches = [queue.take("b", 0.0) for _ in range(3)]
    assert {piece.request for batch in batches if batch for piece in batch.spans} == {on_b, eve}


def test_a_new_user_is_never_pinned_to_a_replica_that_is_given_up() -> None:
    queue = Queue(["a", "b"], batch_size=4, max_queue=None, balance="least-busy", isolation="device")
    queue.give_up_replica("a", FleetError("no driver"))
    queue.lose_replica("b")
    eve = queue.submit("eve", None, 1, now=0.0)
    queue.restore_replica("b")
    batch = queue.take("b", 0.0)
    assert batch is not None
    assert batch.spans[0].request is eve
