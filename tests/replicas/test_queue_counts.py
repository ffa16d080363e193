"""The queue's books under any interleaving of what can happen, against books kept apart."""

import itertools
from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.replicas.test_queue import answers_all

from modelfleet.errors import DeadlineError, QueueFullError, RowsError
from modelfleet.replicas.queue import Queue
from modelfleet.replicas.requests import Request, RowBatch, RowSpan

Row = tuple[Request, int]
some_rows = st.sets(st.integers(0, 19), max_size=2)
pick = st.integers(0, 1000)  # one of those there are, by its remainder


class Books(RuleBasedStateMachine):
    """Replicas that answer, raise on poison rows, and die on deadly ones or out of the blue."""

    @initialize(
        replicas=st.integers(1, 3),
        batch_size=st.integers(1, 12),
        max_queue=st.none() | st.integers(1, 6),
        balance=st.sampled_from(["least-busy", "sticky"]),
        isolation=st.sampled_from(["rows", "batch", "device"]),
    )
    def start(self, replicas: int, batch_size: int, max_queue: int | None, balance: Any, isolation: Any) -> None:
        self.names = [f"r{n}" for n in range(replicas)]
        self.queue = Queue(
            self.names, batch_size=batch_size, max_queue=max_queue, balance=balance, isolation=isolation
        )
        self.batch_size, self.max_queue, self.balance, self.isolation = batch_size, max_queue, balance, isolation
        self.now = 0.0
        self.live = set(self.names)
        self.requests: list[Request] = []
        self.flying: list[RowBatch] = []
        self.poison: set[Row] = set()
        self.deadly: set[Row] = set()
        self.spoilt: set[Row] = set()  # by poison in a batch that is never cut
        self.deaths: Counter[Row] = Counter()
        self.outcomes: Counter[Row] = Counter()  # given while the request was open
        self.cancelled: set[Request] = set()
        self.expired: set[Request] = set()
        self.seen: dict[Hashable, set[str | None]] = {}
        self.ended: list[Request] = []

    # What users do

    @rule(
        user=st.sampled_from("abcd"),
        rows=st.integers(0, 20),
        lasts=st.none() | st.integers(0, 5),
        poison=some_rows,
        deadly=some_rows,
        priority=st.integers(-1, 1),
    )
    def submit(
        self, user: str, rows: int, lasts: int | None, poison: set[int], deadly: set[int], priority: int
    ) -> None:
        deadline = None if lasts is None else self.now + lasts
        waiting = self.queue.counts.waiting
        try:
            request = self.queue.submit(user, len(self.requests), rows, self.now, deadline, priority)
        except QueueFullError:
            assert rows
            assert self.max_queue is not None
            assert waiting >= self.max_queue
            assert self.queue.seconds_until_room() > 0
            return
        assert not rows or self.max_queue is None or waiting < self.max_queue
        self.requests.append(request)
        self.poison |= {(request, row) for row in poison if row < rows}
        self.deadly |= {(request, row) for row in deadly if row < rows}
        if not rows:
            self.ended.append(request)

    @precondition(lambda self: self.requests)
    @rule(which=pick)
    def cancel(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        was_open = request.status == "open"
        assert self.queue.cancel(request) == was_open
        if was_open:
            self.cancelled.add(request)
            self.ended.append(request)

    @rule(seconds=st.integers(1, 3), expire=st.booleans())
    def pass_time(self, seconds: int, expire: bool) -> None:
        self.now += seconds
        if not expire:
            return
        due = {
            r for r in self.requests if r.status == "open" and r.deadline is not None and r.deadline <= self.now
        }
        expired = self.queue.expire(self.now)
        assert set(expired) == due
        self.expired |= due
        self.ended += expired

    # What replicas do

    @rule(which=pick, most=st.none() | st.integers(1, 12))
    def take(self, which: int, most: int | None) -> None:
        replica = self.names[which % len(self.names)]
        flying = {row for batch in self.flying for row in rows_of(batch.spans)}
        batch = self.queue.take(replica, self.now, most)
        if batch is None:
            shared = self.balance == "least-busy" and self.isolation != "device"
            if replica in self.live and shared:
                assert self.queue.counts.waiting_rows == 0
            return
        assert replica in self.live
        assert batch.replica == replica
        rows = rows_of(batch.spans)
        limit = most or self.batch_size
        assert 1 <= len(rows) == batch.rows <= (min(self.batch_size, limit) if self.isolation == "rows" else 99)
        assert len(set(rows)) == len(rows)
        assert not flying & set(rows)
        assert not any(self.outcomes[row] for row in rows)
        assert all(piece.request.status == "open" for piece in batch.spans)
        users = {piece.request.user for piece in batch.spans}
        if self.isolation != "rows":
            (piece,) = batch.spans
            assert piece.start % self.batch_size == 0
            assert piece.stop == min(piece.start + self.batch_size, piece.request.rows)
        if self.isolation == "device":
            for user in users:
                self.seen.setdefault(user, set()).add(replica)
                assert len(self.seen[user]) == 1
        self.flying.append(batch)

    @precondition(lambda self: self.flying)
    @rule(which=pick, stop=st.integers(0, 12))
    def run(self, which: int, stop: int = 0) -> None:
        """A batch comes to its end, as its rows decide; a search for poison may stop anywhere after its first."""
        batch = self._landed(which)
        rows = set(rows_of(batch.spans))
        if rows & self.deadly:
            self._died(batch)
        elif rows & self.poison and self.isolation != "rows":
            self.spoilt |= rows
            self._count(rows)
            self._end(self.queue.fail(batch, ValueError("poison")))
        elif rows & self.poison:
            self._sort_out(batch, rows_of(batch.spans), stop)
        else:
            self._count(rows)
            self._end(answers_all(self.queue, batch, [marks(piece) for piece in batch.spans], self.now))

    @precondition(lambda self: self.flying)
    @rule(which=pick, lost=st.sampled_from(["before", "after", "never"]))
    def die(self, which: int, lost: str) -> None:
        batch = self._landed(which)
        assert batch.replica is not None
        replica = self.names.index(batch.replica)
        if lost == "before":
            self.lose(replica)
        self._died(batch)
        if lost == "after":
            self.lose(replica)

    @precondition(lambda self: self.flying)
    @rule(which=pick)
    def give_back(self, which: int) -> None:
        self.queue.put_back(self._landed(which))

    @rule(which=pick)
    def lose(self, which: int) -> None:
        name = self.names[which % len(self.names)]
        self.live.discard(name)
        self.queue.lose_replica(name)

    @rule(which=pick)
    def come_back(self, which: int) -> None:
        name = self.names[which % len(self.names)]
        self.live.add(name)
        self.queue.restore_replica(name)

    @rule(which=pick, rows=st.integers(1, 12), seconds=st.floats(0, 10))
    def note(self, which: int, rows: int, seconds: float) -> None:
        self.queue.record_speed(self.names[which % len(self.names)], rows, seconds)

    def _landed(self, which: int) -> RowBatch:
        return self.flying.pop(which % len(self.flying))

    def _count(self, rows: set[Row]) -> None:
        self.outcomes.update(row for row in rows if row[0].status == "open")

    def _sort_out(self, batch: RowBatch, rows: list[Row], stop: int) -> None:
        tried = max(stop, 1)
        errors = {
            place: ValueError("poison") for place in range(tried) if set(rows[place : place + 1]) & self.poison
        }
        good = [RowSpan(r, n, n + 1) for place, (r, n) in enumerate(rows[:tried]) if place not in errors]
        left = [(tried, len(rows))] if tried < len(rows) else []
        self._count(set(rows[:tried]))
        answers = [(piece, marks(piece)) for piece in good]
        self._end(self.queue.record(batch, answers, errors, left, self.now))

    def _died(self, batch: RowBatch) -> None:
        rows = rows_of(batch.spans)
        self.deaths.update(rows)
        given = {row: len(row[0].errors) for row in rows}
        ended = self.queue.record_death(batch, "killed")
        for row, errors in given.items():
            if len(row[0].errors) > errors:  # it was given up
                assert len(rows) == 1 or self.isolation != "rows"
                assert self.deaths[row] >= 3
                assert f"of user {row[0].user!r}" in str(row[0].errors[row[1]])
                self.outcomes[row] += 1
        self._end(ended)

    def _end(self, ended: list[Request]) -> None:
        for request in ended:
            assert request.status in ("answered", "failed")
            assert [self.outcomes[request, row] for row in range(request.rows)] == [1] * request.rows
        self.ended += ended

    # What always holds

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "queue"):
            return
        counts = self.queue.counts
        by_status = Counter(request.status for request in self.requests)
        assert counts.submitted == len(self.requests)
        assert counts.submitted == counts.answered + counts.failed + counts.cancelled + by_status["open"]
        assert (counts.answered, counts.failed, counts.cancelled, counts.open) == tuple(
            by_status[status] for status in ("answered", "failed", "cancelled", "open")
        )
        # Everyone is told once.
        assert Counter(self.ended) == Counter(r for r in self.requests if r.status != "open")
        flying = Counter(row[0] for batch in self.flying for row in rows_of(batch.spans))
        opened = [request for request in self.requests if request.status == "open"]
        left = {r: r.rows - sum(self.outcomes[r, row] for row in range(r.rows)) for r in opened}
        assert all(left.values())
        assert counts.running_rows == sum(flying[request] for request in opened)
        assert counts.waiting_rows + counts.running_rows == sum(left.values())
        assert counts.waiting == sum(left[request] > flying[request] for request in opened)
        deadlines = [request.deadline for request in opened if request.deadline is not None]
        assert self.queue.next_deadline() == min(deadlines, default=None)

    @invariant()
    def nobody_gets_anothers_row(self) -> None:
        for request in getattr(self, "requests", ()):
            self._check_answers(request)

    def _check_answers(self, request: Request) -> None:
        assert all(self.outcomes[request, row] <= 1 for row in range(request.rows))
        answered = [row for start, stop in sorted(request.answers) for row in range(start, stop)]
        assert len(set(answered)) == len(answered)
        assert not set(answered) & set(request.errors)
        assert set(answered) | set(request.errors) == {
            row for row in range(request.rows) if self.outcomes[request, row]
        }
        if request.answers:
            expected = [(request.user, request.data, row) for row in answered]
            assert [tuple(mark) for mark in request.joined().tolist()] == expected
        for row, error in request.errors.items():
            bad = self.poison | self.spoilt
            assert (request, row) in bad or self.deaths[request, row] >= 3, error

    def teardown(self) -> None:
        """Whatever happened: with the replicas back, everything comes to its end."""
        if not hasattr(self, "queue"):
            return
        for which in range(len(self.names)):
            self.come_back(which)
        for steps in itertools.count():
            assert steps < 10_000, "it never ends"
            for which in range(len(self.names)):
                self.take(which, None)
            if not self.flying:
                break
            self.run(0)
            self.the_books_are_right()
        assert self.queue.counts.open == 0
        for request in self.requests:
            self._check_end(request)

    def _check_end(self, request: Request) -> None:
        self._check_answers(request)
        if request in self.cancelled:
            assert (request.status, request.error) == ("cancelled", None)
        elif request in self.expired:
            assert request.status == "failed"
            assert isinstance(request.error, DeadlineError)
        else:
            bad = {r for r in range(request.rows) if (request, r) in self.poison | self.deadly}
            assert bad <= set(request.errors)
            assert request.status == ("failed" if request.errors else "answered")
            if request.errors:
                assert isinstance(request.error, RowsError)
                assert request.error.rows == request.errors
                kept: Any = [] if request.error.answers is None else request.error.answers.tolist()
                assert tuple(mark[2] for mark in kept) == request.error.kept


def rows_of(slices: tuple[RowSpan, ...]) -> list[Row]:
    return [(piece.request, row) for piece in slices for row in range(piece.start, piece.stop)]


def marks(piece: RowSpan) -> np.ndarray:
    """An output that says whose row it is."""
    rows = [(piece.request.user, piece.request.data, row) for row in range(piece.start, piece.stop)]
    return np.array(rows, dtype=[("user", "U1"), ("request", int), ("row", int)])


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
