"""Users' data that come batch by batch: read a little ahead of the replicas, by a few threads."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from modelfleet.errors import FleetError, RowsError
from modelfleet.feeds.reading import batch_count, open_loader
from modelfleet.replicas.pool import Replicas
from modelfleet.replicas.requests import Request
from modelfleet.replicas.rows import batch_rows
from modelfleet.trees import map_tree
from modelfleet.words import count, without_period

# Streams read at once, a thread for each: a slow one stops nobody. Each may have files and processes open. One is
# read to its end before another takes its place, so that few users' answers are in memory.
READERS = 8
HELD = 2 * READERS  # users whose streams were begun, and whose answers were not handed out
PARTIAL = 64  # streams read at once where each batch is handed out: they may be endless
PATIENCE = 0.5  # seconds that leaving waits for loaders that are at their next batch
_END = object()


class Told(Protocol):
    """Takes answers: the user, the answer or an error, for how many rows, and whether it is the user's last."""

    def __call__(self, user: Hashable, answer: Any, rows: int, last: bool) -> None:
        """Note an answer."""
        ...


class Reading:
    """Reads streams and submits their batches; `told` has each user's outcome, once.

    `room` rows, read and not answered, are divided evenly between the streams that are read; beyond its part a
    stream has at most one batch, whose size it decides itself. `inputs` says which part of a batch the model is
    called with. `partial`: `told` has the outcome of each batch, in their order, and None for the user's last.
    There the rows are read that were not handed out.
    """

    def __init__(
        self,
        replicas: Replicas,
        loaders: Mapping[Hashable, Any],
        *,
        room: int,
        inputs: Callable[[Any], Any],
        told: Told,
        partial: bool = False,
    ) -> None:
        self._replicas = replicas
        self._room = room
        self._inputs = inputs
        self._told = told
        self._partial = partial
        self._changed = threading.Condition()
        self._streams = {user: _Stream(user, loader) for user, loader in loaders.items()}
        self._open = dict.fromkeys(self._streams.values())
        self._unread = deque(self._open)
        self._rows = self._batches = 0  # read so far
        self._held = 0
        self._closed = False
        self._readers, self._most = (PARTIAL, PARTIAL) if partial else (READERS, HELD)
        self._threads = [
            threading.Thread(target=self._work, name="modelfleet-reader", daemon=True)
            for _ in range(min(self._readers, len(loaders)))
        ]
        for thread in self._threads:
            thread.start()

    def rows(self) -> int | None:
        """How many rows there will be, as far as the batches so far tell; None while nobody can know."""
        with self._changed:
            left = [stream.left for stream in self._open if not stream.ended]
            known = [batches for batches in left if batches is not None]
            if len(known) < len(left) or (known and not self._batches):
                return None
            return self._rows + (round(sum(known) * self._rows / self._batches) if known else 0)

    def handed_out(self, user: Hashable, rows: int, last: bool) -> None:
        """Answers for so many rows of a user's have left for the caller: there is room for others."""
        with self._changed:
            if self._partial:
                self._streams[user].ahead -= rows
            self._held -= last
            self._changed.notify_all()

    def close(self) -> None:
        """Read no more. A loader that does not give its batch is left behind: its thread ends when it does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._unread or self._held < self._most)
                if self._closed or not self._unread:
                    return
                stream = self._unread.popleft()
                self._held += 1
            try:
                self._read(stream)
            except BaseException as error:  # whatever it is, the caller would wait for ever if it were not told
                stream.raised = error
            with self._changed:
                stream.ended = True
            self._end(stream)

    def _read(self, stream: "_Stream") -> None:
        """Submit the batches of a stream, until its end or until there is no more use in it."""
        batches = open_loader(stream.loader, f"the data of user {stream.user!r}")
        try:
            while self._has_room(stream):
                batch = next(batches, _END)
                if batch is _END:
                    return
                data, rows = batch_rows(batch, self._inputs, stream.user)
                if rows:
                    self._submit(stream, data, rows)
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def _has_room(self, stream: "_Stream") -> bool:
        """Wait until a stream may be read on; False if it should not be."""
        with self._changed:
            # The fewer are left, the more each may have.
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or stream.error is not None
                    or stream.ahead < max(1, self._room // min(self._readers, len(self._open)))
                )
            )
            return not (self._closed or stream.error is not None)

    def _submit(self, stream: "_Stream", data: Any, rows: int) -> None:
        try:
            future = self._replicas._submit(stream.user, data, rows)
        except FleetError as error:  # there are no replicas any more
            stream.error = error
            return
        with self._changed:
            start = stream.read(rows)
            self._rows += rows
            self._batches += 1
        future.add_done_callback(lambda ended: self._answered(stream, start, rows, outcome(ended)))

    def _answered(self, stream: "_Stream", start: int, rows: int, answer: Any) -> None:
        with self._changed:
            stream.answered(start, rows, answer, keep=not self._partial)
            if not self._partial:
                stream.ahead -= rows
            for batch in stream.in_order() if self._partial else ():
                self._told(stream.user, *batch, last=False)
            self._changed.notify_all()
        self._end(stream)

    def _end(self, stream: "_Stream") -> None:
        """Tell a user's outcome, if all is done: by whoever did the last of it."""
        with self._changed:
            if not stream.ended or stream.unanswered or stream not in self._open:
                return
            del self._open[stream]
            self._changed.notify_all()
        if not self._partial:
            self._told(stream.user, stream.outcome(), stream.rows, last=True)
            return
        trouble = stream.trouble()
        if trouble is not None:
            self._told(stream.user, trouble, 0, last=False)
        self._told(stream.user, None, 0, last=True)


def outcome(future: Future[Any]) -> Any:
    """What a future that is done has: its answer, or the error in its place."""
    if future.cancelled():
        return CancelledError()
    error = future.exception()
    return future.result() if error is None else error


class _Stream:
    """The data of one user, and what became of the rows so far."""

    def __init__(self, user: Hashable, loader: Any) -> None:
        self.user = user
        self.loader = loader
        self.left: int | None = None
        """Batches to be read, where it is known."""
        self.unanswered = 0
        """Rows that were submitted and have no outcome."""
        self.ahead = 0
        """Rows that were read before they were needed."""
        self.ended = False
        """No more will be submitted."""
        self.raised: BaseException | None = None
        """What its loader raised."""
        self.error: Exception | None = None
        """Why nothing of it can be answered."""
        with suppress(Exception):  # of a user's own __len__: reading them will tell whether they are in order
            self.left = batch_count(loader)
        # All rows as if they had been submitted at once, so that errors and answers are those of arrays.
        self._whole = Request(user, None, 0, 0.0)
        self._batches: dict[int, tuple[Any, int]] = {}  # answers and rows by first row, that were not told
        self._told = 0  # rows

    @property
    def rows(self) -> int:
        """How many rows were submitted."""
        return self._whole.rows

    def read(self, rows: int) -> int:
        """Note a batch of so many rows that was submitted; gives the number of its first row."""
        start = self._whole.rows
        self._whole.rows += rows
        self.unanswered += rows
        self.ahead += rows
        if self.left is not None:
            self.left = max(0, self.left - 1)
        return start

    def answered(self, start: int, rows: int, answer: Any, *, keep: bool) -> None:
        """Note what became of a batch; `keep`: for the outcome of the whole, else for `in_order`."""
        self.unanswered -= rows
        if isinstance(answer, Exception) and not isinstance(answer, RowsError):
            self.error = answer
        elif keep:
            _note(self._whole, start, rows, answer)
        elif isinstance(answer, RowsError):
            batch = Request(self.user, None, rows, 0.0)
            _note(batch, start, rows, answer)
            self._batches[start] = batch.failure(), rows
        else:
            self._batches[start] = answer, rows

    def in_order(self) -> Iterator[tuple[Any, int]]:
        """The answers of batches that were not told, up to the first that is missing, and their rows."""
        while self._told in self._batches:
            answer, rows = self._batches.pop(self._told)
            self._told += rows
            yield answer, rows

    def outcome(self) -> Any:
        """All answers as one, or the error in their place."""
        try:
            trouble = self.trouble()
            if trouble is not None:
                return trouble
            if self._whole.errors:
                return self._whole.failure()
            answer = self._whole.joined()
        except Exception as error:  # answers that can't be joined; whatever it is, the caller has to be told
            return error
        return np.empty(0) if answer is None else answer

    def trouble(self) -> Exception | None:
        """Why the stream was not read to its end, if it was not; with the answers that were kept."""
        whole = self._whole
        if self.error is not None or self.raised is None:
            return self.error
        after = f" after {count(whole.rows, 'row')}" if whole.rows else ""
        failure = RowsError(
            f"the data of user {self.user!r} raised {type(self.raised).__name__}{after}: "
            f"{without_period(self.raised)}. Fix what reads them and map this user again; the answers "
            f"so far are in .answers, and the numbers of their rows in .kept.",
            whole.errors,
            whole.joined(),
            whole.kept,
        )
        failure.__cause__ = self.raised
        return failure


def _note(request: Request, start: int, rows: int, answer: Any) -> None:
    """Note answers or errors of rows that begin with row `start`."""
    if not isinstance(answer, RowsError):
        request.pieces[start, start + rows] = answer
        return
    for row, error in answer.rows.items():
        request.fail(start + row, error)
    place = 0
    for first, last in _runs(answer.kept):
        stop = place + last - first
        piece = map_tree(lambda leaf, a=place, b=stop: leaf[a:b], answer.answers)
        request.pieces[start + first, start + last] = piece
        place = stop


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as spans without gaps, (first, last + 1)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found
