"""Protocol of a worker, wherever it runs.

A worker runs tasks. A task is a generator function. Each item that it yields goes to the worker's owner, and each
`yield` evaluates to the owner's answer:

    worker.start(task, argument, "the members")    # task(argument) begins
    more, item = worker.receive()                  # the next item; `more` is False when the task has ended
    worker.answer(value)                           # lets the task continue

A place offers workers for one device: in this process, in a process of their own, or on a cluster.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, Self

from modelfleet.errors import FleetError

Task = Callable[[Any], Generator[Any, Any, None]]


class WorkerDiedError(FleetError):
    """Raised if a worker is gone. The message says how it ended, as far as that is known."""


class CannotSendError(FleetError):
    """Raised if a value can't be sent to another process. The message says which one, and why."""


class NoRoomError(CannotSendError):
    """Raised if there is not enough memory to send a value."""


class Worker(Protocol):
    """Runs one task at a time. Every method raises `WorkerDiedError` once the worker is gone."""

    last_job: object
    """Job that the worker last did. Its owner may set this, so that `Place.hire` can find the worker again."""
    max_ahead: int
    """Number of answers that may be sent before their items are received. With 1, the worker can begin the next
    answer while its last item is on the way."""

    @property
    def answers_begun(self) -> int:
        """Number of answers that the task has started to work on. Updated by `poll`, `receive` and `wait`."""
        ...

    @property
    def alive(self) -> bool:
        """True until the worker has ended."""
        ...

    @property
    def busy(self) -> bool:
        """True while a task has started and not ended."""
        ...

    @property
    def starting(self) -> bool:
        """True from `start` until the task's first item is received.

        The protocol sets no limit on that time; `supervisor.Supervisor` does.
        """
        ...

    @property
    def silent_seconds(self) -> float:
        """Seconds since the worker's last message or heartbeat, in this process's own running time.

        Counted from one read to the next, at most one second for each, so read it several times a second. Time in
        which this process was stopped, or did not look, does not count.
        """
        ...

    @property
    def frozen(self) -> bool:
        """True if the worker has been silent for too long. `poll` returns True then, and `receive` raises."""
        ...

    def start(self, task: Task, argument: Any, description: str) -> None:
        """Begin a task.

        Args:
            task: The generator function to run.
            argument: Its only argument.
            description: Names the argument in errors.

        Raises:
            CannotSendError: If the task or its argument can't be sent.
        """
        ...

    def receive(self) -> tuple[bool, Any]:
        """Wait for the next item, and return `(True, item)`; or `(False, None)` if the task has ended.

        Arrays in an item may be overwritten by the next `receive`. What the task raised is raised here.
        """
        ...

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Return True if `receive` would not block, now or within `seconds` (None: wait without a limit)."""
        ...

    def answer(self, value: object = None) -> None:
        """Let the task continue after an item."""
        ...

    def interrupt(self) -> None:
        """Ask the task to stop soon. The task finds out by calling `interrupted`."""
        ...

    def close(self) -> None:
        """End the worker at once."""
        ...

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Return the workers that have an item or have died; wait up to `seconds` for the first."""
        ...


class SharedValue(Protocol):
    """Refers to a value that is sent once and seen by all workers of a machine. Sending this costs little."""

    def get(self) -> Any:
        """Return the value, in a worker. Its arrays are read-only by convention."""
        ...

    def close(self) -> None:
        """Release the value. Workers that have it keep it."""
        ...


class Place(Protocol):
    """Starts workers for one device."""

    @property
    def name(self) -> str:
        """Device as users name it: "cuda:0", "cpu:1", "ray:0"."""
        ...

    @property
    def device(self) -> str:
        """Device as the worker itself names it."""
        ...

    @property
    def on_cluster(self) -> bool:
        """True if a cluster runs the workers: one may wait for a free node, and its memory is unknown here."""
        ...

    def hire(self, last_job: object = None) -> Worker:
        """Return an idle worker, preferably one whose `last_job` was this, or a new one.

        Does not wait until a new worker is up.
        """
        ...

    def release(self, worker: Any) -> None:
        """Take a worker back, to keep it or to end it."""
        ...

    def publish(self, value: object, description: str) -> SharedValue:
        """Make a value available to all workers of places like this one."""
        ...


# --- in the worker -------------------------------------------------------------------------------------------

_thread = threading.local()


def interrupted() -> bool:
    """Return True, within a task, if the worker's owner has asked the task to stop."""
    check = getattr(_thread, "interrupted", None)
    return check is not None and check()


def set_interrupt_check(check: Callable[[], bool]) -> None:
    """Set the function that `interrupted` calls in this thread."""
    _thread.interrupted = check
