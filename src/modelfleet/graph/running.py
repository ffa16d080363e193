"""The owner's side of a verb: starts a worker for every rank, sends steps, and stops all when one is lost."""

import secrets
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from modelfleet.errors import RankLostError
from modelfleet.formatting import without_period
from modelfleet.graph.board import Position
from modelfleet.graph.orders import RankOrder, StateOrder, StepOrder, StepReport
from modelfleet.graph.transport import Hub, StoppedError
from modelfleet.graph.working import run_rank
from modelfleet.schedules import Operation
from modelfleet.trees import map_tree
from modelfleet.workers import Place, Worker, WorkerDiedError
from modelfleet.workers.heartbeat import Stopwatch
from modelfleet.workers.inline import InlineWorker
from modelfleet.workers.rendezvous import Rendezvous

POLL_SECONDS = 0.2  # between two looks at all ranks
STOPPED_SECONDS = 3.0  # after which a process that the system has stopped counts as lost
OPENING_SECONDS = 300.0  # more than a step may take: frameworks are imported, on a machine that may be busy
PATIENCE_SECONDS, PATIENCE_STEPS = 30.0, 20  # a rank is lost after so long, and so many times the longest step
BLAME_SECONDS = 3.0  # after a failure, the others have this long to say what they know of it

Orders = StepOrder | StateOrder


class Ranks:
    """The workers of all ranks, from start to end. A context manager."""

    def __init__(self, places: Sequence[Place], orders: Sequence[RankOrder]) -> None:
        self._places, self._orders = list(places), list(orders)
        self._workers: list[Worker] = []
        self._opened = self._failed = False
        self._under_way: deque[str] = deque()  # schedules of the orders that were sent; "" if they are no steps
        self._longest: dict[str, float] = {}  # seconds of a step, by its schedule
        self._hub: Hub | None = None
        self._rendezvous: Rendezvous | None = None
        self._board = orders[0].board

    def __enter__(self) -> Self:
        """Start all workers, and wait until they have found each other."""
        meeting = self._meeting()
        try:
            for place in self._places:
                self._workers.append(place.hire("graph"))
            for worker, order in zip(self._workers, self._orders, strict=True):
                worker.last_job = "graph"
                worker.start(run_rank, replace(order, meeting=meeting), self._describe(order.rank))
            self.receive()  # all are up
            for worker in self._workers:
                worker.answer(None)
            self.receive()  # and have opened their nodes
            self._opened = True
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None and not self._failed:
            with suppress(WorkerDiedError):
                for worker in self._workers:
                    worker.answer(None)
                deadline = time.monotonic() + BLAME_SECONDS
                for worker in self._workers:
                    if worker.poll(max(0.0, deadline - time.monotonic())):
                        worker.receive()
        else:
            self._failed = True
        self._end()

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def failed(self) -> bool:
        """Return True if a rank was lost, or its model has raised. All ranks have been stopped then."""
        return self._failed

    def nodes(self, rank: int) -> set[str]:
        """Return the names of a rank's nodes."""
        return {node.name for node in self._orders[rank].nodes}

    def _meeting(self) -> "str | Rendezvous | Hub":
        if isinstance(self._orders[0].meeting, Hub):
            self._hub = self._orders[0].meeting
            return self._hub
        host = getattr(self._places[0], "host", None)
        if host is not None:
            return f"tcp://{host}:{20_000 + secrets.randbelow(10_000)}"
        self._rendezvous = Rendezvous()
        return self._rendezvous

    # --- steps ---------------------------------------------------------------------------------------------------

    def send(self, orders: Sequence[Orders]) -> None:
        """Send every rank its order. One may be sent before the reports of the one before have been received."""
        self._under_way.append(orders[0].schedule if isinstance(orders[0], StepOrder) else "")
        for rank, (worker, order) in enumerate(zip(self._workers, orders, strict=True)):
            try:
                worker.answer(order)
            except WorkerDiedError as error:
                self._fail({rank: error})

    def receive(self) -> list[StepReport]:
        """Return every rank's next report.

        Raises:
            RankLostError: A rank died, hangs or is too late. All others have been stopped.
            Exception: What a rank's model raised. All others have been stopped.
        """
        begun = time.monotonic()
        schedule = self._under_way.popleft() if self._under_way else ""
        found: dict[int, StepReport] = {}
        errors: dict[int, Exception] = {}
        waited, still = Stopwatch(), [Stopwatch() for _ in self._workers]
        before = self._positions()
        while len(found) < len(self._workers) and not errors:
            missing = [rank for rank in range(len(self._workers)) if rank not in found]
            self._workers[0].wait([self._workers[rank] for rank in missing], POLL_SECONDS)
            for rank in missing:
                self._look_at(rank, found, errors, still[rank])
            now = self._positions()
            if now != before:
                before = now
                waited.restart()
            limit = self._limit(schedule)
            if len(found) < len(self._workers) and not errors and waited.read() > limit and not self._starting:
                late = [rank for rank in missing if rank not in found]
                computing = [rank for rank in late if now and not now[rank].waiting]
                errors[(computing or late)[0]] = WorkerDiedError(
                    f"it hangs or is too slow: nothing has moved for {limit:.0f} s"
                )
        if errors:
            self._fail(errors, set(found))
        if schedule:
            self._longest[schedule] = max(self._longest.get(schedule, 0.0), time.monotonic() - begun)
        return [found[rank] for rank in range(len(self._workers))]

    def _limit(self, schedule: str) -> float:
        """Return after how many seconds in which no rank has moved one of them is lost.

        The first step of a schedule may compile for long.
        """
        timeout = self._orders[0].timeout
        if not self._opened:
            return timeout + OPENING_SECONDS
        if schedule not in self._longest or self._board is None:
            return timeout + BLAME_SECONDS  # the ranks say earlier for whom they wait
        return min(timeout + BLAME_SECONDS, max(PATIENCE_SECONDS, PATIENCE_STEPS * self._longest[schedule]))

    @property
    def _starting(self) -> bool:
        return any(worker.starting for worker in self._workers)

    def _look_at(
        self, rank: int, found: dict[int, StepReport], errors: dict[int, Exception], stopped: Stopwatch
    ) -> None:
        """Receive what a rank has to say, or find out that it is lost."""
        worker = self._workers[rank]
        try:
            if worker.poll():
                more, item = worker.receive()
                if more:
                    found[rank] = _copied(item)
                else:
                    errors[rank] = WorkerDiedError("its task ended by itself")
            elif not _is_stopped(worker):
                stopped.restart()
            elif stopped.read() > STOPPED_SECONDS:
                errors[rank] = WorkerDiedError(
                    f"its process has been stopped for {STOPPED_SECONDS:g} s, as by SIGSTOP"
                )
        except Exception as error:
            errors[rank] = error

    # --- failures ------------------------------------------------------------------------------------------------

    def _fail(self, errors: dict[int, Exception], done: Collection[int] = ()) -> None:
        """Stop all ranks, and raise the error that explains the failure. `done` have sent their reports."""
        self._failed = True
        positions = self._positions()  # before the others are stopped
        deadline = time.monotonic() + BLAME_SECONDS
        if all(isinstance(error, RankLostError) for error in errors.values()):
            done = {*done, *self._hear_others(errors, deadline)}
        elif not positions and all(isinstance(error, WorkerDiedError) for error in errors.values()):
            self._hear_one(errors, done, deadline)  # only those that waited for it can say what it was at
        rank, error = self._culprit(errors, done)
        if self._hub is not None:
            self._hub.close()
        self._end()
        if isinstance(error, WorkerDiedError | RankLostError):
            told = [
                other for number, other in errors.items() if number != rank and isinstance(other, RankLostError)
            ]
            raise self._lost(rank, error, positions, told) from error
        raise error

    def _hear_others(self, errors: dict[int, Exception], deadline: float) -> set[int]:
        """Wait for a rank that failed by itself: the others have only noticed that it is gone.

        Returns the ranks that have sent a report since.
        """
        done: set[int] = set()
        while time.monotonic() < deadline and all(_is_consequence(error) for error in errors.values()):
            missing = [rank for rank in range(len(self._workers)) if rank not in errors and rank not in done]
            if not missing:
                break
            self._workers[0].wait([self._workers[rank] for rank in missing], POLL_SECONDS)
            for rank in missing:
                worker = self._workers[rank]
                try:
                    if worker.poll():
                        worker.receive()
                        done.add(rank)
                    elif _is_stopped(worker):
                        errors[rank] = WorkerDiedError("its process has been stopped, as by SIGSTOP")
                except Exception as error:
                    errors[rank] = error
        return done

    def _hear_one(self, errors: dict[int, Exception], done: Collection[int], deadline: float) -> None:
        """Wait until a rank says what it waited for when another one was lost."""
        waiting = [rank for rank in range(len(self._workers)) if rank not in errors and rank not in done]
        while waiting and time.monotonic() < deadline and not any(map(_is_consequence, errors.values())):
            self._workers[0].wait([self._workers[rank] for rank in waiting], POLL_SECONDS)
            for rank in list(waiting):
                try:
                    if self._workers[rank].poll():
                        waiting.remove(rank)
                        self._workers[rank].receive()
                except Exception as error:
                    errors[rank] = error

    def _culprit(self, errors: Mapping[int, Exception], done: Collection[int]) -> tuple[int, Exception]:
        """Return the rank that is to blame, and what is known of it."""
        rank, error = min(errors.items(), key=lambda pair: _is_consequence(pair[1]))
        silent = [other for other in range(len(self._orders)) if other not in errors and other not in done]
        if isinstance(error, RankLostError) and silent:  # all others waited for it
            return silent[0], WorkerDiedError(f"it hangs or is too slow: {without_period(error)}")
        return rank, error

    def _lost(
        self, rank: int, error: Exception, positions: Sequence[Position], told: Sequence[Exception]
    ) -> RankLostError:
        own = f"{self._describe(rank)} was lost"
        at = self._doing(rank, positions)
        others = [
            f"{self._describe(other)} {waits}"
            for other in range(len(self._orders))
            if other != rank and (waits := self._doing(other, positions))
        ]
        if not positions:
            others = [without_period(other) for other in told]
        waiting = f" Meanwhile {'; '.join(others)}." if others else ""
        return RankLostError(
            f"{own}{f', which {at}' if at else ''}: {without_period(error)}.{waiting} All ranks were stopped. "
            f"The models have the weights of the last report. With callbacks=[mf.Checkpoint(folder)], the "
            f"same call continues from the last checkpoint, also on other devices."
        )

    def _doing(self, rank: int, positions: Sequence[Position]) -> str:
        """Return in words what a rank was at, such as "was at backward head[3] in step 12"."""
        if not positions or positions[rank].step < 0:
            return ""
        at = positions[rank]
        name, schedule = list(self._orders[0].schedules.items())[at.schedule]
        operation: Operation = schedule.operations[rank][at.operation]
        when = f" in step {at.step + 1:,}" if name == "train" else f" in batch {at.step + 1:,} of {name}"
        return f"was at {operation.describe(schedule.devices)}{when}"

    def _positions(self) -> list[Position]:
        if self._board is None:
            return []
        return [self._board.read(rank) for rank in range(len(self._orders))]

    def _describe(self, rank: int) -> str:
        order = self._orders[rank]
        nodes = ", ".join(repr(node.name) for node in order.nodes)
        return f"{nodes} on {self._places[rank].name}"  # a worker on a cluster has its own name for its device

    def _end(self) -> None:
        """Give back the workers of a run that ended well, and kill those of one that did not."""
        if self._hub is not None:
            self._hub.close()
        for place, worker in zip(self._places, self._workers, strict=False):
            if self._failed or worker.busy:
                worker.close()
            else:
                place.release(worker)
        deadline = time.monotonic() + BLAME_SECONDS
        for worker in self._workers:
            if isinstance(worker, InlineWorker):
                worker.join(max(0.0, deadline - time.monotonic()))  # it still has its hands on the user's models
        self._workers = []
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
        if self._board is not None:
            self._board.close()


def _is_consequence(error: Exception) -> int:
    """Return how likely it is that an error only follows from another rank's."""
    return 2 if isinstance(error, StoppedError) else int(isinstance(error, RankLostError))


def _is_stopped(worker: Any) -> bool:
    """Return True if the system has stopped a worker's process. Only Linux says so."""
    process = getattr(worker, "process", None)
    pid = getattr(process, "pid", None)
    if isinstance(worker, InlineWorker) or pid is None:
        return False
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"
    return False


def _copied(report: StepReport) -> StepReport:
    """Return a report whose arrays stay valid: those of a worker process are overwritten by its next item."""

    def copy(leaf: object) -> object:
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return replace(report, outputs=map_tree(copy, report.outputs), states=map_tree(copy, report.states))
