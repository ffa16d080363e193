"""Supervising workers, which start, hang, die and are started again.

A `Supervisor` owns the worker of one place. It hires the worker, starts its task, waits for the first item within
a limit, notices when the worker dies or freezes, and tells apart what the worker had begun from what it had not.
It knows nothing of rows or lanes: the owner decides what is run again.

A `RestartBudget` counts what went wrong, and says when to give up. It belongs to whatever is the likely culprit:

- Replicas have a budget for each place, because the same task is started there again and again. `Driver.run` in
  `replicas/driver.py` shows the order of the calls. It blocks in `wait_started` and `receive`.
- A fit that spreads lanes over places has a budget for each lane (`runs.remote_state.WORKER_POLICY`), which moves
  from place to place with the lane. The dispatcher (`sharing/dispatcher.py`) polls several supervisors at once. A
  worker that `is_late` is lost, and one that `may_be_stuck` is dropped if another place can take its lanes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from modelfleet.workers.heartbeat import Stopwatch
from modelfleet.workers.protocol import Place, Task, Worker, WorkerDiedError

CHECK_INTERVAL = 0.2  # seconds between two checks of a worker
FINISH_TIMEOUT = 1.0  # seconds that a worker has to end its task before it is ended

Work = TypeVar("Work")


@dataclass(frozen=True)
class Policy:
    """Limits for workers and for what is run in them. None: no limit."""

    start_timeout: float | None = 300.0  # seconds until the first item; never applied on a cluster
    start_advice: str = ""  # for the error of a worker that did not start in time
    patience: float = 10.0  # seconds after which a worker that has not started may be stuck
    max_failed_starts: int = 3  # in a row, before the first successful start
    max_failed_restarts: int = 3  # in a row, after a successful start
    max_deaths: int | None = None  # of workers that had started
    first_delay: float = 0.5  # seconds before the third start in a row; doubled for each further one
    short_life: float = 5.0  # seconds: a worker that dies sooner is started again after `first_delay`


@dataclass(frozen=True)
class WorkerEnd:
    """Reason why a worker was lost, and how long it lived."""

    error: Exception
    started: bool
    """True if the worker had sent its first item."""
    lifetime: float = 0.0
    """Seconds from the first item to the end; 0 if there was none."""

    @property
    def reason(self) -> str:
        """Error in words. The message of `WorkerDiedError` is complete in itself."""
        if isinstance(self.error, WorkerDiedError):
            return str(self.error)
        return f"{type(self.error).__name__}: {self.error}"


class RestartBudget:
    """Counts failed starts and deaths, and says when to give up and how long to wait before the next start."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.failed_starts = 0
        """In a row."""
        self.deaths = 0
        """Of workers that had started."""
        self.has_started = False
        """True once a worker has started."""
        self._last: WorkerEnd | None = None

    def note_started(self) -> None:
        """Note that a worker has sent its first item."""
        self.has_started, self.failed_starts = True, 0

    def charge(self, end: WorkerEnd) -> None:
        """Count a worker that ended."""
        self._last = end
        if end.started:
            self.deaths += 1
        else:
            self.failed_starts += 1

    def reset(self) -> None:
        """Forget all losses, after progress."""
        self.failed_starts = self.deaths = 0
        self._last = None

    @property
    def is_spent(self) -> bool:
        """True if another start would be of no use."""
        policy = self.policy
        if policy.max_deaths is not None and self.deaths >= policy.max_deaths:
            return True
        if self.has_started:  # the cause may pass, such as memory that another program has taken
            return self.failed_starts >= policy.max_failed_restarts
        # A task that raises at its first start would raise again.
        last = self._last
        raised = last is not None and not last.started and not isinstance(last.error, WorkerDiedError)
        return raised or self.failed_starts >= policy.max_failed_starts

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        if self._last is not None and self._last.started:
            return 0.0 if self._last.lifetime > self.policy.short_life else self.policy.first_delay
        return 0.0 if self.failed_starts < 2 else self.policy.first_delay * 2 ** (self.failed_starts - 2)


class Supervisor:
    """Owns the worker of one place, from hiring to release or death."""

    def __init__(self, place: Place, policy: Policy) -> None:
        self.place = place
        self.policy = policy
        self.worker: Worker | None = None
        self.started = False
        """True if the current task has sent its first item."""
        self.lost_last = False
        """True if the last worker died; False again when one has started."""
        self.silent_seconds = 0.0
        """Seconds without a sign of life, as of the last check."""
        self._answered = 0  # answers whose item was received
        self._started_at = self._asked_at = 0.0
        self._waiting = Stopwatch()

    def start(self, task: Task, argument: object, description: str, *, job: object = None) -> Worker:
        """Begin a task, in a new worker if there is none.

        Args:
            task: The generator function to run.
            argument: Its argument.
            description: Names the argument in errors.
            job: Kept as the worker's `last_job`, so that an idle worker that knows it is preferred.

        Raises:
            WorkerDiedError: If no worker can be started, or it dies at once.
            CannotSendError: If the task or its argument can't be sent.
        """
        self.started, self.silent_seconds, self._answered = False, 0.0, 0
        self._asked_at = time.monotonic()
        self._waiting.restart()
        if self.worker is None:
            self.worker = self.place.hire(job)
        if job is not None:
            self.worker.last_job = job
        self.worker.start(task, argument, description)
        return self.worker

    def wait_started(self, stop: Callable[[], bool]) -> bool:
        """Wait for the first item, and drop it. Return False if `stop()` became true before that.

        Raises:
            WorkerDiedError: If the worker dies, freezes, or does not start within the policy's `start_timeout`.
            Exception: Whatever the task raises.
        """
        worker = self._hired
        while not worker.poll(CHECK_INTERVAL):
            self.silent_seconds = worker.silent_seconds
            if stop():
                return False
            if self.is_late():
                raise self.late_error()
        self.receive()
        return True

    def receive(
        self, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> tuple[bool, Any]:
        """Wait for the next item, and return it; see `Worker.receive`.

        Args:
            timeout: Seconds of this process's running time to wait.
            stop: Called several times a second; True gives up.

        Raises:
            WorkerDiedError: If the worker dies or freezes, `timeout` has passed, or `stop()` became true.
            Exception: Whatever the task raises.
        """
        worker, waited = self._hired, Stopwatch()
        while not worker.poll(CHECK_INTERVAL):
            self.silent_seconds = worker.silent_seconds
            if stop():
                raise WorkerDiedError("its answer is no longer needed")
            if timeout is not None and waited.read() > timeout:
                raise WorkerDiedError(f"it had not answered after {timeout:g} s")
        more, item = worker.receive()
        if self.started:
            self._answered += 1
        else:
            self.started, self.lost_last, self._started_at = True, False, time.monotonic()
        return more, item

    def check_idle(self) -> None:
        """Raise WorkerDiedError if a worker that has nothing to do has died or is frozen."""
        worker = self._hired
        if worker.poll():
            worker.receive()  # raises the reason
            raise WorkerDiedError("it sent an item without being asked")
        self.silent_seconds = worker.silent_seconds
        if worker.frozen:
            raise WorkerDiedError(f"it gave no sign of life for {self.silent_seconds:.0f} s while it was idle")

    def is_late(self) -> bool:
        """Return True if the worker should have started by now. On a cluster it may wait for a device."""
        limit = self.policy.start_timeout
        waited = self._waiting.read()
        return not (self.started or limit is None or self.place.on_cluster) and waited > limit

    def late_error(self) -> WorkerDiedError:
        """Return the error of a worker that is late."""
        limit = self.policy.start_timeout
        return WorkerDiedError(f"its worker did not begin within {limit:g} s.{self.policy.start_advice}")

    def may_be_stuck(self) -> bool:
        """Return True if the worker has not started, and may never: the last one here died, or patience is up."""
        waited = time.monotonic() - self._asked_at
        return not self.started and (self.lost_last or waited > self.policy.patience)

    def split_begun(self, sent: Sequence[Work]) -> tuple[list[Work], list[Work]]:
        """Split unanswered messages into those that the worker had begun, and those that it had not.

        Only those that it had begun can have killed it.
        """
        begun = max(0, self._hired.answers_begun - self._answered)
        return list(sent[:begun]), list(sent[begun:])

    def drop(self) -> None:
        """End the worker, whatever it is doing."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def lose(self, error: Exception) -> WorkerEnd:
        """End a worker that failed with `error`. Return how it ended, to be charged to a budget."""
        self.drop()
        self.lost_last = True
        return WorkerEnd(error, self.started, time.monotonic() - self._started_at if self.started else 0.0)

    def release(self) -> None:
        """Give the worker back to its place."""
        if self.worker is not None:
            self.place.release(self.worker)
            self.worker = None

    def finish(self) -> None:
        """Answer None, which ends the task, and give the worker back; end it if it does not finish soon."""
        worker = self._hired
        worker.answer(None)
        if worker.poll(FINISH_TIMEOUT):
            worker.receive()
            self.release()
        else:
            self.drop()

    @property
    def _hired(self) -> Worker:
        assert self.worker is not None, "no worker was started"
        return self.worker
