"""Replicas at work: one model on every device, a queue in front of them, and a thread that drives each."""

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent import futures
from contextlib import suppress
from numbers import Real
from typing import Any, Self

import numpy as np

from modelfleet import frameworks
from modelfleet.errors import ClosedError, FleetError, InputError, unknown
from modelfleet.replicas.driver import LOOK, Driver, Version
from modelfleet.replicas.models import PRECISIONS, Source
from modelfleet.replicas.queue import Queue
from modelfleet.replicas.requests import Batch, Request
from modelfleet.replicas.rows import rows_of
from modelfleet.replicas.stats import Health, Stats, Tally, health
from modelfleet.replicas.work import Order
from modelfleet.trees import map_tree
from modelfleet.workers import places


class Future(futures.Future[Any]):
    """The answer to come. `result()` waits for it in a thread, `await` in asyncio; `cancel()` works until it is
    there."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class Replicas:
    """One model on each device, answering many users at once.

    model: of torch, Keras, JAX or TensorFlow; anything with a `predict`, as scikit-learn's models; a function of
        one argument, the rows; or a factory: a function that needs no arguments and returns any of these. It is
        called in every worker, so that what it makes need not be sent.
    devices: "auto", or names: "cuda:0,cuda:1", "cpu:0,cpu:1", "ray" for all devices of a cluster. One device is
        used by this process; several have a process each.
    max_queue: so many requests may wait; `submit` refuses more with `QueueFullError`.
    batch_size: rows that go through the model together, at most.
    balance: "least-busy": whichever replica is free takes the next rows; "sticky": a user stays with a replica.
    isolation: "rows": rows of several users may share a batch, never an answer; "batch": every request goes
        through the model alone, whole if it has at most `batch_size` rows, else cut at multiples of that;
        "device": the same, and each user stays on one device.
    precision: "float32", or "bf16" and "fp16" for what may be computed so.
    timeout: seconds after which a replica that has not answered a batch is taken for hung, and started anew. In
        this process a hung thread can't be ended: it is left behind.
    start_timeout: seconds that a replica may take to load the model.
    batch_wait: seconds that a free replica waits for a batch to fill, from when its oldest row was submitted. A
        full batch goes at once. With isolation "batch" or "device" there is nothing to wait for.

    Leave the model's weights as they are while it is asked: who looks at them, and when, depends on the devices.

        with mf.Replicas(model, devices="cuda:0,cuda:1") as replicas:
            answer = replicas.submit("ada", x).result()
    """

    _span = 0.03  # seconds of work that a replica is given at once, in several batches where these are short

    def __init__(
        self,
        model: Any,
        *,
        devices: str | Sequence[str] = "auto",
        max_queue: int | None = 1024,
        batch_size: int = 32,
        balance: str = "least-busy",
        isolation: str = "rows",
        precision: str = "float32",
        timeout: float = 120.0,
        start_timeout: float = 300.0,
        batch_wait: float = 0.0,
    ) -> None:
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        _check_seconds("timeout", timeout, "a batch may take")
        _check_seconds("start_timeout", start_timeout, "a replica may take to start")
        source = Source.of(model)
        self._places = found = places.find_places(devices, source.framework)
        source = source.at(found, float(start_timeout))
        self._framework = source.framework
        self._precision, self._batch_size = precision, batch_size
        self._queue = Queue(
            [place.name for place in found],
            batch_size=batch_size,
            max_queue=max_queue,
            balance=balance,
            isolation=isolation,
            batch_wait=batch_wait,
        )
        source.check(precision, found)
        self._mixed = isolation == "rows"
        self._timeout, self._start_timeout = float(timeout), float(start_timeout)
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)  # rows to take, a new model, or the end
        self._alarm = threading.Condition(self._lock)  # a nearer deadline, or the end
        self._gap = threading.Condition(self._lock)  # room in the queue, or the end
        self._updating = threading.Lock()
        self._futures: dict[Request, Future] = {}
        self._tally = Tally([place.name for place in found])
        self._free = 0  # replicas that wait for rows
        self._closing = self._ended = False
        self._broken: dict[str, Exception] = {}
        self.failure: FleetError | None = None
        """Why nothing can be answered any more: no replica is left."""
        self._hungry: Callable[[], None] | None = None  # called when rows were taken: others may follow
        self._stalled: Callable[[], bool] | None = None  # says whether no rows are to be taken for now
        self._version = self._shared(source)
        self._coming: Version | None = None
        self._inherited = False  # of a process that this one was forked from
        self._drivers = [Driver(self, place, batch_size) for place in found]
        self._clock = threading.Thread(target=self._watch, name="modelfleet-deadlines", daemon=True)
        self._clock.start()
        for driver in self._drivers:
            driver.start()
        _open.add(self)

    def submit(
        self,
        user: Hashable,
        x: Any,
        *,
        deadline: float | None = None,
        priority: int = 0,
        block: bool = False,
        timeout: float | None = None,
    ) -> Future:
        """Ask for the answers to rows of a user's: a tree of arrays `(row, …)`. Gives a future at once.

        deadline: seconds from now after which the answer is of no use.
        priority: rows of higher priority are taken first; among those of one priority, users take turns.
        block: wait for room if the queue is full, at most `timeout` seconds (None: any time), instead of raising
            `QueueFullError` at once. That blocks the calling thread, an event loop too.
        """
        self._refuse_inherited()
        if deadline is not None and not isinstance(deadline, Real):
            raise InputError(f"deadline={deadline!r} of user {user!r}. Give seconds from now, or None.")
        if timeout is not None and not (block and isinstance(timeout, Real) and timeout >= 0):
            raise InputError(
                f"timeout={timeout!r} with block={block!r} of user {user!r}. Give the seconds that a submit with "
                f"block=True waits for room, or None."
            )
        data, rows = rows_of(x, user)
        # Copied: the caller may fill the same arrays with other rows before these are answered.
        data = map_tree(np.array, data)
        return self._submit(user, data, rows, deadline, priority, (timeout, block))

    def _submit(
        self,
        user: Hashable,
        data: Any,
        rows: int,
        deadline: float | None = None,
        priority: int = 0,
        room: tuple[float | None, bool] = (None, False),
    ) -> Future:
        """As `submit`, of rows that nobody will change. `room`: how long to wait for it, and whether to."""
        self._refuse_inherited()
        future = Future()
        with self._lock:
            now = time.monotonic()
            if room[1] and rows:
                self._gap.wait_for(
                    lambda: self._closing or self.failure is not None or not self._queue.full, room[0]
                )
            if self._closing:
                raise ClosedError(
                    f"user {user!r} came after the replicas were closed. Submit within the `with` block, or make "
                    f"new Replicas."
                )
            due = None if deadline is None else now + float(deadline)
            request = self._queue.submit(user, data, rows, now, due, priority)
            if request.status == "open":
                self._futures[request] = future
                self._news.notify_all()
                if deadline is not None:
                    self._alarm.notify()
        if request.status != "open":
            future.set_result(np.empty(0))  # of no rows: nobody can know their shape
        # Of neither the rows nor the replicas anything is kept by a future that somebody keeps.
        future.add_done_callback(_Cancelling(weakref.ref(self), weakref.ref(request)))
        return future

    def update(self, model: Any) -> None:
        """Give every replica a new model of the same framework: new weights, or another network.

        Returns when every replica that is up answers with it; rows that are submitted then are answered by the
        new model, and no batch by both; a request of several batches that is under way may have some by each.
        Until then the old one goes on, so both have to fit into the memory. If the new one can't be taken (another
        framework, or it can't be sent or loaded), the old one stays.
        """
        self._refuse_inherited()
        with self._updating:
            version = self._shared(self._fitting(Source.of(model).at(self._places, self._start_timeout)))
            try:
                self._loaded(version)
            except BaseException:
                with self._lock:
                    self._coming = None
                    self._news.notify_all()
                version.shared.close()
                raise
            with self._lock:
                old, self._version, self._coming = self._version, version, None
                self._mark_updated()
                self._news.notify_all()
                self._news.wait_for(
                    lambda: self._closing or all(d.version is version for d in self._drivers if d.live)
                )
                self._mark_updated()  # what was begun meanwhile, too
            old.shared.close()

    def _mark_updated(self) -> None:
        """Note of requests that are under way that they may be answered by two models."""
        for request in self._futures:
            request.updated |= request.begun is not None

    def _fitting(self, source: Source) -> Source:
        """A new model, if it is of the framework that the replicas have; of a factory its worker will tell."""
        name, other = self._framework.NAME, source.framework.NAME
        if None not in (name, other) and name != other:
            raise InputError(
                f"the new model is of {other}, and the replicas are of {name}. Give a model of {name}, or make "
                f"new Replicas. The old model stays."
            )
        source.check(self._precision, self._places)
        return source

    def _loaded(self, version: Version) -> None:
        """Wait until every replica that is up, and at least one, has a version beside the one that it uses."""

        def settled() -> bool:
            if self._closing or self.failure is not None or version.refused is not None:
                return True
            live = [driver for driver in self._drivers if driver.live]
            return bool(live) and all(driver.spare is version for driver in live)

        with self._lock:
            self._coming = version
            self._news.notify_all()
            self._news.wait_for(settled)
            if self._closing:
                raise ClosedError(
                    "the replicas were closed before they had the new model. Make new Replicas with it."
                )
            if self.failure is not None:
                raise self.failure
            if version.refused is not None:
                raise FleetError(
                    f"the new model could not be loaded, and the old one stays: {type(version.refused).__name__}: "
                    f"{version.refused}"
                ) from version.refused

    def _shared(self, source: Source) -> Version:
        """A model, sent to where the replicas find it."""
        name, settings = source.framework.NAME, frameworks.settings(source.framework.NAME)
        shared = source.share(self._places[0])
        options = self._precision, self._batch_size, settings, not self._mixed
        return Version({p.name: Order(name, shared, p.device, *options) for p in self._places}, shared)

    def _ahead(self) -> int:
        with self._lock:
            return self._queue.ahead

    def stats(self) -> Stats:
        """What was done so far, by replica and by user."""
        self._refuse_inherited()
        with self._lock:
            return self._tally.stats(self._queue.counts, self._broken)

    def check(self, timeout: float = 10.0) -> dict[str, Health]:
        """How each replica is: "ready", "busy", "starting", "silent" or "given up", with the reason; by replica.

        timeout: seconds to wait for a sign of life of those that have been silent for a while.

            if not any(replicas.check().values()):  # a `Health` is true if its replica takes rows
                ...
        """
        self._refuse_inherited()
        end = time.monotonic() + float(timeout)
        while True:
            with self._lock:
                if self._closing:
                    raise ClosedError("the replicas were closed. Make new ones.")
                found = {
                    driver.name: health(driver.state, driver.silent, self._broken.get(driver.name))
                    for driver in self._drivers
                }
            if time.monotonic() >= end or all(one.state != "silent" for one in found.values()):
                return found
            time.sleep(LOOK)

    def close(self, wait: bool = True) -> None:
        """Take no more requests, and end when those at hand are answered; without `wait`, cancel them.

        Without `wait` it takes about a second, whatever the replicas are at.
        """
        if self._inherited:
            return
        with self._lock:
            self._closing = True
            self._queue.hurry()
            self._gap.notify_all()
            self._news.notify_all()
        if threading.current_thread() in (*self._drivers, self._clock):  # in a future's callback
            threading.Thread(target=self.close, args=(wait,), name="modelfleet-close").start()
            return
        try:
            if not wait:
                self._cancel_all()
            for driver in self._drivers:
                driver.join()
        except BaseException:  # Ctrl-C while it waits
            self._cancel_all()
            raise
        with self._lock:
            self._ended = True
            self._alarm.notify()
        self._clock.join()
        self._version.shared.close()

    def _refuse_inherited(self) -> None:
        """Raise `ClosedError` in a forked child: it has neither the threads nor the workers."""
        if self._inherited:
            raise _inherited_error()

    def _inherit(self) -> None:
        """In a forked child: nobody answers here any more, and what was locked in the parent stays so."""
        self._inherited = True
        for future in list(self._futures.values()):
            future._condition = threading.Condition()
            if not future.done():  # without its callbacks: they are the parent's to call
                future._state, future._exception = "FINISHED", _inherited_error()

    def _cancel_all(self) -> None:
        with self._lock:
            left = list(self._futures.values())
        for future in left:
            future.cancel()
        with self._lock:
            self._news.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(wait=kind is None)

    # --- between the drivers and the callers ---------------------------------------------------------------------

    def _taken(self, name: str, most: int | None, several: int) -> Batch | None:
        """The next rows for a replica, if there are any for it now."""
        if self._stalled is not None and self._stalled():
            return None
        batch = self._queue.take(name, time.monotonic(), most, several)
        if batch is not None:
            self._gap.notify_all()
        return batch

    def _wake(self) -> None:
        """Have replicas look again whether they may take rows."""
        with self._lock:
            self._news.notify_all()

    def _take_ahead(self, name: str, most: int | None, several: int) -> Batch | None:
        """Rows for a replica that is still busy; none if another one is free to take them now."""
        with self._lock:
            batch = None if self._free else self._taken(name, most, several)
        if self._hungry is not None:
            self._hungry()
        return batch

    def _rows(self, batch: Batch) -> tuple[Batch, list[Any]] | None:
        """A batch without rows that nobody waits for, and the data of its slices; None if nothing is left."""
        with self._lock:
            rest = self._queue.trimmed(batch)
            return None if rest is None else (rest, [piece.request.data for piece in rest.slices])

    def _over(self) -> bool:
        """Whether nothing is left to do, and nothing will come."""
        return self._closing and not self._queue.counts.open

    def _report(self, report: Callable[[], list[Request] | None]) -> None:
        """Enter what became of a batch into the books, and tell those who were waiting for it."""
        with self._lock:
            ended = report() or []
            self._news.notify_all()  # rows may be back, or the last of them done
        self._tell(ended)

    def _tell(self, ended: Sequence[Request]) -> None:
        for request in ended:
            with self._lock:
                future = self._futures.pop(request, None)
                self._tally.ended(request)
            if future is None:
                continue
            with suppress(futures.InvalidStateError):  # it was cancelled at this moment
                _set(future, request)
            request.forget()
        if ended:
            with self._lock:
                self._news.notify_all()
                self._gap.notify_all()
            if self._hungry is not None:
                self._hungry()

    def _cancelled(self, request: Request) -> None:
        with self._lock:
            if self._queue.cancel(request):
                self._tally.ended(request)
            self._futures.pop(request, None)
            request.forget()
            self._news.notify_all()
            self._gap.notify_all()

    def _watch(self) -> None:
        """Fail requests when their deadline comes, also while every replica is busy."""
        while True:
            with self._lock:
                if self._ended:
                    return
                now = time.monotonic()
                expired = self._queue.expire(now)
                if not expired:
                    nearest = self._queue.next_deadline()
                    wait = None if nearest is None else min(max(0.0, nearest - now), threading.TIMEOUT_MAX)
                    self._alarm.wait(wait)
            self._tell(expired)

    def _give_up(self, name: str, error: Exception) -> None:
        """A replica can't be had. The others do its work; when there are none, nothing can be answered."""
        with self._lock:
            self._broken[name] = error
            reason = f"the replica on {name} is given up: {type(error).__name__}: {error}"
            if all(driver.name in self._broken for driver in self._drivers):
                self.failure = failure = FleetError(f"no replica is left; {reason}")
                failure.__cause__ = error
                ended = self._queue.close(failure)
            else:
                failure = FleetError(reason)
                failure.__cause__ = error
                ended = self._queue.given_up(name, failure)
            self._news.notify_all()
            self._gap.notify_all()
        self._tell(ended)


def _set(future: Future, request: Request) -> None:
    """Give a future the outcome of its request."""
    if request.error is not None:
        future.set_exception(request.error)
        return
    try:
        answer = request.joined()
    except Exception as error:  # memory, say: whoever waits is told, whatever it is
        future.set_exception(error)
    else:
        future.set_result(answer)


class _Cancelling:
    """Told when a future is done: a request that was cancelled is not computed."""

    def __init__(self, replicas: "weakref.ref[Replicas]", request: "weakref.ref[Request]") -> None:
        self._replicas, self._request = replicas, request

    def __call__(self, future: futures.Future[Any]) -> None:
        replicas, request = self._replicas(), self._request()
        if replicas is None or request is None or replicas._inherited:
            return
        if future.cancelled():
            replicas._cancelled(request)


_open: "weakref.WeakSet[Replicas]" = weakref.WeakSet()


def _inherited_error() -> ClosedError:
    return ClosedError(
        "these replicas belong to the process that this one was forked from: here nobody would answer. Make new "
        "Replicas in this process, or use them in the one that made them."
    )


def _inherit_all() -> None:
    for replicas in list(_open):
        replicas._inherit()
    _open.clear()


os.register_at_fork(after_in_child=_inherit_all)


@atexit.register
def _close_all() -> None:
    """At the end of the program, end what nobody has closed: its workers and its shared memory."""
    for replicas in list(_open):
        replicas.close(wait=False)


def _check_seconds(what: str, value: object, which: str) -> None:
    if not isinstance(value, Real) or not float(value) > 0:
        raise InputError(f"{what}={value!r}. Give the seconds that {which}, more than 0.")
