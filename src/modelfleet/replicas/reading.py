"""Streams: users' data that come batch by batch, read a little ahead of the replicas by a few threads."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Protocol

import numpy as np

from modelfleet.errors import FleetError, RowsError
from modelfleet.feeds.reading import batch_count, open_loader
from modelfleet.formatting import count, without_period
from modelfleet.replicas.requests import Request
from modelfleet.replicas.rows import rows_of_batch
from modelfleet.replicas.state import PoolState
from modelfleet.trees import map_tree
from modelfleet.types import Data, Tree

# Streams that are read at once, with a thread for each, so that a slow one holds up no other. Each may have files
# and processes open. A stream is read to its end before the next begins, so that few users' answers are in memory.
MAX_READERS = 8
MAX_UNCLAIMED_USERS = 2 * MAX_READERS  # whose streams were begun, and whose answers the caller has not taken
MAX_PARTIAL_READERS = 64  # where each batch is reported, as the streams may be endless
CLOSE_TIMEOUT = 0.5  # seconds to wait for loaders that are reading their next batch
_END = object()


class Report(Protocol):
    """Receives answers."""

    def __call__(self, user: Hashable, answer: Tree, rows: int, last: bool) -> None:
        """Receive a user's answer or error for `rows` rows. `last` is True for the user's last."""
        ...


class Reading:
    """Reads streams, submits their batches, and reports the outcome of each user.

    Args:
        state: The pool of replicas to submit to.
        loaders: Streams by user.
        max_rows: How many rows may be read and not answered. They are divided evenly between the streams that are
            being read; each may exceed its part by one batch.
        inputs: Returns the part of a batch that the model is called with.
        report: Called once for each user with all answers, or with an error.
        partial: Call `report` for each batch, in order, and with None at a user's end. Rows count as read ahead
            until the caller has taken their answers.
    """

    def __init__(
        self,
        state: PoolState,
        loaders: Mapping[Hashable, Data],
        *,
        max_rows: int,
        inputs: Callable[[Tree], Tree],
        report: Report,
        partial: bool,
    ) -> None:
        self._state = state
        self._max_rows = max_rows
        self._inputs = inputs
        self._report = report
        self._partial = partial
        self._changed = threading.Condition()
        self._streams = {user: _Stream(user, loader) for user, loader in loaders.items()}
        self._open = dict.fromkeys(self._streams.values())
        self._unread = deque(self._open)
        self._rows = self._batches = 0  # read so far
        self._unclaimed_users = 0
        self._closed = False
        self._readers, self._max_unclaimed = (
            (MAX_PARTIAL_READERS, MAX_PARTIAL_READERS) if partial else (MAX_READERS, MAX_UNCLAIMED_USERS)
        )
        self._threads = [
            threading.Thread(target=self._read_streams, name="modelfleet-reader", daemon=True)
            for _ in range(min(self._readers, len(loaders)))
        ]
        for thread in self._threads:
            thread.start()

    def rows(self) -> int | None:
        """Return how many rows there will be, estimated from the batches so far; None if that is unknown."""
        with self._changed:
            left = [stream.left for stream in self._open if not stream.ended]
            known = [batches for batches in left if batches is not None]
            if len(known) < len(left) or (known and not self._batches):
                return None
            return self._rows + (round(sum(known) * self._rows / self._batches) if known else 0)

    def claimed(self, user: Hashable, rows: int, last: bool) -> None:
        """Note that the caller has taken the answers for `rows` rows of a user: others can be read."""
        with self._changed:
            if self._partial:
                self._streams[user].ahead -= rows
            self._unclaimed_users -= last
            self._changed.notify_all()

    def close(self) -> None:
        """Read no more. A loader that is still reading is left behind: its thread ends when it has its batch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + CLOSE_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _read_streams(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or not self._unread or self._unclaimed_users < self._max_unclaimed
                )
                if self._closed or not self._unread:
                    return
                stream = self._unread.popleft()
                self._unclaimed_users += 1
            try:
                self._read(stream)
            except BaseException as error:  # of any kind: without a report the caller would wait forever
                stream.raised = error
            with self._changed:
                stream.ended = True
            self._end(stream)

    def _read(self, stream: "_Stream") -> None:
        """Submit the batches of a stream, until its end or until an error makes the rest useless."""
        batches = open_loader(stream.loader, f"the data of user {stream.user!r}")
        try:
            while self._has_room(stream):
                batch = next(batches, _END)
                if batch is _END:
                    return
                data, rows = rows_of_batch(batch, self._inputs, stream.user)
                if rows:
                    self._submit(stream, data, rows)
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def _has_room(self, stream: "_Stream") -> bool:
        """Wait until the next batch of a stream may be read. Return False if reading has to end."""
        with self._changed:
            # The fewer streams are left, the more rows each may have.
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or stream.error is not None
                    or stream.ahead < max(1, self._max_rows // min(self._readers, len(self._open)))
                )
            )
            return not (self._closed or stream.error is not None)

    def _submit(self, stream: "_Stream", data: Tree, rows: int) -> None:
        try:
            future = self._state.submit(stream.user, data, rows)
        except FleetError as error:  # no replica is left
            stream.error = error
            return
        with self._changed:
            start = stream.count_read(rows)
            self._rows += rows
            self._batches += 1
        future.add_done_callback(lambda ended: self._answered(stream, start, rows, outcome(ended)))

    def _answered(self, stream: "_Stream", start: int, rows: int, answer: Tree) -> None:
        with self._changed:
            stream.record(start, rows, answer, keep=not self._partial)
            if not self._partial:
                stream.ahead -= rows
            for batch in stream.in_order() if self._partial else ():
                self._report(stream.user, *batch, last=False)
            self._changed.notify_all()
        self._end(stream)

    def _end(self, stream: "_Stream") -> None:
        """Report a user's outcome, if this thread was the last one working on it."""
        with self._changed:
            if not stream.ended or stream.unanswered or stream not in self._open:
                return
            del self._open[stream]
            self._changed.notify_all()
        if not self._partial:
            self._report(stream.user, stream.outcome(), stream.rows, last=True)
            return
        failure = stream.failure()
        if failure is not None:
            self._report(stream.user, failure, 0, last=False)
        self._report(stream.user, None, 0, last=True)


def outcome(future: Future[Tree]) -> Tree | Exception:
    """Return the answer of a future that is done, or its error."""
    if future.cancelled():
        return CancelledError()
    error = future.exception()
    return future.result() if error is None else error


class _Stream:
    """Stream of one user, and the outcomes of its rows so far."""

    def __init__(self, user: Hashable, loader: Data) -> None:
        self.user = user
        self.loader = loader
        self.left: int | None = None
        """Number of batches to be read, if it is known."""
        self.unanswered = 0
        """Number of rows that were submitted and have no outcome."""
        self.ahead = 0
        """Number of rows that were read before they were needed."""
        self.ended = False
        """True once no more rows will be submitted."""
        self.raised: BaseException | None = None
        """Error of its loader."""
        self.error: Exception | None = None
        """Reason why none of its rows can be answered."""
        with suppress(Exception):  # of a user's own __len__; reading the stream will show whether it works
            self.left = batch_count(loader)
        # All rows as if they had been submitted at once, so that errors and answers are the same as for arrays.
        self._whole = Request(user, None, 0, 0.0)
        self._batches: dict[int, tuple[Tree, int]] = {}  # unreported answers and their rows, by first row
        self._reported_rows = 0

    @property
    def rows(self) -> int:
        """Number of rows that were submitted."""
        return self._whole.rows

    def count_read(self, rows: int) -> int:
        """Count a batch that was submitted. Return the number of its first row."""
        start = self._whole.rows
        self._whole.rows += rows
        self.unanswered += rows
        self.ahead += rows
        if self.left is not None:
            self.left = max(0, self.left - 1)
        return start

    def record(self, start: int, rows: int, answer: Tree, *, keep: bool) -> None:
        """Record the outcome of a batch: for `outcome` if `keep` is True, else for `in_order`."""
        self.unanswered -= rows
        if isinstance(answer, Exception) and not isinstance(answer, RowsError):
            self.error = answer
        elif keep:
            _record(self._whole, start, rows, answer)
        elif isinstance(answer, RowsError):
            batch = Request(self.user, None, rows, 0.0)
            _record(batch, start, rows, answer)
            self._batches[start] = batch.failure(), rows
        else:
            self._batches[start] = answer, rows

    def in_order(self) -> Iterator[tuple[Tree, int]]:
        """Yield the unreported answers and their numbers of rows, up to the first that is missing."""
        while self._reported_rows in self._batches:
            answer, rows = self._batches.pop(self._reported_rows)
            self._reported_rows += rows
            yield answer, rows

    def outcome(self) -> Tree | Exception:
        """Return all answers as one, or an error."""
        try:
            failure = self.failure()
            if failure is not None:
                return failure
            if self._whole.errors:
                return self._whole.failure()
            answer = self._whole.joined()
        except Exception as error:  # such as answers that can't be joined: the caller needs an outcome in any case
            return error
        return np.empty(0) if answer is None else answer

    def failure(self) -> Exception | None:
        """Return why the stream was not read to its end, if it was not, with the answers so far."""
        whole = self._whole
        if self.error is not None or self.raised is None:
            return self.error
        after = f" after {count(whole.rows, 'row')}" if whole.rows else ""
        failure = RowsError(
            f"the data of user {self.user!r} raised {type(self.raised).__name__}{after}: "
            f"{without_period(self.raised)}. Fix the loader and map this user again; the answers so far are in "
            f".answers, and the numbers of their rows in .kept.",
            whole.errors,
            whole.joined(),
            whole.kept,
        )
        failure.__cause__ = self.raised
        return failure


def _record(request: Request, start: int, rows: int, answer: Tree) -> None:
    """Record answers or errors of rows that begin with row `start`."""
    if not isinstance(answer, RowsError):
        request.answers[start, start + rows] = answer
        return
    for row, error in answer.rows.items():
        request.fail(start + row, error)
    position = 0
    for first, last in _runs(answer.kept):
        stop = position + last - first
        part = map_tree(lambda leaf, a=position, b=stop: leaf[a:b], answer.answers)
        request.answers[start + first, start + last] = part
        position = stop


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as spans without gaps, (first, last + 1)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found
