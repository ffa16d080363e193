"""`Replicas`: one model on every device, one queue for all of them, and a thread that drives each."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Self

import numpy as np

from modelfleet.errors import ClosedError, FleetError, InputError
from modelfleet.frameworks.contexts import current_settings
from modelfleet.replicas.driver import Driver
from modelfleet.replicas.models import Source
from modelfleet.replicas.options import Balance, Isolation, check_choice, check_seconds
from modelfleet.replicas.queue import Queue
from modelfleet.replicas.replica_task import ReplicaSpec
from modelfleet.replicas.rows import rows_of
from modelfleet.replicas.state import LOAD_POLICY, Future, ModelVersion, PoolState
from modelfleet.replicas.stats import Health, Stats, health
from modelfleet.trees import map_tree
from modelfleet.types import Model, Precision, Tree
from modelfleet.workers.places import find_places
from modelfleet.workers.supervisor import CHECK_INTERVAL, RestartBudget

SECONDS_AT_ONCE = 0.03  # of work that a replica is given at once


class Replicas:
    """One model on every device, answering many users at once. Use it as a context manager.

    Do not change the model's weights while it is in use: which replica sees a change, and when, depends on the
    devices. Use `update` instead.

    Args:
        model: A model of torch, Keras, JAX or TensorFlow; anything with a `predict`, as in scikit-learn;
            a function of one argument, the rows; or a factory: a function that needs no arguments and returns any
            of these. A factory is called in every worker, so its model need not be sent.
        devices: "auto", or names: "cuda:0,cuda:1", "cpu:0,cpu:1", "ray" for all devices of a cluster. A single
            device is used by this process; several have a process each.
        max_queue: How many requests may wait; `submit` refuses more with `QueueFullError`. None for no limit.
        batch_size: How many rows go through the model together, at most.
        balance: "least-busy" gives the next rows to a free replica. "sticky" keeps each user with one replica.
        isolation: With "rows", rows of several users may share a batch, but never an answer. With "batch", every
            request goes through the model alone: whole if it has at most `batch_size` rows, otherwise cut at
            multiples of that. "device" is the same, and keeps each user on one device.
        precision: "float32"; or "bf16" or "fp16", for the operations that allow it.
        timeout: Seconds after which a replica that has not answered a batch counts as hung, and is started again.
            A hung thread of this process can't be ended, so it is abandoned.
        start_timeout: Seconds that a replica may take to load the model.
        batch_wait: Seconds that a free replica waits for a batch to fill, from when its oldest row was submitted.
            A full batch goes at once. It has no effect with isolation "batch" or "device".

    Raises:
        InputError: If an option is unknown, a device does not exist, the model can't be used, or its weights do
            not fit into a device's memory.
        StrategyError: If the model can't be sent to other processes.

    Example:
        with mf.Replicas(model, devices="cuda:0,cuda:1") as replicas:
            answer = replicas.submit("ada", x).result()
    """

    def __init__(
        self,
        model: Model,
        *,
        devices: str | Sequence[str] = "auto",
        max_queue: int | None = 1024,
        batch_size: int = 32,
        balance: Balance = "least-busy",
        isolation: Isolation = "rows",
        precision: Precision = "float32",
        timeout: float = 120.0,
        start_timeout: float = 300.0,
        batch_wait: float = 0.0,
    ) -> None:
        check_choice("precision", precision, Precision)
        check_seconds("timeout", timeout, "a batch may take")
        check_seconds("start_timeout", start_timeout, "a replica may take to start")
        source = Source.of(model)
        self._places = find_places(devices, source.framework)
        source = source.at(self._places, float(start_timeout))
        self._framework = source.framework
        self._precision, self._batch_size = precision, batch_size
        self._mixed, self._start_timeout = isolation == "rows", float(start_timeout)
        names = [place.name for place in self._places]
        queue = Queue(
            names,
            batch_size=batch_size,
            max_queue=max_queue,
            balance=balance,
            isolation=isolation,
            batch_wait=batch_wait,
        )
        source.check(precision, self._places)
        self._updating = threading.Lock()
        self._state = PoolState(names, queue, self._new_version(source))
        self._drivers = [
            Driver(
                self._state,
                place,
                batch_size=batch_size,
                mixed=self._mixed,
                timeout=float(timeout),
                start_timeout=self._start_timeout,
                seconds_at_once=SECONDS_AT_ONCE,
            )
            for place in self._places
        ]
        self._deadline_thread = threading.Thread(
            target=self._state.watch_deadlines, name="modelfleet-deadlines", daemon=True
        )
        self._deadline_thread.start()
        for driver in self._drivers:
            driver.start()
        _open.add(self)

    @property
    def failure(self) -> FleetError | None:
        """Error that ended all replicas; None while any is left."""
        return self._state.failure

    def submit(
        self,
        user: Hashable,
        x: Tree,
        *,
        deadline: float | None = None,
        priority: int = 0,
        block: bool = False,
        timeout: float | None = None,
    ) -> Future:
        """Queue rows of a user, and return a future for their answers at once.

        Args:
            user: The user that the rows belong to. Any hashable value.
            x: The rows: an array `(row, …)`, or a tree of arrays. They are copied.
            deadline: Seconds from now after which the request fails with `DeadlineError`.
            priority: Rows of higher priority are taken first. Within one priority, users take turns.
            block: Wait for room if the queue is full, instead of raising `QueueFullError` at once. This blocks the
                calling thread, and an event loop that runs in it.
            timeout: Seconds to wait for room with `block`; None for no limit.

        Returns:
            A future, for threads (`result()`) and for asyncio (`await`).

        Raises:
            QueueFullError: If `max_queue` requests wait. Its `wait` suggests how many seconds to wait.
            ClosedError: If the replicas were closed, or none is left.
            InputError: If the rows, the deadline or the priority can't be used.
        """
        self._state.refuse_inherited()
        if deadline is not None and not isinstance(deadline, Real):
            raise InputError(f"deadline={deadline!r} of user {user!r}. Give seconds from now, or None.")
        if timeout is not None and not (block and isinstance(timeout, Real) and timeout >= 0):
            raise InputError(
                f"timeout={timeout!r} with block={block!r} of user {user!r}. Give the seconds that a submit with "
                f"block=True waits for room, or None."
            )
        data, rows = rows_of(x, user)
        # Copied, as the caller may fill the same arrays with other rows before these are answered.
        data = map_tree(np.array, data)
        return self._state.submit(user, data, rows, deadline, priority, block=block, timeout=timeout)

    def update(self, model: Model) -> None:
        """Give every replica a new model of the same framework: new weights, or another network.

        Returns when every running replica answers with the new model. Until then the old model answers, so both
        have to fit into memory. Rows submitted afterwards are answered by the new model. A batch is answered by
        one model, but an open request of several batches may have answers of both.

        Args:
            model: As for `Replicas`.

        Raises:
            InputError: If the new model is of another framework. The old model stays.
            FleetError: If the new model can't be sent or loaded. The old model stays.
            ClosedError: If the replicas are closed before they have the new model.
        """
        state = self._state
        state.refuse_inherited()
        with self._updating:
            source = Source.of(model).at(self._places, self._start_timeout)
            self._check_replacement(source)
            version = self._new_version(source)
            try:
                self._wait_loaded(version)
            except BaseException:
                with state.lock:
                    state.next_version = None
                    state.changed.notify_all()
                version.value.close()
                raise
            with state.lock:
                old, state.version, state.next_version = state.version, version, None
                state.mark_updated()
                state.changed.notify_all()
                state.changed.wait_for(
                    lambda: state.closing or all(d.models.current is version for d in self._drivers if d.live)
                )
                state.mark_updated()  # requests that began meanwhile, too
            old.value.close()

    def _check_replacement(self, source: Source) -> None:
        """Raise InputError if a new model is of another framework. A factory's model is checked in its worker."""
        name, other = self._framework.NAME, source.framework.NAME
        if None not in (name, other) and name != other:
            raise InputError(
                f"the new model is of {other}, and the replicas are of {name}. Give a model of {name}, or make "
                f"new Replicas. The old model stays."
            )
        source.check(self._precision, self._places)

    def _wait_loaded(self, version: ModelVersion) -> None:
        """Wait until every running replica, and at least one, has loaded a version beside its current one."""
        state = self._state

        def settled() -> bool:
            if state.closing or state.failure is not None or version.refused is not None:
                return True
            live = [driver for driver in self._drivers if driver.live]
            return bool(live) and all(driver.models.spare is version for driver in live)

        with state.lock:
            state.next_version = version
            state.changed.notify_all()
            state.changed.wait_for(settled)
            if state.closing:
                raise ClosedError(
                    "the replicas were closed before they had the new model. Make new Replicas with it."
                )
            if state.failure is not None:
                raise state.failure
            if version.refused is not None:
                raise FleetError(
                    f"the new model could not be loaded, and the old one stays: {type(version.refused).__name__}: "
                    f"{version.refused}"
                ) from version.refused

    def _new_version(self, source: Source) -> ModelVersion:
        """Send a model to the places of the replicas."""
        value = source.publish(self._places[0])
        specs = {
            place.name: ReplicaSpec(
                source.framework.NAME,
                value,
                place.device,
                self._precision,
                self._batch_size,
                current_settings(source.framework.NAME),
                whole=not self._mixed,
            )
            for place in self._places
        }
        return ModelVersion(specs, value, RestartBudget(LOAD_POLICY))

    def stats(self) -> Stats:
        """Return the numbers so far, by replica and by user. `print` shows them as a table."""
        self._state.refuse_inherited()
        return self._state.stats()

    def check(self, timeout: float = 10.0) -> dict[str, Health]:
        """Return the health of each replica, by name.

        A `Health` has a `state` ("ready", "busy", "starting", "silent" or "given up") and a `reason`. It is true
        if its replica takes rows.

        Args:
            timeout: Seconds to wait for a sign of life from replicas that have been silent for a while.

        Raises:
            ClosedError: If the replicas were closed.

        Example:
            if not any(replicas.check().values()):
                alert("no replica takes rows")
        """
        state = self._state
        state.refuse_inherited()
        end = time.monotonic() + float(timeout)
        while True:
            with state.lock:
                if state.closing:
                    raise ClosedError("the replicas were closed. Make new ones.")
                found = {
                    driver.name: health(driver.status, driver.silent_seconds, state.given_up.get(driver.name))
                    for driver in self._drivers
                }
            if time.monotonic() >= end or all(one.state != "silent" for one in found.values()):
                return found
            time.sleep(CHECK_INTERVAL)

    def close(self, wait: bool = True) -> None:
        """Refuse new requests, wait until the open ones are answered, and end the replicas.

        Args:
            wait: False cancels the open requests instead. Closing then takes about a second, whatever the replicas
                are doing.
        """
        state = self._state
        if state.inherited:
            return
        state.start_closing()
        if threading.current_thread() in (*self._drivers, self._deadline_thread):  # in a future's callback
            threading.Thread(target=self.close, args=(wait,), name="modelfleet-close").start()
            return
        try:
            if not wait:
                state.cancel_all()
            for driver in self._drivers:
                driver.join()
        except BaseException:  # such as Ctrl-C while it waits
            state.cancel_all()
            raise
        state.end()
        self._deadline_thread.join()
        state.version.value.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(wait=kind is None)


_open: "weakref.WeakSet[Replicas]" = weakref.WeakSet()


def _inherit_all() -> None:
    for replicas in list(_open):
        replicas._state.inherit()
    _open.clear()


os.register_at_fork(after_in_child=_inherit_all)


@atexit.register
def _close_all() -> None:
    """Close replicas that the program did not close: end their workers, and release their shared memory."""
    for replicas in list(_open):
        replicas.close(wait=False)
