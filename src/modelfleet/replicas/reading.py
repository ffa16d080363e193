"""Users' data that come batch by batch: read a little ahead of the replicas, by a few threads."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

import numpy as np

from modelfleet.errors import FleetError, RowsError
from modelfleet.feeds.reading import opened, steps_of
from modelfleet.replicas.pool import Replicas
from modelfleet.replicas.queue import HOPELESS
from modelfleet.replicas.requests import Request
from modelfleet.replicas.rows import batch_rows
from modelfleet.trees import map_tree
from modelfleet.words import count

# Streams read at once, a thread for each: a slow one stops nobody. Each may have files and processes open. One is
# read to its end before another takes its place, so that few users' answers are in memory.
READERS = 8
HELD = 2 * READERS  # users whose streams were begun, and whose answers were not handed out
PATIENCE = 0.5  # seconds that leaving waits for a loader that is at its next batch
_END = object()


class Reading:
    """Reads streams and submits their batches; `told((user, answer))` has each user's outcome, once.

    `room` rows, read and not answered, are divided evenly between the streams that are read; beyond its part a
    stream has at most one batch, whose size it decides itself. `inputs` says which part of a batch the model is
    called with.
    """

    def __init__(
        self,
        replicas: Replicas,
        loaders: Mapping[Hashable, Any],
        *,
        room: int,
        inputs: Callable[[Any], Any],
        told: Callable[[tuple[Hashable, Any]], None],
    ) -> None:
        self._replicas = replicas
        self._room = room
        self._inputs = inputs
        self._told = told
        self._changed = threading.Condition()
        self._open = dict.fromkeys(_Stream(user, loader) for user, loader in loaders.items())
        self._unread = deque(self._open)
        self._rows = self._batches = 0  # read so far
        self._held = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name="modelfleet-reader", daemon=True)
            for _ in range(min(READERS, len(loaders)))
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

    def handed_out(self) -> None:
        """A user's outcome has left for the caller: there is room for another's."""
        with self._changed:
            self._held -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Read no more. A loader that does not give its batch is left behind: its thread ends when it does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._unread or self._held < HELD)
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
        batches = opened(stream.loader, f"the data of user {stream.user!r}")
        try:
            while self._has_room(stream):
                batch = next(batches, _END)
                if batch is _END:
                    return
                data, rows = batch_rows(batch, self._inputs, stream.user)
                if rows:
                    self._submit(stream, data, rows)
            stream.cut_short = True
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
                    or stream.vain
                    or stream.unanswered < max(1, self._room // min(READERS, len(self._open)))
                )
            )
            return not (self._closed or stream.vain)

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
            stream.answered(start, rows, answer)
            self._changed.notify_all()
        self._end(stream)

    def _end(self, stream: "_Stream") -> None:
        """Tell a user's outcome, if all is done: by whoever did the last of it."""
        with self._changed:
            if not stream.ended or stream.unanswered or stream not in self._open:
                return
            del self._open[stream]
            self._changed.notify_all()
        self._told((stream.user, stream.outcome()))


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
        self.ended = False
        """No more will be submitted."""
        self.cut_short = False
        """It was not read to its end."""
        self.raised: BaseException | None = None
        """What its loader raised."""
        self.error: Exception | None = None
        """Why nothing of it can be answered."""
        with suppress(Exception):  # of a user's own __len__: reading them will tell whether they are in order
            self.left = steps_of(loader)
        # All rows as if they had been submitted at once, so that errors and answers are those of arrays.
        self._whole = Request(user, None, 0, 0.0)

    @property
    def vain(self) -> bool:
        """Whether rows that are still to be read would fail like all others."""
        return self.error is not None or (not self._whole.pieces and len(self._whole.errors) >= HOPELESS)

    def read(self, rows: int) -> int:
        """Note a batch of so many rows that was submitted; gives the number of its first row."""
        start = self._whole.rows
        self._whole.rows += rows
        self.unanswered += rows
        if self.left is not None:
            self.left = max(0, self.left - 1)
        return start

    def answered(self, start: int, rows: int, answer: Any) -> None:
        """Note what became of a batch."""
        whole = self._whole
        self.unanswered -= rows
        if isinstance(answer, RowsError):
            whole.errors.update((start + row, error) for row, error in answer.rows.items())
            for place, row in enumerate(answer.kept):
                piece = map_tree(lambda leaf, place=place: leaf[place : place + 1], answer.answers)
                whole.pieces[start + row, start + row + 1] = piece
            whole.waiting += rows - len(answer.rows) - len(answer.kept)  # not tried
        elif isinstance(answer, Exception):
            self.error = answer
        else:
            whole.pieces[start, start + rows] = answer

    def outcome(self) -> Any:
        """All answers as one, or the error in their place."""
        whole = self._whole
        if self.error is not None:
            return self.error
        try:
            if self.raised is not None:
                after = f" after {count(whole.rows, 'row')}" if whole.rows else ""
                message = (
                    f"the data of user {self.user!r} raised {type(self.raised).__name__}{after}: {self.raised}. "
                    f"Mend what reads them and map this user again; the answers so far are in .answers, and the "
                    f"numbers of their rows in .kept."
                )
                return self._failure(message, whole.errors, self.raised)
            if whole.errors:
                failure = whole.failure()
                if not isinstance(failure, RowsError) or not self.cut_short:
                    return failure
                return self._failure(f"{failure} Nothing more was read.", failure.rows, failure.__cause__)
            answer = whole.joined()
        except Exception as error:  # answers that can't be joined; whatever it is, the caller has to be told
            return error
        return np.empty(0) if answer is None else answer

    def _failure(self, message: str, rows: Mapping[int, Exception], cause: BaseException | None) -> RowsError:
        failure = RowsError(message, rows, self._whole.joined(), self._whole.kept)
        failure.__cause__ = cause
        return failure
