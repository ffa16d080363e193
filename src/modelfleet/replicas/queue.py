"""Replicas' queue: which rows go next, to which replica, and the outcome of every row.

No threads, clocks or frameworks: the time is passed in as `now`, outputs are opaque trees, and the owner holds one
lock around every call.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

from modelfleet.errors import ClosedError, DeadlineError, InputError, QueueFullError
from modelfleet.formatting import count
from modelfleet.replicas import options
from modelfleet.replicas.deadlines import Deadlines
from modelfleet.replicas.options import Balance, Isolation
from modelfleet.replicas.requests import (
    Counts,
    Request,
    RowBatch,
    RowSpan,
    Status,
    open_spans,
    record_deadly,
    record_errors,
    spans_between,
    split_rows,
)
from modelfleet.replicas.speeds import Speeds
from modelfleet.replicas.waiting_areas import WaitingAreas
from modelfleet.types import Tree

MAX_DEATHS = 3  # of replicas, charged to a single row before it fails
UNKNOWN_WAIT = 1.0  # seconds to suggest while no replica's speed is known
MIN_WAIT = 0.01  # seconds


class Queue:
    """Gives the rows of many users to replicas, fairly, and records the outcome of every row.

    A free replica is given what `take` returns. Each batch is then reported exactly once: by `record` (some rows
    were answered, some were not), `fail` (no row can be answered), `record_death` (the replica died) or `put_back`
    (the batch was not run). The reports return the requests that ended by them. `counts` is always exact.

    Unless rows may share a batch (isolation "rows"), a batch is a request, or a part of one cut at multiples of
    `batch_size`. It is never cut, joined or changed after that.

    Args:
        replicas: Names of the replicas.
        batch_size: Rows of a batch, at most.
        max_queue: Requests that may wait, at most; None for no limit.
        balance: As for `modelfleet.Replicas`.
        isolation: As for `modelfleet.Replicas`.
        batch_wait: As for `modelfleet.Replicas`.
    """

    def __init__(
        self,
        replicas: Sequence[str],
        *,
        batch_size: int,
        max_queue: int | None,
        balance: Balance,
        isolation: Isolation,
        batch_wait: float = 0.0,
    ) -> None:
        if not replicas or len(set(replicas)) != len(replicas):
            raise InputError(f"replicas are named {list(replicas)!r}. Give at least one name, and none twice.")
        options.check_positive("batch_size", batch_size)
        if max_queue is not None:
            options.check_positive("max_queue", max_queue)
        options.check_choice("balance", balance, Balance)
        options.check_choice("isolation", isolation, Isolation)
        options.check_batch_wait(batch_wait)
        self.counts = Counts()
        self._batch_size = batch_size
        self._max_queue = max_queue
        self._mixed = isolation == "rows"
        self._speeds = Speeds()
        self._deadlines = Deadlines()
        self._open: dict[Request, None] = {}
        self._running: set[RowBatch] = set()
        self._closed: Exception | None = None
        self._areas = WaitingAreas(replicas, sticky=balance == "sticky", pinned=isolation == "device")
        self._batch_wait = float(batch_wait) if self._mixed else 0.0  # a request alone can't get fuller

    # --- submitting and taking -----------------------------------------------------------------------------------

    def submit(
        self,
        user: Hashable,
        data: Tree,
        rows: int,
        now: float,
        deadline: float | None = None,
        priority: int = 0,
    ) -> Request:
        """Add a request. One without rows is answered at once. `deadline` is a time like `now`.

        Raises:
            QueueFullError: If `max_queue` requests wait.
            ClosedError: If the queue is closed, or the user's replica was given up.
            InputError: If the user, the deadline or the priority can't be used.
        """
        if self._closed is not None:
            raise ClosedError(f"the request of user {user!r} came too late: {self._closed}") from self._closed
        assert rows >= 0, rows
        options.check_request(user, deadline, priority)
        gone = self._areas.why_gone(user)
        if gone is not None:
            raise ClosedError(f"user {user!r} is pinned to a replica that is gone: {gone}") from gone
        if rows and self.full:
            wait = self.seconds_until_room()
            raise QueueFullError(
                f"the queue is full for the request of user {user!r}: {self.counts.waiting:,} requests wait, "
                f"and max_queue={self._max_queue}. Submit it again in {wait:.2g} s, submit more rows at once, "
                f"or give a larger max_queue.",
                wait,
            )
        request = Request(user, data, rows, now, deadline, int(priority))
        self.counts.submitted += 1
        self._open[request] = None
        self._deadlines.add(request)
        if rows:
            self._move(request, waiting=rows)
            self._areas.add(request)
        else:
            self._end(request, "answered")
        return request

    @property
    def full(self) -> bool:
        """True if `max_queue` requests wait."""
        return self._max_queue is not None and self.counts.waiting >= self._max_queue

    @property
    def rows_ahead(self) -> int:
        """Number of waiting rows, as if every replica had only as many as the one with the fewest of its own."""
        return self.counts.waiting_rows if self._areas.homes is None else self._areas.fewest_rows()

    def take(self, replica: str, now: float, max_rows: int | None = None, batches: int = 1) -> RowBatch | None:
        """Return the next rows for a free replica; None if there are none for it, or while it is lost.

        Deadlines are not checked: call `expire` before.

        Args:
            replica: Name of the replica.
            now: The time.
            max_rows: How many rows the replica has memory for; None for no limit.
            batches: How many times the size of a batch may be taken at once, where so many rows wait. A batch that
                is not full is taken when its oldest row has waited for `batch_wait`: call again at `due`.
        """
        assert max_rows is None or max_rows >= 1, max_rows
        waiting = self._areas.of_replica(replica)
        if replica not in self._areas.live:
            return None
        if self._mixed:
            size = min(self._batch_size, max_rows or self._batch_size)
            limit = self._batch_size * batches
            new_rows = min(limit, max_rows or limit, self._fair_rows(replica))
        else:
            size = new_rows = self._batch_size
        due = self.due(replica)
        new = due is None or now >= due or self.full or waiting.has_new_rows(size)
        batch = waiting.take(size, new_rows, mixed=self._mixed, new=new)
        if batch is None:
            return None
        batch.replica = replica
        self._running.add(batch)
        for span in batch.spans:
            self._move(span.request, waiting=-span.rows, running=span.rows)
            if span.request.first_taken is None:
                span.request.first_taken = now
        return batch

    def due(self, replica: str) -> float | None:
        """Return when a part-filled batch for a replica is taken; None if no batch waits to be filled."""
        oldest = next(iter(self._areas.of_replica(replica).arrivals), None) if self._batch_wait else None
        return None if oldest is None else oldest.submitted + self._batch_wait

    def stop_batch_wait(self) -> None:
        """Stop waiting for batches to fill: no more rows will come."""
        self._batch_wait = 0.0

    def split(self, batch: RowBatch, groups: Sequence[tuple[RowSpan, ...]]) -> list[RowBatch]:
        """Replace a batch that was taken by one for each group of its spans."""
        assert batch in self._running, "a batch that is not running was split"
        assert sum(len(group) for group in groups) == len(batch.spans)
        self._running.remove(batch)
        parts = [RowBatch(group, batch.deaths, batch.replica) for group in groups]
        self._running.update(parts)
        return parts

    def without_closed(self, batch: RowBatch) -> RowBatch | None:
        """Replace a batch that was taken by one without the rows of closed requests; None if no row is left."""
        if all(span.request.status == "open" for span in batch.spans):
            return batch
        spans = self._finish(batch)
        if not spans:
            return None
        rest = RowBatch(spans, batch.deaths, batch.replica)
        self._running.add(rest)
        return rest

    # --- reports on batches --------------------------------------------------------------------------------------

    def record(
        self,
        batch: RowBatch,
        answers: Sequence[tuple[RowSpan, Tree]],
        errors: Mapping[int, Exception],
        left: Sequence[tuple[int, int]],
        now: float,
        *,
        first: bool = False,
    ) -> list[Request]:
        """Record the outcome of each row of a batch.

        Args:
            batch: A batch that was taken.
            answers: Outputs by the rows that they are for.
            errors: Errors by the row's position in the batch.
            left: Positions (start, stop) of rows to be tried again, each span in a batch of its own.
            now: The time.
            first: Try these rows again before all others.
        """
        self._finish(batch)
        for span, output in answers:
            if span.request.status == "open":
                span.request.answers[span.start, span.stop] = output
                span.request.last_answered = now
                self._move(span.request, running=-span.rows)
        failed = record_errors(batch, errors)
        for request, rows in failed.items():
            self._move(request, running=-rows)
        for start, stop in reversed(left) if first else left:
            self._try_again(open_spans(spans_between(batch.spans, start, stop)), batch.deaths, first)
        users = dict.fromkeys(span.request.user for span in batch.spans)
        if self._mixed and failed:
            for user in dict.fromkeys(request.user for request in failed):
                self._areas.of_user(user).suspect(user)
        elif len(users) == 1 and not left:
            user = next(iter(users))
            if not self._areas.is_forgotten(user):
                self._areas.of_user(user).clear(user)
        return self._end_complete(open_spans(batch.spans))

    def fail(self, batch: RowBatch, error: Exception) -> list[Request]:
        """Record that no row of a batch can be answered, for the same reason."""
        return self.record(batch, (), dict.fromkeys(range(batch.rows), error), (), 0.0)

    def record_death(self, batch: RowBatch, reason: str) -> list[Request]:
        """Record that a replica died or hung with a batch: try it once more as it was, then look for the bad rows.

        The second death cuts the batch in halves, and so does every death after that. A single row fails when it
        is charged with `MAX_DEATHS`. Each half starts with one death: a row that was merely in the same batch as a
        bad one fails after two more of its own. A batch that must not be cut is tried whole until the last death.
        """
        spans = self._finish(batch)
        deaths = batch.deaths + 1
        whole = batch.rows == 1 or not self._mixed
        if deaths >= MAX_DEATHS and whole:
            record_deadly(spans, reason)
            for span in spans:
                self._move(span.request, running=-span.rows)
            return self._end_complete(spans)
        if deaths == 1 or whole:
            self._try_again(spans, deaths)
        else:
            # Spans of closed requests are gone, and may have held the bad rows: even a single row that is left has
            # to be tried alone.
            for half in split_rows(spans, (sum(span.rows for span in spans) + 1) // 2):
                self._try_again(half, deaths=1)
        return []

    def put_back(self, batch: RowBatch) -> None:
        """Record that a batch was not run: it is taken next, whole or cut smaller."""
        self._try_again(self._finish(batch), batch.deaths, first=True)

    def record_speed(self, replica: str, rows: int, seconds: float) -> None:
        """Record how long a replica took for a batch. Its speed decides how many rows it is given."""
        self._speeds.record(replica, rows, seconds)

    # --- ends of requests ----------------------------------------------------------------------------------------

    def cancel(self, request: Request) -> bool:
        """Cancel a request. Return False if it had ended before."""
        was_open = request.status == "open"
        if was_open:
            self._end(request, "cancelled")
        return was_open

    def expire(self, now: float) -> list[Request]:
        """Fail the requests whose deadline has passed, even those with running rows."""
        ended: list[Request] = []
        while (request := self._deadlines.nearest()) is not None:
            assert request.deadline is not None
            if request.deadline > now:
                break
            missing = request.waiting + request.running
            error = DeadlineError(
                f"{missing:,} of {count(request.rows, 'row')} of user {request.user!r} had no answer when the "
                f"deadline passed, {request.deadline - request.submitted:.3g} s after they were submitted. "
                f"Give a later deadline, submit fewer rows at once, or use more devices."
            )
            self._end(request, "failed", error)
            ended.append(request)
        return ended

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next."""
        return request.deadline if (request := self._deadlines.nearest()) is not None else None

    def seconds_until_room(self) -> float:
        """Return in how many seconds the queue is expected to have room, by the replicas' speeds."""
        if not self.full:
            return 0.0
        speed = self._speeds.total(self._areas.live)
        if speed is None:
            return UNKNOWN_WAIT
        return max(MIN_WAIT, self.counts.waiting_rows / self.counts.waiting / speed)

    def close(self, error: Exception) -> list[Request]:
        """Fail everything that is open with `error`, and refuse new requests."""
        self._closed = error
        return self._fail_all(list(self._open), error)

    # --- replicas ------------------------------------------------------------------------------------------------

    def lose_replica(self, replica: str) -> None:
        """Give a replica nothing until it is back. Its sticky users move; users pinned to its device wait."""
        self._areas.lose(replica)

    def restore_replica(self, replica: str) -> None:
        """Let a replica that was lost take rows again."""
        self._areas.restore(replica)

    def give_up_replica(self, replica: str, error: Exception) -> list[Request]:
        """Give up a replica for good. Users pinned to it fail with `error`, now and when they submit again."""
        self._areas.give_up(replica, error)
        return self._fail_all([r for r in self._open if self._areas.why_gone(r.user) is error], error)

    # --- bookkeeping: every row of an open request waits, runs, or has its outcome -------------------------------

    def _move(self, request: Request, waiting: int = 0, running: int = 0) -> None:
        """Change the numbers of waiting and running rows of an open request."""
        self.counts.waiting -= request.waiting > 0
        request.waiting += waiting
        request.running += running
        self.counts.waiting += request.waiting > 0
        self.counts.waiting_rows += waiting
        self.counts.running_rows += running

    def _finish(self, batch: RowBatch) -> tuple[RowSpan, ...]:
        """Note that a batch is not running any more. Return its spans of open requests."""
        assert batch in self._running, "a batch that is not running was reported"
        self._running.remove(batch)
        return open_spans(batch.spans)

    def _try_again(self, spans: tuple[RowSpan, ...], deaths: int, first: bool = False) -> None:
        if not spans:
            return
        for span in spans:
            self._move(span.request, waiting=span.rows, running=-span.rows)
        waiting, batch = self._areas.of_user(spans[0].request.user), RowBatch(spans, deaths)
        if first:
            waiting.put_back.appendleft(batch)
        else:
            waiting.retry(batch)

    def _end_complete(self, spans: Iterable[RowSpan]) -> list[Request]:
        """End the requests of these spans of which every row has its outcome now."""
        touched = dict.fromkeys(span.request for span in spans)
        ended = [request for request in touched if not (request.waiting or request.running)]
        for request in ended:
            failure = request.failure() if request.errors else None
            self._end(request, "answered" if failure is None else "failed", failure)
        return ended

    def _fail_all(self, requests: list[Request], error: Exception) -> list[Request]:
        for request in requests:
            self._end(request, "failed", error)
        return requests

    def _end(self, request: Request, status: Status, error: Exception | None = None) -> None:
        assert request.status == "open", request.status
        self._areas.remove(request)
        self._move(request, waiting=-request.waiting, running=-request.running)
        request.status = status
        request.error = error
        setattr(self.counts, status, getattr(self.counts, status) + 1)
        del self._open[request]
        self._deadlines.remove(request)

    def _fair_rows(self, replica: str) -> int:
        """Return how many new rows a replica may take: the end of a long job must not wait for a slow one."""
        alone = self._areas.homes is not None
        rows = None if alone else self._speeds.fair_rows(replica, self._areas.live, self.counts.waiting_rows)
        if rows is None:
            return self._batch_size
        if rows > self._batch_size:  # beyond a batch only half of it, as speeds are not that exact
            return max(self._batch_size, rows // 2)
        return max(1, self._batch_size // 8, rows)
