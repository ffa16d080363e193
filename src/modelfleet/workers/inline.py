"""Workers in this process: a task runs in whatever thread asks for its next item."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from modelfleet.workers._base import Task, listen

_FRESH = object()


class InlineWorker:
    """Runs its task here, while it is being received from."""

    alive = True
    ahead = 0

    def __init__(self) -> None:
        self.last: object = None
        self._running: Generator[Any, Any, None] | None = None
        self._answer: Any = _FRESH
        self._told_to_stop = False

    @property
    def busy(self) -> bool:
        """Whether it has begun something that it has not ended."""
        return self._running is not None

    def start(self, task: Task, order: Any, what: str) -> None:
        """Begin a task; nothing of it runs before `receive`."""
        self._told_to_stop = False
        self._running, self._answer = task(order), _FRESH

    def receive(self) -> tuple[bool, Any]:
        """Run the task to its next item."""
        assert self._running is not None
        listen(lambda: self._told_to_stop)
        try:
            fresh, self._answer = self._answer, None
            return True, next(self._running) if fresh is _FRESH else self._running.send(fresh)
        except StopIteration:
            self._running = None
            return False, None
        except Exception:
            self._running = None
            raise
        finally:
            listen(lambda: False)

    def poll(self, seconds: float | None = 0.0) -> bool:
        """It always has something to say, once asked."""
        return True

    def answer(self, value: Any = None) -> None:
        """Let it go on, when it is received from next."""
        self._answer = value

    def interrupt(self) -> None:
        """Tell the task that it is to stop soon."""
        self._told_to_stop = True

    def close(self) -> None:
        """Give up the task at hand."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @classmethod
    def wait(cls, workers: Sequence[Self]) -> list[Self]:
        """All of them."""
        return list(workers)


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
