"""Workers in this process: each task runs in a thread of its own."""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakSet

from modelfleet.workers.protocol import Task, WorkerDiedError, set_interrupt_check

EXIT_TIMEOUT = 5.0  # seconds that the program's end waits for computations
_threads: WeakSet[threading.Thread] = WeakSet()


@atexit.register
def _join_threads() -> None:
    """Wait for running threads: one that is inside a framework when Python ends crashes the program."""
    end = time.monotonic() + EXIT_TIMEOUT
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


class InlineWorker:
    """Runs its task in a thread. A thread that hangs can't be ended: `close` leaves it behind."""

    alive = True
    max_ahead = 1
    silent_seconds, frozen = 0.0, False  # a thread exists as long as this process does
    _changed = threading.Condition()  # one for all workers, so that `wait` can wait for any of them

    def __init__(self) -> None:
        self.last_job: object = None
        self.busy = self.starting = False
        self.answers_begun = 0
        self._items: deque[tuple[bool, Any]] = deque()  # (True, item), or (False, error or None) at the end
        self._answers: deque[Any] = deque()
        self._interrupted = self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, task: Task, argument: object, description: str) -> None:
        """Begin a task."""
        self.busy, self.starting, self.answers_begun, self._interrupted = True, True, 0, False
        self._answers.clear()
        thread = threading.Thread(target=self._run, args=(task, argument), name="modelfleet-inline", daemon=True)
        _threads.add(thread)
        self._thread = thread
        thread.start()

    def receive(self) -> tuple[bool, Any]:
        """Wait for the task's next item, and return it; see `Worker.receive`."""
        self.poll(None)
        more, item = self._items.popleft()
        self.starting = False
        if not more:
            self.busy = False
            if item is not None:
                raise item
        return more, item

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Return True if there is something to receive within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items), seconds)

    def answer(self, value: object = None) -> None:
        """Let the task continue after an item."""
        with self._changed:
            self._answers.append(value)
            self._changed.notify_all()

    def interrupt(self) -> None:
        """Ask the task to stop soon."""
        self._interrupted = True

    def close(self) -> None:
        """Abandon the current task at its next item."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until a task that was abandoned, or has ended, has released what it holds."""
        if self._thread is not None:
            self._thread.join(seconds)

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Return the workers that have an item; wait up to `seconds` for the first."""
        with cls._changed:
            cls._changed.wait_for(lambda: any(worker._items for worker in workers), seconds)
            return [worker for worker in workers if worker._items]

    def _run(self, task: Task, argument: object) -> None:
        set_interrupt_check(lambda: self._interrupted)
        running = task(argument)
        try:
            item = next(running)
            while self._emit(True, item):
                self.answers_begun += 1
                item = running.send(self._answers.popleft())  # in no variable, which would keep it until the next
        except StopIteration:
            self._emit(False, None)
        except Exception as error:  # raised in the owner by `receive`
            self._emit(False, error)
        except BaseException as error:  # such as sys.exit, which would end a thread without a word
            self._emit(False, WorkerDiedError(f"its thread was ended by {type(error).__name__}: {error}"))
        finally:
            running.close()

    def _emit(self, more: bool, item: object) -> bool:
        """Hand out an item, and wait for its answer if more follow. Return False if the worker was closed."""
        with self._changed:
            self._items.append((more, item))
            self._changed.notify_all()
            if more:
                self._changed.wait_for(lambda: self._closed or bool(self._answers))
            return not self._closed


@dataclass(frozen=True)
class LocalValue:
    """Refers to a value of this process."""

    value: object

    def get(self) -> Any:
        """Return the value."""
        return self.value

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(frozen=True)
class InlinePlace:
    """Starts workers for a device that this process itself uses."""

    name: str
    device: str
    on_cluster = False

    def hire(self, last_job: object = None) -> InlineWorker:
        """Return a new worker, which costs nothing."""
        return InlineWorker()

    def release(self, worker: InlineWorker) -> None:
        """End a worker."""
        worker.close()

    def publish(self, value: object, description: str) -> LocalValue:
        """Return a handle of the value itself."""
        return LocalValue(value)


def _reset_after_fork() -> None:
    """Replace the lock in a forked child: the threads that hold it do not exist there."""
    InlineWorker._changed = threading.Condition()


os.register_at_fork(after_in_child=_reset_after_fork)
