"""A thread for each replica: it feeds the replica from the queue, and starts it anew when it is lost."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from modelfleet.errors import FleetError
from modelfleet.joining import joined
from modelfleet.replicas.answering import Reply
from modelfleet.replicas.requests import Batch, Request
from modelfleet.replicas.rows import by_form, parted, taken
from modelfleet.replicas.work import Load, Order, Switch, serve
from modelfleet.words import count
from modelfleet.workers import CannotSendError, NoRoomError, Place, SharedValue, Worker, WorkerDiedError

if TYPE_CHECKING:
    from modelfleet.replicas.pool import Replicas

STARTS = 3  # in vain, one after the other, before a replica is given up
MORE_STARTS = 6  # of one that has been there before
FIRST_PAUSE = 0.5  # seconds before a second start in vain is followed by a third; twice as long each time
SHORT_LIFE = 5.0  # seconds: a replica that was lost sooner than this after its start is not started at once
MOST_AT_ONCE = 8  # batches
LOOK = 0.2  # seconds between two looks at a worker, and at whether all is over
FAREWELL = 1.0  # seconds that a worker has to end its task; who does not is ended
SILENCE = 10.0  # seconds without a sign of life after which a worker that has nothing to do is taken for frozen
BUSY_SILENCE = 120.0  # the same of one that computes or loads: some code holds everything up
LOAD_DEATHS = 3  # of workers that are loading a new model, before it is refused


@dataclass(eq=False)
class Version:
    """A model for all replicas: the one they have, or one that is to take its place."""

    orders: dict[str, Order]
    """By replica."""
    shared: SharedValue
    refused: Exception | None = None
    """Why it can't be had."""
    deaths: int = field(default=0)
    """Of workers that were loading it."""


class Waited:
    """Counts seconds of waiting. Time in which this whole program was stopped, by Ctrl-Z say, does not count."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def seconds(self) -> float:
        """How many so far; to be called every `LOOK` seconds."""
        now = time.monotonic()
        self._seconds += min(now - self._last, 5 * LOOK)
        self._last = now
        return self._seconds


class Room:
    """How many rows a replica is given at once where memory was short: half of what was too much.

    Whoever took the memory may give it back: after a while twice as many are tried again.
    """

    def __init__(self, most: int) -> None:
        self.most: int | None = None
        self._limit = most
        self._fine, self._patience = 0, 8  # batches

    def short(self, rows: int) -> None:
        """There was no memory for so many rows."""
        self.most = max(1, rows // 2)
        self._fine, self._patience = 0, min(2 * self._patience, 1024)

    def fine(self, rows: int) -> None:
        """There was memory for so many."""
        if self.most is None or rows < self.most:
            return
        self._fine += 1
        if self._fine >= self._patience:
            self._fine, self.most = 0, 2 * self.most
            if self.most >= self._limit:
                self.most = None


class Driver(threading.Thread):
    """Feeds one replica, and starts it anew when it is lost."""

    def __init__(self, pool: "Replicas", place: Place, batch_size: int) -> None:
        super().__init__(name=place.name, daemon=True)
        self._pool, self._place, self._batch_size = pool, place, batch_size
        self._room = Room(MOST_AT_ONCE * batch_size)
        self._several = 1  # batches that it is given at once
        self._begun = False  # whether it ever had the model on its device
        self._in_vain = 0  # starts since it last had
        self._received = 0  # answers that its worker has dealt with
        self.state = "starting"
        """ "starting", "ready" or "busy"."""
        self.live = False
        """Whether it has the model, and takes rows."""
        self.silent = 0.0
        """Seconds since anything was heard of its worker."""
        self.version: Version | None = None
        """The model that it answers with."""
        self.spare: Version | None = None
        """The model that it has loaded beside that."""

    def run(self) -> None:
        """Until it is all over."""
        pool = self._pool
        while not self._over():
            worker: Worker | None = None
            begun: float | None = None
            self.state, self.silent = "starting", 0.0
            version = pool._version
            try:
                worker = self._place.hire()
                if not self._begin(worker, version.orders[self.name]):
                    worker.close()
                    return
                begun = time.monotonic()
                self._begun, self._in_vain, self._received = True, 0, 0
                self.version, self.spare = version, None
                self._keep_up(worker)
                with pool._lock:
                    self.live = True
                    pool._queue.back(self.name)
                    pool._news.notify_all()
                self._serve(worker)
                self._part(worker)
                return
            except Exception as error:  # it died, or whatever a model's set-up raises
                if worker is not None:
                    worker.close()
                with pool._lock:
                    self.live, self.state, self.version = False, "starting", None
                    pool._queue.lost(self.name)
                    pool._tally.lost(self.name)
                    pool._news.notify_all()
                if begun is not None:
                    self._pause(0 if time.monotonic() - begun > SHORT_LIFE else FIRST_PAUSE)
                elif pool._version is version:  # else it was told to start with a model that is there no more
                    self._in_vain += 1
                    if self._hopeless(error):
                        pool._give_up(self.name, error)
                        return
                    self._pause(0 if self._in_vain < 2 else FIRST_PAUSE * 2 ** (self._in_vain - 2))

    def _hopeless(self, error: Exception) -> bool:
        """Whether to start it once more would be of no use."""
        if self._begun:  # what is wrong now (memory that another program has taken, say) may pass
            return self._in_vain >= MORE_STARTS
        return self._in_vain >= STARTS or not isinstance(error, WorkerDiedError)

    def _pause(self, seconds: float) -> None:
        """Wait before yet another start; not when all is over."""
        with self._pool._lock:
            self._pool._news.wait_for(self._pool._over, seconds)

    def _over(self) -> bool:
        with self._pool._lock:
            return self._pool._over()

    def _begin(self, worker: Worker, order: Order) -> bool:
        """Have the model on the device; False if it is all over before that."""
        worker.start(serve, order, "the model")
        waited = Waited()
        while not worker.poll(LOOK):
            if self._over():
                return False
            self.silent = worker.silent_seconds
            if self.silent > BUSY_SILENCE:
                raise WorkerDiedError(f"it gave no sign of life for {BUSY_SILENCE:g} s while it started")
            # On a cluster it may take any time until there is room for it.
            if not self.name.startswith("ray") and waited.seconds() > self._pool._start_timeout:
                raise WorkerDiedError(
                    f"the model was not loaded {self._pool._start_timeout:g} s after its worker was started. Give "
                    f"a larger start_timeout if it takes that long."
                )
        worker.receive()
        return True

    def _part(self, worker: Worker) -> None:
        """Have a worker end its task, to be kept for others; end it if it does not do so at once."""
        worker.answer(None)
        if worker.poll(FAREWELL):
            worker.receive()
            self._place.release(worker)
        else:
            worker.close()

    # --- batches ---------------------------------------------------------------------------------------------

    def _serve(self, worker: Worker) -> None:
        """Batch after batch, until it is all over or the worker is lost.

        The worker is given the next batch while it computes one, so that it never waits for this thread.
        """
        pool = self._pool
        ready: deque[Batch] = deque()
        asked: deque[Batch] = deque()
        try:
            while True:
                if not asked:
                    self._keep_up(worker)
                    if not ready:
                        self.state = "ready"
                        batch = self._next(worker)
                        if batch is None:
                            if self._over():
                                return
                            continue  # there is a new model
                        ready.extend(self._of_one_form(batch))
                self.state = "busy"
                while len(asked) <= worker.max_ahead and not (asked and self._behind()):
                    if asked and not ready:
                        batch = pool._take_ahead(self.name, self._room.most, self._several)
                        ready.extend([] if batch is None else self._of_one_form(batch))
                    if not ready:
                        break
                    self._ask(worker, ready, asked)
                if asked:
                    reply = self._reply(worker, pool._timeout)
                    self._heed(asked.popleft(), reply)
        except Exception as error:  # it died, or can't go on for whatever reason: no batch may be lost by that
            self._lost(worker, [*asked], [*ready], error)
            if isinstance(error, WorkerDiedError):
                raise
            raise WorkerDiedError(f"{type(error).__name__}: {error}") from error

    def _lost(self, worker: Worker, asked: list[Batch], ready: list[Batch], error: Exception) -> None:
        """Report batches that have no answer. Only what the worker had begun with can be why it died."""
        pool = self._pool
        reason = str(error) if isinstance(error, WorkerDiedError) else f"{type(error).__name__}: {error}"
        begun = asked[: max(0, worker.answers_begun - self._received)]
        for batch in reversed(asked[len(begun) :] + ready):  # the last first, as each comes before all else
            pool._report(partial(pool._queue.returned, batch))
        for batch in begun:
            if isinstance(error, CannotSendError):  # its answer
                self._not_sent(batch, error)
            else:
                pool._report(partial(pool._queue.died, batch, reason))

    def _next(self, worker: Worker) -> Batch | None:
        """The next rows; waits for them. None if it is all over, or if there is a new model."""
        pool, looked = self._pool, time.monotonic()
        with pool._lock:
            pool._free += 1
        try:
            while True:
                with pool._lock:
                    while time.monotonic() - looked < LOOK:
                        if pool._over() or self._behind():
                            return None
                        batch = pool._taken(self.name, self._room.most, self._several)
                        if batch is not None:
                            return batch
                        due = pool._queue.due(self.name)
                        pool._news.wait(LOOK if due is None else min(LOOK, max(0.001, due - time.monotonic())))
                self._look(worker)
                looked = time.monotonic()
        finally:
            with pool._lock:
                pool._free -= 1
            if pool._hungry is not None:
                pool._hungry()

    def _look(self, worker: Worker) -> None:
        """Notice when a worker that has nothing to do dies or freezes."""
        if worker.poll():
            worker.receive()  # tells how it died
            raise WorkerDiedError("it spoke without being asked")
        self.silent = worker.silent_seconds
        if self.silent > SILENCE:
            raise WorkerDiedError(f"it gave no sign of life for {SILENCE:g} s while it had nothing to do")

    def _ask(self, worker: Worker, ready: deque[Batch], asked: deque[Batch]) -> None:
        """Send the next batch."""
        found = self._pool._rows(ready[0])
        if found is None:  # nobody waits for it any more
            ready.popleft()
            return
        batch, data = found
        ready[0] = batch
        try:
            rows = joined([taken(piece, one) for piece, one in zip(batch.slices, data, strict=True)])
            worker.answer(rows)
        except (CannotSendError, MemoryError) as error:
            ready.popleft()
            self._not_sent(batch, error)
        else:
            asked.append(ready.popleft())

    def _not_sent(self, batch: Batch, error: Exception) -> None:
        """Rows, or their answers, could not be sent. For want of memory: they go in smaller parts, if they may."""
        queue = self._pool._queue
        short = isinstance(error, NoRoomError | MemoryError)
        if short and batch.rows > 1 and self._pool._mixed:
            self._room.short(batch.rows)
            self._pool._report(partial(queue.returned, batch))
            return
        if short and not self._pool._mixed:
            told = FleetError(
                f"a batch of {count(batch.rows, 'row')} of user {batch.slices[0].request.user!r} can't be sent in "
                f"parts, as its rows may depend on each other (isolation), and not as a whole: {error}"
            )
            told.__cause__, error = error, told
        self._pool._report(partial(queue.failed, batch, error))

    def _of_one_form(self, batch: Batch) -> list[Batch]:
        """A batch; or several, where the rows are of several forms and can't be one array."""
        groups = by_form(batch)
        if len(groups) == 1:
            return [batch]
        with self._pool._lock:
            return self._pool._queue.parted(batch, groups)

    def _reply(self, worker: Worker, limit: float) -> Reply:
        """The worker's reply to the first thing that it was asked, within `limit` seconds."""
        waited = Waited()
        while not worker.poll(LOOK):
            if self._over():
                raise WorkerDiedError("nobody waits for its answer any more")
            self.silent = worker.silent_seconds
            silence = BUSY_SILENCE if worker.answers_begun > self._received else SILENCE
            if self.silent > silence:
                raise WorkerDiedError(f"it gave no sign of life for {silence:g} s")
            if waited.seconds() > limit:
                raise WorkerDiedError(f"it had not answered after {limit:g} s")
        _, reply = worker.receive()
        self._received += 1
        return reply

    def _heed(self, batch: Batch, reply: Reply) -> None:
        pool, queue = self._pool, self._pool._queue
        try:
            answers = parted(reply.parts, batch)
        except Exception as error:  # for want of memory, say: no batch may be lost by that
            self._not_sent(batch, error)
            return
        if reply.short:
            self._room.short(reply.short)
        elif reply.rows == batch.rows:
            self._room.fine(batch.rows)
            self._pace(reply.seconds / batch.rows * self._batch_size)

        def sorted_out() -> list[Request]:
            if reply.rows == batch.rows:
                queue.noted(self.name, batch.rows, reply.seconds)
            pool._tally.answered(self.name, reply.rows, reply.seconds)
            now = time.monotonic()
            return queue.sorted_out(batch, answers, reply.errors, reply.left, now, first=bool(reply.short))

        pool._report(sorted_out)

    def _pace(self, seconds: float) -> None:
        """Note what a batch has taken: of short ones, several are given at once, as each costs time here, too."""
        fitting = min(MOST_AT_ONCE, int(self._pool._span / max(seconds, 1e-6)))
        self._several = max(1, min(fitting, 2 * self._several))

    # --- new models ------------------------------------------------------------------------------------------

    def _behind(self) -> bool:
        """Whether `_keep_up` has something to do."""
        coming = self._pool._coming
        if self.version is not self._pool._version or (self.spare is not None and self.spare is not coming):
            return True
        return coming is not None and coming is not self.spare and coming.refused is None

    def _keep_up(self, worker: Worker) -> None:
        """Have a new model loaded, made the one that answers, or forgotten, as the pool wants it."""
        pool = self._pool
        while self._behind() and not self._over():
            now, coming = pool._version, pool._coming
            if self.version is not now:
                if self.spare is not now:
                    error = self._told(worker, Load(now.orders[self.name]))
                    if error is not None:
                        raise error
                self._told(worker, Switch())
                self.version, self.spare = now, None
            elif coming is not None and coming is not self.spare:
                self._load(worker, coming)
            else:
                self._told(worker, Switch(forget=True))
                self.spare = None
            with pool._lock:
                pool._news.notify_all()

    def _load(self, worker: Worker, coming: Version) -> None:
        try:
            error = self._told(worker, Load(coming.orders[self.name]))
        except CannotSendError as unsent:
            error = unsent
        except Exception as died:
            coming.deaths += 1
            if coming.deaths >= LOAD_DEATHS:
                coming.refused = died
            raise
        if error is None:
            self.spare = coming
        else:
            coming.refused = error

    def _told(self, worker: Worker, message: Any) -> Exception | None:
        """Tell the worker something about models; gives its trouble with it."""
        worker.answer(message)
        return self._reply(worker, self._pool._start_timeout).error
