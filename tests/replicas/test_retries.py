"""What is tried again: what a search for bad rows has left, what a replica died on, what came back."""

from typing import Any

import pytest
from tests.replicas.test_queue import answer, drain, make, rows_of, sort_out, spans, took

from modelfleet.errors import FleetError, RowsError
from modelfleet.replicas.requests import RowBatch


def test_exactly_the_poison_rows_fail() -> None:
    queue = make(batch_size=64)
    request = queue.submit("ann", None, 60, now=0.0)
    other = queue.submit("bob", None, 4, now=0.0)
    poison = {(request, row) for row in (3, 17, 18)} | {(other, 3)}
    drain(queue, lambda batch: sort_out(queue, batch, poison))
    assert isinstance(request.error, RowsError)
    assert isinstance(other.error, RowsError)
    assert set(request.error.rows) == {3, 17, 18}
    assert request.error.kept == tuple(row for row in range(60) if row not in (3, 17, 18))
    assert request.error.answers == list(request.error.kept)
    assert set(other.error.rows) == {3}
    assert other.error.answers == [0, 1, 2]
    message = str(request.error)
    assert "3 of 60 rows of user 'ann' failed: row 3 (ValueError: poison), row 17" in message
    assert request.error.__cause__ is request.errors[3]


def test_what_is_left_takes_turns_with_new_rows_and_is_not_mixed_with_them() -> None:
    queue = make(batch_size=4)
    queue.submit("a", None, 6, now=0.0)
    sort_out(queue, took(queue), set(), [(0, 2), (2, 4)])
    queue.submit("b", None, 9, now=0.0)
    first, *rest = (took(queue) for _ in range(6))
    assert [spans(batch) for batch in (first, *rest)] == [
        [("a", 0, 2)],
        [("b", 0, 4)],  # and not the last rows of a, who is suspected
        [("a", 2, 4)],
        [("b", 4, 8)],
        [("a", 4, 6)],
        [("b", 8, 9)],
    ]


def test_a_user_with_bad_rows_is_kept_apart_until_a_batch_is_in_order() -> None:
    queue = make(batch_size=4)
    bad = queue.submit("bad", None, 14, now=0.0)
    queue.submit("fine", None, 13, now=0.0)
    poison = {(bad, row) for row in range(4)}
    seen: list[Any] = []
    drain(queue, lambda batch: (seen.append(spans(batch)), sort_out(queue, batch, poison)))
    assert seen == [
        [("bad", 0, 2), ("fine", 0, 2)],
        [("bad", 2, 6)],  # apart, and bad again
        [("fine", 2, 6)],
        [("bad", 6, 10)],  # in order
        [("fine", 6, 8), ("bad", 10, 12)],
        [("fine", 8, 10), ("bad", 12, 14)],
        [("fine", 10, 13)],
    ]


def test_what_is_left_of_a_batch_of_several_users_comes_first() -> None:
    queue = make(batch_size=4)
    for user in "abcd":
        queue.submit(user, None, 1, now=0.0)
    sort_out(queue, took(queue), set(), [(0, 2), (2, 4)])
    queue.submit("e", None, 1, now=0.0)
    assert [spans(took(queue)) for _ in range(3)] == [
        [("a", 0, 1), ("b", 0, 1)],
        [("c", 0, 1), ("d", 0, 1)],
        [("e", 0, 1)],
    ]


def test_what_there_was_no_memory_for_is_next_in_its_order() -> None:
    queue = make(batch_size=8)
    queue.submit("a", None, 8, now=0.0)
    queue.submit("b", None, 8, now=0.0)
    batch = took(queue)
    queue.record(batch, [], {}, [(0, 4), (4, 8)], 0.0, first=True)
    assert [spans(took(queue, most=3)) for _ in range(3)] == [[("a", 0, 3)], [("a", 3, 4)], [("b", 0, 3)]]


@pytest.mark.parametrize("searched", [True, False])  # in the worker at once; or its half, and the rest is left
def test_a_user_whose_every_row_is_poison_costs_another_few_batches(searched: bool) -> None:
    queue = make(batch_size=32)
    poison = set()
    for _ in range(20):
        request = queue.submit("poison", None, 1000, now=0.0)
        poison |= {(request, row) for row in range(1000)}

    def step() -> None:
        batch = took(queue)
        whole = searched or batch.rows == 1 or all(piece.request.user == "fine" for piece in batch.spans)
        half = (batch.rows + 1) // 2
        sort_out(queue, batch, poison, None if whole else [(0, half), (half, batch.rows)])

    delays = []
    for wait in range(200):  # whenever it comes: in the middle of a search, or just before one begins
        fine = queue.submit("fine", None, 4, now=0.0)
        batches = 0
        while fine.status == "open":
            step()
            batches += 1
        delays.append(batches)
        for _ in range(wait % 7):
            step()
    assert queue.counts.open  # there was poison all the time
    # At most once in a search, the rows share a batch with poison, and are found among them by halves.
    assert max(delays) <= 6
    assert sum(delays) <= 1.6 * len(delays)


def test_a_row_left_by_a_cancelled_neighbour_is_tried_alone_before_it_is_blamed() -> None:
    queue = make(batch_size=2)
    innocent = queue.submit("a", None, 1, now=0.0)
    guilty = queue.submit("b", None, 1, now=0.0)
    queue.record_death(took(queue), "killed")
    batch = took(queue)
    queue.cancel(guilty)
    assert queue.record_death(batch, "b's fault") == []
    assert answer(queue, took(queue)) == [innocent]
    assert innocent.status == "answered"


def test_a_row_on_which_replicas_die_three_times_fails_by_name() -> None:
    queue = make()
    request = queue.submit("ann", None, 1, now=0.0)
    assert queue.record_death(took(queue), "killed") == []
    assert queue.record_death(took(queue), "killed") == []
    assert queue.record_death(took(queue), "signal 9") == [request]
    assert isinstance(request.error, RowsError)
    row_error = request.error.rows[0]
    assert isinstance(row_error, FleetError)
    assert "row 0 of user 'ann'" in str(row_error)
    assert "signal 9" in str(row_error)
    assert request.error.answers is None
    assert request.error.kept == ()


def test_the_first_death_retries_and_the_next_ones_bisect() -> None:
    queue = make(batch_size=8)
    request = queue.submit("ann", None, 8, now=0.0)
    tried: list[int] = []

    def report(batch: RowBatch) -> None:
        if 5 in rows_of(batch):
            tried.append(batch.rows)
            queue.record_death(batch, "killed")
        else:
            answer(queue, batch)

    drain(queue, report)
    assert tried == [8, 8, 4, 2, 1, 1]
    assert isinstance(request.error, RowsError)
    assert list(request.error.rows) == [5]
    assert request.error.answers.tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_a_returned_batch_is_next_and_can_be_cut_smaller() -> None:
    queue = make(batch_size=8)
    request = queue.submit("ann", None, 10, now=0.0)
    queue.put_back(took(queue))
    assert (queue.counts.waiting_rows, queue.counts.running_rows) == (10, 0)
    small = took(queue, most=3)
    assert spans(small) == [("ann", 0, 3)]
    assert small.deaths == 0
    rest = [took(queue), took(queue)]
    assert [spans(batch) for batch in rest] == [[("ann", 3, 8)], [("ann", 8, 10)]]
    for batch in (small, *rest):
        answer(queue, batch)
    assert request.joined().tolist() == list(range(10))
