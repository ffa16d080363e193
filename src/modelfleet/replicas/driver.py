"""Drivers: a thread for each replica, which feeds its worker from the queue, and starts a lost worker again."""

import threading
import time
from collections import deque
from functools import partial
from typing import Literal

from modelfleet.errors import FleetError
from modelfleet.formatting import count
from modelfleet.joining import joined
from modelfleet.replicas.answering import Reply
from modelfleet.replicas.loaded_models import LoadedModels
from modelfleet.replicas.replica_task import Load, Switch, serve
from modelfleet.replicas.requests import Request, RowBatch
from modelfleet.replicas.row_limit import MAX_BATCHES, BatchCount, RowLimit
from modelfleet.replicas.rows import group_by_layout, rows_of_span, split_outputs
from modelfleet.replicas.state import PoolState
from modelfleet.workers import CannotSendError, NoRoomError, Place, WorkerDiedError
from modelfleet.workers.supervisor import CHECK_INTERVAL, Policy, RestartBudget, Supervisor, WorkerEnd

MAX_FAILED_STARTS = 3  # in a row, for a replica that has never answered
MAX_FAILED_RESTARTS = 6  # in a row, for a replica that has answered before
DriverStatus = Literal["starting", "ready", "busy"]


class Driver(threading.Thread):
    """Feeds one replica, and starts its worker again when that is lost.

    Args:
        state: The state of the pool.
        place: Where the replica's worker runs.
        batch_size: Rows of a batch, at most.
        mixed: Rows of several requests may share a batch, which may be cut.
        timeout: Seconds that a batch may take.
        start_timeout: Seconds that loading the model may take.
        seconds_at_once: Seconds of work to give at once, in several batches where these are quick.
    """

    def __init__(
        self,
        state: PoolState,
        place: Place,
        *,
        batch_size: int,
        mixed: bool,
        timeout: float,
        start_timeout: float,
        seconds_at_once: float,
    ) -> None:
        super().__init__(name=place.name, daemon=True)
        self._state, self._batch_size, self._mixed = state, batch_size, mixed
        self._timeout, self._start_timeout = timeout, start_timeout
        policy = Policy(
            start_timeout=start_timeout,
            start_advice=" Give a larger start_timeout if the model takes that long to load.",
            max_failed_starts=MAX_FAILED_STARTS,
            max_failed_restarts=MAX_FAILED_RESTARTS,
        )
        self._supervisor, self._budget = Supervisor(place, policy), RestartBudget(policy)
        self._row_limit = RowLimit(MAX_BATCHES * batch_size)
        self.batch_count = BatchCount(seconds_at_once)
        self.status: DriverStatus = "starting"
        self.live = False
        """True while the replica has the model, and takes rows."""
        self.models = LoadedModels(state, place.name)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last sign of life of the worker."""
        return self._supervisor.silent_seconds

    def run(self) -> None:
        """Keep a worker running until the pool is closed or the replica is given up."""
        state, supervisor = self._state, self._supervisor
        while not self._is_over():
            self.status = "starting"
            version = state.version
            try:
                supervisor.start(serve, version.specs[self.name], "the model")
                if not supervisor.wait_started(self._is_over):
                    supervisor.drop()
                    return
                self._budget.note_started()
                self.models.reset(version)
                self.models.catch_up(self._ask, self._is_over)
                with state.lock:
                    self.live = True
                    state.replica_started(self.name)
                self._serve()
                supervisor.finish()
                return
            except Exception as error:  # the worker died, or loading the model raised
                end = supervisor.lose(error)
                with state.lock:
                    self.live, self.status = False, "starting"
                    self.models.reset(None)
                    state.replica_lost(self.name)
                if end.started or state.version is version:  # a model that was replaced meanwhile does not count
                    self._budget.charge(end)
                if not end.started and self._budget.is_spent:
                    state.give_up(self.name, error)
                    return
                with state.lock:
                    state.changed.wait_for(state.is_over, self._budget.delay)

    def _is_over(self) -> bool:
        with self._state.lock:
            return self._state.is_over()

    # --- batches -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Feed the worker batch after batch, until the pool is closed or the worker is lost.

        The worker is sent the next batch while it computes one, so that it never waits for this thread.
        """
        worker = self._supervisor.worker
        assert worker is not None
        ready: deque[RowBatch] = deque()
        sent: deque[RowBatch] = deque()
        try:
            while True:
                if not sent:
                    self.models.catch_up(self._ask, self._is_over)
                    if not ready:
                        self.status = "ready"
                        batch = self._wait_for_rows()
                        if batch is None:
                            if self._is_over():
                                return
                            continue  # there is a new model
                        ready.extend(self._of_one_layout(batch))
                self.status = "busy"
                while len(sent) <= worker.max_ahead and not (sent and self.models.is_behind()):
                    if sent and not ready:
                        limits = self._row_limit.rows, self.batch_count.batches
                        batch = self._state.take_ahead(self.name, *limits)
                        ready.extend([] if batch is None else self._of_one_layout(batch))
                    if not ready:
                        break
                    self._send_next(ready, sent)
                if sent:
                    reply = self._reply(self._timeout)
                    self._record(sent.popleft(), reply)
        except Exception as error:  # the worker died, or anything else went wrong: no batch may get lost
            self._report_lost([*sent], [*ready], error)
            if isinstance(error, WorkerDiedError):
                raise
            raise WorkerDiedError(f"{type(error).__name__}: {error}") from error

    def _report_lost(self, sent: list[RowBatch], ready: list[RowBatch], error: Exception) -> None:
        """Report batches that have no answer. Only those that the worker had begun are charged with its death."""
        state, reason = self._state, WorkerEnd(error, started=True).reason
        begun, not_begun = self._supervisor.split_begun(sent)
        for batch in reversed(not_begun + ready):  # the last one first, as each is put before all others
            state.report(partial(state.queue.put_back, batch))
        for batch in begun:
            if isinstance(error, CannotSendError):  # the answer could not be sent
                self._record_unsent(batch, error)
            else:
                state.report(partial(state.queue.record_death, batch, reason))

    def _wait_for_rows(self) -> RowBatch | None:
        """Wait for the next rows, and return them; None if the pool is closed, or if there is a new model."""
        state, checked = self._state, time.monotonic()
        with state.lock:
            state.idle_replicas += 1
        try:
            while True:
                with state.lock:
                    while time.monotonic() - checked < CHECK_INTERVAL:
                        if state.is_over() or self.models.is_behind():
                            return None
                        batch = state.take(self.name, self._row_limit.rows, self.batch_count.batches)
                        if batch is not None:
                            return batch
                        due = state.queue.due(self.name)
                        until_due = CHECK_INTERVAL if due is None else max(0.001, due - time.monotonic())
                        state.changed.wait(min(CHECK_INTERVAL, until_due))
                self._supervisor.check_idle()
                checked = time.monotonic()
        finally:
            with state.lock:
                state.idle_replicas -= 1
            state.rows_taken()

    def _send_next(self, ready: deque[RowBatch], sent: deque[RowBatch]) -> None:
        """Send the next batch to the worker."""
        worker = self._supervisor.worker
        assert worker is not None
        found = self._state.open_rows(ready[0])
        if found is None:  # all of its requests are closed
            ready.popleft()
            return
        batch, data = found
        ready[0] = batch
        try:
            rows = joined([rows_of_span(span, tree) for span, tree in zip(batch.spans, data, strict=True)])
            worker.answer(rows)
        except (CannotSendError, MemoryError) as error:
            ready.popleft()
            self._record_unsent(batch, error)
        else:
            sent.append(ready.popleft())

    def _record_unsent(self, batch: RowBatch, error: Exception) -> None:
        """Record that rows, or their answers, could not be sent. If memory was short, send fewer at once."""
        state = self._state
        short = isinstance(error, NoRoomError | MemoryError)
        if short and batch.rows > 1 and self._mixed:
            self._row_limit.record_shortage(batch.rows)
            state.report(partial(state.queue.put_back, batch))
            return
        if short and not self._mixed:
            user = batch.spans[0].request.user
            whole = FleetError(
                f"a batch of {count(batch.rows, 'row')} of user {user!r} can't be sent in parts, as its rows may "
                f"depend on each other (isolation), and there is no memory to send it whole: {error}"
            )
            whole.__cause__, error = error, whole
        state.report(partial(state.queue.fail, batch, error))

    def _of_one_layout(self, batch: RowBatch) -> list[RowBatch]:
        """Return a batch, or several where its rows can't be one array."""
        groups = group_by_layout(batch)
        if len(groups) == 1:
            return [batch]
        with self._state.lock:
            return self._state.queue.split(batch, groups)

    def _reply(self, timeout: float) -> Reply:
        """Return the worker's reply to the first message that it has not answered."""
        _, reply = self._supervisor.receive(timeout=timeout, stop=self._is_over)
        return reply

    def _record(self, batch: RowBatch, reply: Reply) -> None:
        state, queue = self._state, self._state.queue
        try:
            answers = split_outputs(reply.parts, batch)
        except Exception as error:  # such as MemoryError: no batch may get lost
            self._record_unsent(batch, error)
            return
        complete = reply.rows == batch.rows
        if reply.too_many_rows:
            self._row_limit.record_shortage(reply.too_many_rows)
        elif complete:
            self._row_limit.record_success(batch.rows)
            self.batch_count.record(reply.seconds / batch.rows * self._batch_size)

        def report() -> list[Request]:
            if complete:
                queue.record_speed(self.name, batch.rows, reply.seconds)
            state.tally.count_batch(self.name, reply.rows, reply.seconds)
            first = bool(reply.too_many_rows)
            return queue.record(batch, answers, reply.errors, reply.left, time.monotonic(), first=first)

        state.report(report)

    def _ask(self, message: Load | Switch) -> Exception | None:
        """Ask the worker to load or switch models, and return the error that it had."""
        worker = self._supervisor.worker
        assert worker is not None
        worker.answer(message)
        return self._reply(self._start_timeout).error
