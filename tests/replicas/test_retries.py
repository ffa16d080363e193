"""What is tried again: halves of what failed, what a replica died on, what came back."""

import pytest
from tests.replicas.test_queue import answer, drain, make, rows_of, spans, took

from modelfleet.errors import FleetError, RowsError
from modelfleet.replicas.requests import Batch


def test_bisecting_finds_exactly_the_poison_rows() -> None:
    queue = make(batch_size=64)
    poison = {3, 17, 18, 63}
    request = queue.submit("ann", None, 60, now=0.0)
    other = queue.submit("bob", None, 4, now=0.0)

    def report(batch: Batch) -> None:
        marks = [row if piece.request is request else 60 + row for piece in batch.slices
                 for row in range(piece.start, piece.stop)]  # fmt: skip
        if poison & set(marks):
            queue.failed(batch, ValueError(f"bad among {len(marks)}"))
        else:
            answer(queue, batch)

    drain(queue, report)
    assert isinstance(request.error, RowsError)
    assert isinstance(other.error, RowsError)
    bob_poison, ann_poison = {3}, {3, 17, 18}
    assert set(request.error.rows) == ann_poison
    assert {str(error) for error in request.error.rows.values()} == {"bad among 1"}
    assert request.error.kept == tuple(row for row in range(60) if row not in ann_poison)
    assert request.error.answers.tolist() == list(request.error.kept)
    assert set(other.error.rows) == bob_poison
    assert other.error.answers.tolist() == [0, 1, 2]
    message = str(request.error)
    assert "3 of 60 rows of user 'ann' failed: row 3 (ValueError: bad among 1), row 17" in message
    assert request.error.__cause__ is request.errors[3]


def test_halves_take_turns_with_new_rows_and_are_not_mixed_with_them() -> None:
    queue = make(batch_size=4)
    queue.submit("a", None, 5, now=0.0)
    queue.failed(took(queue), ValueError("bad"))
    queue.submit("b", None, 5, now=0.0)
    assert [spans(took(queue)) for _ in range(4)] == [
        [("a", 0, 2)],
        [("b", 0, 4)],  # and not the last row of a, who is suspected
        [("a", 2, 4)],
        [("b", 4, 5), ("a", 4, 5)],
    ]


def test_halves_of_a_batch_of_several_users_come_first() -> None:
    queue = make(batch_size=4)
    for user in "abcd":
        queue.submit(user, None, 1, now=0.0)
    queue.failed(took(queue), ValueError("bad"))
    queue.submit("e", None, 1, now=0.0)
    assert [spans(took(queue)) for _ in range(3)] == [
        [("a", 0, 1), ("b", 0, 1)],
        [("c", 0, 1), ("d", 0, 1)],
        [("e", 0, 1)],
    ]


@pytest.mark.parametrize("isolation", ["rows", "batch", "device"])
def test_a_user_whose_every_row_is_poison_costs_another_few_batches(isolation: str) -> None:
    queue = make(batch_size=32, isolation=isolation)
    for _ in range(20):
        queue.submit("poison", None, 1000, now=0.0)

    def step() -> None:
        batch = took(queue)
        if any(piece.request.user == "poison" for piece in batch.slices):
            queue.failed(batch, ValueError("poison"))
        else:
            answer(queue, batch)

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
    assert sum(delays) <= 1.5 * len(delays)


def test_a_row_left_by_a_cancelled_neighbour_is_tried_alone_before_it_is_blamed() -> None:
    queue = make(batch_size=2)
    innocent = queue.submit("a", None, 1, now=0.0)
    guilty = queue.submit("b", None, 1, now=0.0)
    batch = took(queue)
    queue.cancel(guilty)
    assert queue.failed(batch, ValueError("b's fault")) == []
    assert answer(queue, took(queue)) == [innocent]
    assert innocent.status == "answered"


def test_a_row_on_which_replicas_die_three_times_fails_by_name() -> None:
    queue = make()
    request = queue.submit("ann", None, 1, now=0.0)
    assert queue.died(took(queue), "killed") == []
    assert queue.died(took(queue), "killed") == []
    assert queue.died(took(queue), "signal 9") == [request]
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

    def report(batch: Batch) -> None:
        if 5 in rows_of(batch):
            tried.append(batch.rows)
            queue.died(batch, "killed")
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
    queue.returned(took(queue))
    assert (queue.counts.waiting_rows, queue.counts.running_rows) == (10, 0)
    small = took(queue, most=3)
    assert spans(small) == [("ann", 0, 3)]
    assert small.strikes == 0
    rest = [took(queue), took(queue)]
    assert [spans(batch) for batch in rest] == [[("ann", 3, 8)], [("ann", 8, 10)]]
    for batch in (small, *rest):
        answer(queue, batch)
    assert request.joined().tolist() == list(range(10))
