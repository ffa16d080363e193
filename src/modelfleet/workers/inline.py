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

from modelfleet.workers._base import Task, WorkerDiedError, listen

GRACE = 5.0  # seconds that the end of the program waits for what is being computed
_threads: WeakSet[threading.Thread] = WeakSet()


@atexit.register
def _join() -> None:
    """Wait for threads that were left: one that is within a framework when Python ends takes the program down."""
    end = time.monotonic() + GRACE
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


class InlineWorker:
    """Runs its task in a thread. One that hangs can't be ended: `close` leaves it behind."""

    alive = True
    ahead = 1
    silent, frozen = 0.0, False  # a thread is there as long as this process is
    _news = threading.Condition()  # of all of them: so `wait` can wait for any

    def __init__(self) -> None:
        self.last: object = None
        self.busy = self.starting = False
        self.taken = 0
        self._said: deque[tuple[bool, Any]] = deque()  # items; and not an item: how it ended
        self._answers: deque[Any] = deque()
        self._told_to_stop = self._closed = False

    def start(self, task: Task, order: Any, what: str) -> None:
        """Begin a task."""
        self.busy, self.starting, self.taken, self._told_to_stop = True, True, 0, False
        self._answers.clear()
        thread = threading.Thread(target=self._run, args=(task, order), name="modelfleet-inline", daemon=True)
        _threads.add(thread)
        thread.start()

    def receive(self) -> tuple[bool, Any]:
        """The task's next item, and whether there is one; blocks until then."""
        self.poll(None)
        more, item = self._said.popleft()
        self.starting = False
        if not more:
            self.busy = False
            if item is not None:
                raise item
        return more, item

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether it has something to say."""
        with self._news:
            return self._news.wait_for(lambda: bool(self._said), seconds)

    def answer(self, value: Any = None) -> None:
        """Let it go on after an item."""
        with self._news:
            self._answers.append(value)
            self._news.notify_all()

    def interrupt(self) -> None:
        """Tell the task that it is to stop soon."""
        self._told_to_stop = True

    def close(self) -> None:
        """Give up the task at hand, at its next item."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Those that have something to say; waits at most so long until there is one."""
        with cls._news:
            cls._news.wait_for(lambda: any(worker._said for worker in workers), seconds)
            return [worker for worker in workers if worker._said]

    def _run(self, task: Task, order: Any) -> None:
        listen(lambda: self._told_to_stop)
        running = task(order)
        try:
            item = next(running)
            while self._say(True, item):
                self.taken += 1
                item = running.send(self._answers.popleft())  # in no variable: it would be kept until the next
        except StopIteration:
            self._say(False, None)
        except Exception as error:  # it is the owner's to hear
            self._say(False, error)
        except BaseException as error:  # sys.exit, say: of a thread nobody would hear it
            self._say(False, WorkerDiedError(f"its thread was ended by {type(error).__name__}: {error}"))
        finally:
            running.close()

    def _say(self, more: bool, item: Any) -> bool:
        """Hand out an item; wait for its answer, if there is more to come. False: nobody wants more."""
        with self._news:
            self._said.append((more, item))
            self._news.notify_all()
            if more:
                self._news.wait_for(lambda: self._closed or bool(self._answers))
            return not self._closed


@dataclass(frozen=True)
class Itself:
    """A value that is shared by being the same object."""

    value: Any

    def get(self) -> Any:
        """The value."""
        return self.value

    def close(self) -> None:
        """Nothing is to be given up."""


@dataclass(frozen=True)
class InlinePlace:
    """A device that this process itself uses."""

    name: str
    device: str

    def hire(self, last: object = None) -> InlineWorker:
        """A new one; it costs nothing."""
        return InlineWorker()

    def release(self, worker: InlineWorker) -> None:
        """End it."""
        worker.close()

    def share(self, value: Any, what: str) -> Itself:
        """The value as it is."""
        return Itself(value)


def _forget() -> None:
    """In a forked child: the threads are not there, and what they had locked would stay so."""
    InlineWorker._news = threading.Condition()


os.register_at_fork(after_in_child=_forget)
