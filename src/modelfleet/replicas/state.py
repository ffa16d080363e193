"""State that `Replicas` and its driver threads share, under one lock."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from modelfleet.errors import ClosedError, FleetError
from modelfleet.replicas.queue import Queue
from modelfleet.replicas.replica_task import ReplicaSpec
from modelfleet.replicas.requests import Request, RowBatch
from modelfleet.replicas.stats import Stats, Tally
from modelfleet.types import Tree
from modelfleet.workers import SharedValue
from modelfleet.workers.supervisor import Policy, RestartBudget

LOAD_POLICY = Policy(max_deaths=3)  # of workers that load a new model, before that model is refused


class Future(futures.Future[Tree]):
    """Stands for an answer to come. `result()` waits for it in a thread, `await` in asyncio.

    `cancel()` works until the answer is there.
    """

    def __await__(self) -> Generator[object, None, Tree]:
        return asyncio.wrap_future(self).__await__()


@dataclass(eq=False)
class ModelVersion:
    """Holds a model for all replicas: the one they have, or one that is to replace it."""

    specs: Mapping[str, ReplicaSpec]
    """By replica."""
    value: SharedValue
    budget: RestartBudget
    """Counts the workers that died while they loaded this model."""
    refused: Exception | None = None
    """Error of the model, if it can't be used."""


class PoolState:
    """Holds the queue, the futures and the models of a pool of replicas, and whether it is closed.

    `lock` guards all of it. Methods take the lock themselves, except for those that say otherwise.
    """

    def __init__(self, replicas: Sequence[str], queue: Queue, version: ModelVersion) -> None:
        self.queue = queue
        self.tally = Tally(replicas)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # rows to take, a new model, or the end
        self.room = threading.Condition(self.lock)  # room in the queue, or the end
        self._deadlines_changed = threading.Condition(self.lock)  # a nearer deadline, or the end
        self.futures: dict[Request, Future] = {}
        self.idle_replicas = 0
        """Replicas that wait for rows."""
        self.closing = False
        self.ended = False
        self.given_up: dict[str, Exception] = {}
        """Why replicas were given up."""
        self.failure: FleetError | None = None
        """Why nothing can be answered any more: no replica is left."""
        self.on_rows_taken: Callable[[], None] | None = None
        """Called after rows were taken: more may be submitted."""
        self.is_paused: Callable[[], bool] | None = None
        """Returns True while no rows are to be taken."""
        self.version = version
        self.next_version: ModelVersion | None = None
        self.inherited = False
        """True in a process that was forked from the owner."""
        self._replicas = list(replicas)

    # --- for callers ---------------------------------------------------------------------------------------------

    def submit(
        self,
        user: Hashable,
        data: Tree,
        rows: int,
        deadline: float | None = None,
        priority: int = 0,
        *,
        block: bool = False,
        timeout: float | None = None,
    ) -> Future:
        """Queue rows, which the caller must not change any more. See `Replicas.submit`."""
        self.refuse_inherited()
        future = Future()
        with self.lock:
            now = time.monotonic()
            if block and rows:
                self.room.wait_for(
                    lambda: self.closing or self.failure is not None or not self.queue.full, timeout
                )
            if self.closing:
                raise ClosedError(
                    f"user {user!r} submitted rows after the replicas were closed. Submit within the `with` "
                    f"block, or make new Replicas."
                )
            due = None if deadline is None else now + float(deadline)
            request = self.queue.submit(user, data, rows, now, due, priority)
            if request.status == "open":
                self.futures[request] = future
                self.changed.notify_all()
                if deadline is not None:
                    self._deadlines_changed.notify()
        if request.status != "open":
            future.set_result(np.empty(0))  # of no rows: their shape is unknown
        # Weak references: a future that is kept must keep neither the rows nor the replicas.
        future.add_done_callback(_CancelRequest(weakref.ref(self), weakref.ref(request)))
        return future

    def stats(self) -> Stats:
        """Return the numbers so far."""
        with self.lock:
            return self.tally.stats(self.queue.counts, self.given_up)

    def rows_ahead(self) -> int:
        """Return the number of waiting rows; see `Queue.rows_ahead`."""
        with self.lock:
            return self.queue.rows_ahead

    def wake(self) -> None:
        """Have the replicas check again whether they may take rows."""
        with self.lock:
            self.changed.notify_all()

    def mark_updated(self) -> None:
        """Note that requests that are under way may be answered by two models. Needs the lock."""
        for request in self.futures:
            request.updated |= request.first_taken is not None

    def start_closing(self) -> None:
        """Refuse new requests, and let no batch wait to be filled."""
        with self.lock:
            self.closing = True
            self.queue.stop_batch_wait()
            self.room.notify_all()
            self.changed.notify_all()

    def end(self) -> None:
        """Let the deadline thread end."""
        with self.lock:
            self.ended = True
            self._deadlines_changed.notify()

    def cancel_all(self) -> None:
        """Cancel all open requests."""
        with self.lock:
            left = list(self.futures.values())
        for future in left:
            future.cancel()
        self.wake()

    def refuse_inherited(self) -> None:
        """Raise ClosedError in a forked child: it has neither the threads nor the workers."""
        if self.inherited:
            raise _inherited_error()

    def inherit(self) -> None:
        """End all futures in a forked child: nothing answers them there, and locks of the parent stay locked."""
        self.inherited = True
        for future in list(self.futures.values()):
            future._condition = threading.Condition()
            if not future.done():  # without callbacks: these are the parent's to call
                future._state, future._exception = "FINISHED", _inherited_error()

    def watch_deadlines(self) -> None:
        """Fail requests when their deadline comes, also while every replica is busy. Runs in a thread."""
        while True:
            with self.lock:
                if self.ended:
                    return
                now = time.monotonic()
                expired = self.queue.expire(now)
                if not expired:
                    nearest = self.queue.next_deadline()
                    wait = None if nearest is None else min(max(0.0, nearest - now), threading.TIMEOUT_MAX)
                    self._deadlines_changed.wait(wait)
            self._resolve(expired)

    # --- for drivers ---------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Return True if nothing is left to do, and nothing will come. Needs the lock."""
        return self.closing and not self.queue.counts.open

    def take(self, replica: str, max_rows: int | None, batches: int) -> RowBatch | None:
        """Return the next rows for a replica, if there are any. Needs the lock."""
        if self.is_paused is not None and self.is_paused():
            return None
        batch = self.queue.take(replica, time.monotonic(), max_rows, batches)
        if batch is not None:
            self.room.notify_all()
        return batch

    def take_ahead(self, replica: str, max_rows: int | None, batches: int) -> RowBatch | None:
        """Return rows for a replica that is still busy; None if another one is free to take them now."""
        with self.lock:
            batch = None if self.idle_replicas else self.take(replica, max_rows, batches)
        self.rows_taken()
        return batch

    def rows_taken(self) -> None:
        """Let more rows be submitted, now that some were taken."""
        if self.on_rows_taken is not None:
            self.on_rows_taken()

    def open_rows(self, batch: RowBatch) -> tuple[RowBatch, list[Tree]] | None:
        """Return a batch without the rows of closed requests, and its spans' data; None if no row is left."""
        with self.lock:
            rest = self.queue.without_closed(batch)
            return None if rest is None else (rest, [span.request.data for span in rest.spans])

    def replica_started(self, replica: str) -> None:
        """Let a replica take rows. Needs the lock."""
        self.queue.restore_replica(replica)
        self.changed.notify_all()

    def replica_lost(self, replica: str) -> None:
        """Give a replica no rows until it has started again. Needs the lock."""
        self.queue.lose_replica(replica)
        self.tally.count_restart(replica)
        self.changed.notify_all()

    def report(self, report: Callable[[], list[Request] | None]) -> None:
        """Record the outcome of a batch, and resolve the futures of the requests that ended by it."""
        with self.lock:
            ended = report() or []
            self.changed.notify_all()  # rows may be back, or the last of them done
        self._resolve(ended)

    def give_up(self, replica: str, error: Exception) -> None:
        """Give up a replica. The others do its work; if there are none, every request fails."""
        with self.lock:
            self.given_up[replica] = error
            reason = f"the replica on {replica} is given up: {type(error).__name__}: {error}"
            if all(name in self.given_up for name in self._replicas):
                self.failure = failure = FleetError(f"no replica is left; {reason}")
                failure.__cause__ = error
                ended = self.queue.close(failure)
            else:
                failure = FleetError(reason)
                failure.__cause__ = error
                ended = self.queue.give_up_replica(replica, failure)
            self.changed.notify_all()
            self.room.notify_all()
        self._resolve(ended)

    # --- futures -------------------------------------------------------------------------------------------------

    def _resolve(self, ended: Sequence[Request]) -> None:
        """Give the futures of ended requests their outcome."""
        for request in ended:
            with self.lock:
                future = self.futures.pop(request, None)
                self.tally.count_request(request)
            if future is None:
                continue
            with suppress(futures.InvalidStateError):  # it was cancelled at this moment
                _set_outcome(future, request)
            request.forget()
        if ended:
            with self.lock:
                self.changed.notify_all()
                self.room.notify_all()
            self.rows_taken()

    def cancel(self, request: Request) -> None:
        """Drop a request whose future was cancelled."""
        with self.lock:
            if self.queue.cancel(request):
                self.tally.count_request(request)
            self.futures.pop(request, None)
            request.forget()
            self.changed.notify_all()
            self.room.notify_all()


def _set_outcome(future: Future, request: Request) -> None:
    if request.error is not None:
        future.set_exception(request.error)
        return
    try:
        answer = request.joined()
    except Exception as error:  # such as MemoryError: the future needs an outcome in any case
        future.set_exception(error)
    else:
        future.set_result(answer)


class _CancelRequest:
    """Cancels the request of a future that was cancelled, so that it is not computed."""

    def __init__(self, state: "weakref.ref[PoolState]", request: "weakref.ref[Request]") -> None:
        self._state, self._request = state, request

    def __call__(self, future: futures.Future[Tree]) -> None:
        state, request = self._state(), self._request()
        if state is None or request is None or state.inherited:
            return
        if future.cancelled():
            state.cancel(request)


def _inherited_error() -> ClosedError:
    return ClosedError(
        "these replicas belong to the process that this one was forked from, and can't answer here. Make new "
        "Replicas in this process, or use them in the process that made them."
    )
