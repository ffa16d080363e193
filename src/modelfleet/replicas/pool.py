"""Replicas at work: a thread for each feeds it from the queue, tells the callers, and mends what breaks."""

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any, Self
from weakref import WeakSet

import numpy as np

from modelfleet import frameworks
from modelfleet.errors import ClosedError, FleetError, InputError, unknown
from modelfleet.replicas.models import PRECISIONS, Source
from modelfleet.replicas.queue import Queue
from modelfleet.replicas.requests import Batch, Request
from modelfleet.replicas.rows import by_form, joined, parted, rows_of, taken
from modelfleet.replicas.stats import Stats, Tally
from modelfleet.replicas.work import Order, Reply, serve
from modelfleet.trees import map_tree
from modelfleet.workers import CannotSendError, Place, Worker, WorkerDiedError, places

STARTS = 3  # in vain, one after the other, before a replica is given up
MORE_STARTS = 6  # of one that has been there before
FIRST_PAUSE = 0.5  # seconds before a second start in vain is followed by a third; twice as long each time
MOST_AT_ONCE = 8  # batches
LOOK = 0.2  # seconds between two looks at whether all is over, where nothing would tell


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
    isolation: "rows": rows of several users may share a batch, never an answer; "batch": not even a batch;
        "device": nor that, and each user stays on one device.
    precision: "float32", or "bf16" and "fp16" for what may be computed so.
    timeout: seconds after which a replica that has not answered a batch is taken for hung, and started anew. In
        this process a hung thread can't be ended: it is left behind.

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
    ) -> None:
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        if not isinstance(timeout, Real) or not timeout > 0:
            raise InputError(f"timeout={timeout!r}. Give the seconds that a batch may take, more than 0.")
        source = Source.of(model)
        found = places.find(devices, source.framework)
        source = source.at(found)
        self._framework = framework = source.framework
        self._queue = Queue(
            [place.name for place in found],
            batch_size=batch_size,
            max_queue=max_queue,
            balance=balance,
            isolation=isolation,
        )
        source.check(precision, found)
        self._timeout = float(timeout)
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)  # rows to take, or the end
        self._alarm = threading.Condition(self._lock)  # a nearer deadline, or the end
        self._futures: dict[Request, Future] = {}
        self._tally = Tally([place.name for place in found])
        self._free = 0  # replicas that wait for rows
        self._closing = self._ended = False
        self._broken: dict[str, Exception] = {}
        self.failure: FleetError | None = None
        """Why nothing can be answered any more: no replica is left."""
        self._hungry: Callable[[], None] | None = None  # called when rows were taken: others may follow
        self._shared = source.share(found[0])
        settings = frameworks.settings(framework.NAME)
        orders = [
            Order(framework.NAME, self._shared, place.device, precision, batch_size, settings) for place in found
        ]
        self._drivers = [_Driver(self, place, order) for place, order in zip(found, orders, strict=True)]
        self._clock = threading.Thread(target=self._watch, name="modelfleet-deadlines", daemon=True)
        self._clock.start()
        for driver in self._drivers:
            driver.start()
        _open.add(self)

    def submit(self, user: Hashable, x: Any, *, deadline: float | None = None) -> Future:
        """Ask for the answers to rows of a user's: a tree of arrays `(row, …)`. Gives a future at once.

        deadline: seconds from now after which the answer is of no use.
        """
        if deadline is not None and not isinstance(deadline, Real):
            raise InputError(f"deadline={deadline!r} of user {user!r}. Give seconds from now, or None.")
        data, rows = rows_of(x, user)
        # Copied: the caller may fill the same arrays with other rows before these are answered.
        return self._submit(user, map_tree(np.array, data), rows, deadline)

    def _submit(self, user: Hashable, data: Any, rows: int, deadline: float | None = None) -> Future:
        """As `submit`, of rows that nobody will change."""
        future = Future()
        with self._lock:
            if self._closing:
                raise ClosedError(
                    f"user {user!r} came after the replicas were closed. Submit within the `with` block, or make "
                    f"new Replicas."
                )
            now = time.monotonic()
            due = None if deadline is None else now + float(deadline)
            request = self._queue.submit(user, data, rows, now, due)
            if request.status == "open":
                self._futures[request] = future
                self._news.notify_all()
                if deadline is not None:
                    self._alarm.notify()
        if request.status != "open":
            future.set_result(np.empty(0))  # of no rows: nobody can know their shape
        future.add_done_callback(lambda done: self._cancelled(request) if done.cancelled() else None)
        return future

    @property
    def waiting_rows(self) -> int:
        """How many rows wait for a replica."""
        return self._queue.counts.waiting_rows

    def stats(self) -> Stats:
        """What was done so far, by replica and by user."""
        with self._lock:
            return self._tally.stats(self._queue.counts, self._broken)

    def close(self, wait: bool = True) -> None:
        """Take no more requests, and end when those at hand are answered; without `wait`, cancel them."""
        with self._lock:
            self._closing = True
            left = [] if wait else list(self._futures.values())
        for future in left:
            future.cancel()
        with self._lock:
            self._news.notify_all()
        for driver in self._drivers:
            driver.join()
        with self._lock:
            self._ended = True
            self._alarm.notify()
        self._clock.join()
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(wait=kind is None)

    # --- between the drivers and the callers ---------------------------------------------------------------------

    def _take(self, name: str, most: int | None, several: int) -> Batch | None:
        """The next rows for a replica; waits for them. None: it is all over."""
        batch = self._awaited(name, most, several)
        if self._hungry is not None:
            self._hungry()
        return batch

    def _awaited(self, name: str, most: int | None, several: int) -> Batch | None:
        with self._lock:
            self._free += 1
            try:
                while (batch := self._queue.take(name, time.monotonic(), most, several)) is None:
                    if self._over():
                        return None
                    self._news.wait()
                return batch
            finally:
                self._free -= 1

    def _take_ahead(self, name: str, most: int | None, several: int) -> Batch | None:
        """Rows for a replica that is still busy; none if another one is free to take them now."""
        with self._lock:
            batch = None if self._free else self._queue.take(name, time.monotonic(), most, several)
        if self._hungry is not None:
            self._hungry()
        return batch

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
                if request.error is not None:
                    future.set_exception(request.error)
                    continue
                try:
                    answer = request.joined()
                except Exception as error:  # memory, say: whoever waits is told, whatever it is
                    future.set_exception(error)
                else:
                    future.set_result(answer)
        if ended:
            with self._lock:
                self._news.notify_all()
            if self._hungry is not None:
                self._hungry()

    def _cancelled(self, request: Request) -> None:
        with self._lock:
            if self._queue.cancel(request):
                self._tally.ended(request)
            self._futures.pop(request, None)
            self._news.notify_all()

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
        self._tell(ended)


_open: WeakSet[Replicas] = WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the program, end what nobody has closed: its workers and its shared memory."""
    for replicas in list(_open):
        replicas.close(wait=False)


class _Driver(threading.Thread):
    """Feeds one replica, and starts it anew when it is lost."""

    def __init__(self, pool: Replicas, place: Place, order: Order) -> None:
        super().__init__(name=place.name, daemon=True)
        self._pool, self._place, self._order = pool, place, order
        self._most: int | None = None  # rows that its memory is known to be enough for
        self._several = 1  # batches that it is given at once
        self._begun = False  # whether it ever had the model on its device
        self._in_vain = 0  # starts since it last had

    def run(self) -> None:
        """Until it is all over."""
        pool = self._pool
        while not self._over():
            worker: Worker | None = None
            try:
                worker = self._place.hire()
                if not self._begin(worker):
                    worker.close()
                    return
                self._begun, self._in_vain = True, 0
                with pool._lock:
                    pool._queue.back(self.name)
                    pool._news.notify_all()
                self._serve(worker)
                worker.answer(None)
                worker.receive()
                self._place.release(worker)
                return
            except Exception as error:  # it died, or whatever a model's set-up raises
                if worker is not None:
                    worker.close()
                with pool._lock:
                    pool._queue.lost(self.name)
                    pool._tally.lost(self.name)
                    pool._news.notify_all()
                self._in_vain += 1
                if self._hopeless(error):
                    pool._give_up(self.name, error)
                    return
                self._pause()

    def _hopeless(self, error: Exception) -> bool:
        """Whether to start it once more would be of no use."""
        if self._begun:  # what is wrong now (memory that another program has taken, say) may pass
            return self._in_vain >= MORE_STARTS
        return self._in_vain >= STARTS or not isinstance(error, WorkerDiedError)

    def _pause(self) -> None:
        """Wait before yet another start, the longer the more were in vain; not when all is over."""
        if self._in_vain < 2:
            return
        with self._pool._lock:
            self._pool._news.wait_for(self._pool._over, FIRST_PAUSE * 2 ** (self._in_vain - 2))

    def _over(self) -> bool:
        with self._pool._lock:
            return self._pool._over()

    def _begin(self, worker: Worker) -> bool:
        """Have the model on the device; False if it is all over before that."""
        worker.start(serve, self._order, "the model")
        while not worker.poll(LOOK):  # on a cluster it may take until there is room
            if self._over():
                return False
        worker.receive()
        return True

    def _serve(self, worker: Worker) -> None:
        """Batch after batch, until it is all over or the worker is lost.

        The worker is given the next batch while it computes one, so that it never waits for this thread.
        """
        pool = self._pool
        ready: deque[Batch] = deque()
        asked: deque[Batch] = deque()
        try:
            while True:
                if not asked and not ready:
                    batch = pool._take(self.name, self._most, self._several)
                    if batch is None:
                        return
                    ready.extend(self._of_one_form(batch))
                while len(asked) <= worker.ahead:
                    if asked and not ready:
                        batch = pool._take_ahead(self.name, self._most, self._several)
                        ready.extend([] if batch is None else self._of_one_form(batch))
                    if not ready:
                        break
                    self._ask(worker, ready, asked)
                if asked:
                    reply = self._reply(worker)
                    self._heed(asked.popleft(), reply)
        except Exception as error:  # it died, or can't go on for whatever reason: no batch may be lost by that
            reason = str(error) if isinstance(error, WorkerDiedError) else f"{type(error).__name__}: {error}"
            for number, batch in enumerate([*asked, *ready]):
                if number == 0:  # what it was at
                    pool._report(partial(pool._queue.died, batch, reason))
                else:
                    pool._report(partial(pool._queue.returned, batch))
            if isinstance(error, WorkerDiedError):
                raise
            raise WorkerDiedError(reason) from error

    def _ask(self, worker: Worker, ready: deque[Batch], asked: deque[Batch]) -> None:
        """Send the next batch. What can't be sent fails, and the worker is none the worse for it."""
        batch = ready[0]
        try:
            worker.answer(joined([taken(piece) for piece in batch.slices]))
        except CannotSendError as error:
            ready.popleft()
            self._pool._report(partial(self._pool._queue.failed, batch, error))
        else:
            asked.append(ready.popleft())

    def _of_one_form(self, batch: Batch) -> list[Batch]:
        """A batch; or several, where the rows are of several forms and can't be one array."""
        groups = by_form(batch)
        if len(groups) == 1:
            return [batch]
        with self._pool._lock:
            return self._pool._queue.parted(batch, groups)

    def _reply(self, worker: Worker) -> Reply:
        asked = time.monotonic()
        while not worker.poll(LOOK):
            if self._over():
                raise WorkerDiedError("nobody waits for its answer any more")
            if time.monotonic() - asked > self._pool._timeout:
                raise WorkerDiedError(f"it had not answered after {self._pool._timeout:g} s")
        _, reply = worker.receive()
        return reply

    def _heed(self, batch: Batch, reply: Reply) -> None:
        pool, queue = self._pool, self._pool._queue
        outputs, error = [], reply.error
        if error is None:
            try:
                outputs = parted(reply.outputs, batch)
            except Exception as trouble:  # memory, say
                error = trouble
        if error is None:
            self._pace(reply.seconds / batch.rows * self._order.batch_size)

            def answered() -> list[Request]:
                queue.noted(self.name, batch.rows, reply.seconds)
                pool._tally.answered(self.name, batch.rows, reply.seconds)
                return queue.answered(batch, outputs, time.monotonic())

            pool._report(answered)
        elif reply.memory and batch.rows > 1:
            self._most = max(1, batch.rows // 2)
            pool._report(partial(queue.returned, batch))
        else:
            pool._report(partial(queue.failed, batch, error))

    def _pace(self, seconds: float) -> None:
        """Note what a batch has taken: of short ones, several are given at once, as each costs time here, too."""
        fitting = min(MOST_AT_ONCE, int(self._pool._span / max(seconds, 1e-6)))
        self._several = max(1, min(fitting, 2 * self._several))
