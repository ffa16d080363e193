"""What a worker is, wherever it runs.

A worker runs tasks. A task is a generator function; what it yields comes here item by item, and each `yield` gives
what was answered to the item:

    worker.start(task, order, "the members")    # task(order) begins
    more, item = worker.receive()               # its next item; not `more`: it has ended
    worker.answer(value)                        # lets it go on

A place is where workers of one device can be had: in this process, in a process of their own, or on a cluster.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, Self

from modelfleet.errors import FleetError

Task = Callable[[Any], Generator[Any, Any, None]]


class WorkerDiedError(FleetError):
    """A worker is gone; the message says what is known of its death."""


class CannotSendError(FleetError):
    """A value can't be sent to another process; the message says which and why."""


class NoRoomError(CannotSendError):
    """There is no memory to send so much at once."""


class Worker(Protocol):
    """Runs one task at a time. Everything of it raises `WorkerDiedError` once it is gone."""

    last: object
    """What it worked on last; whoever hires it may note it."""
    ahead: int
    """How many answers may be given before the items are received that they are for: 1 where the worker can go on
    with one while its last item is on its way."""

    @property
    def taken(self) -> int:
        """How many answers the task has begun with. Counts up while `poll`, `receive` or `wait` is called."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        ...

    @property
    def busy(self) -> bool:
        """Whether it has begun something that it has not ended."""
        ...

    @property
    def starting(self) -> bool:
        """Whether it was given a task of which no item was received yet. There is no limit to that: `poll` with
        one of your own, and `close` it when that has passed."""
        ...

    @property
    def silent(self) -> float:
        """Seconds of this process's own running time since anything was heard of it, a sign of life included.

        Counted from one look to the next, at most a second for each: so look several times a second. Time in which
        this process itself was stopped, or did not look, does not count.
        """
        ...

    @property
    def frozen(self) -> bool:
        """Whether it has been silent for so long that nothing is to be expected of it: `poll` says that there is
        something to receive then, and `receive` raises `WorkerDiedError`."""
        ...

    def start(self, task: Task, order: Any, what: str) -> None:
        """Have it begin a task. `what` names the order in errors: what can't be sent raises `CannotSendError`."""
        ...

    def receive(self) -> tuple[bool, Any]:
        """The next item, and whether there is one; blocks until then.

        Arrays in it may be gone with the next `receive`. What the task raised is raised here.
        """
        ...

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether `receive` would not block, now or within so many seconds; None: wait for it."""
        ...

    def answer(self, value: Any = None) -> None:
        """Let it go on after an item."""
        ...

    def interrupt(self) -> None:
        """Tell it, whatever it is at, that it is to stop soon; the task asks `interrupted`."""
        ...

    def close(self) -> None:
        """End it at once."""
        ...

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Those that have something to say, or have died; waits at most so long until there is one."""
        ...


class Shared(Protocol):
    """A value that is sent once and seen by all workers of a machine. Part of an order, it is light."""

    def get(self) -> Any:
        """The value, in a worker. Its arrays are only to be read."""
        ...

    def close(self) -> None:
        """Give it up; workers that have it keep it."""
        ...


class Place(Protocol):
    """Where workers for one device can be had."""

    @property
    def name(self) -> str:
        """The device as people name it: "cuda:0", "cpu:1", "ray:0"."""
        ...

    @property
    def device(self) -> str:
        """The device as the worker itself knows it."""
        ...

    def hire(self, last: object = None) -> Worker:
        """A worker: best an idle one that worked on `last`, or a new one. Does not wait until it is up."""
        ...

    def release(self, worker: Any) -> None:
        """Have a worker back, to keep or to end."""
        ...

    def share(self, value: Any, what: str) -> Shared:
        """A value made ready for all workers of places like this one."""
        ...


# --- in the worker -------------------------------------------------------------------------------------------

_here = threading.local()


def interrupted() -> bool:
    """Within a task: whether the worker's owner wants it to stop soon."""
    asked = getattr(_here, "asked", None)
    return asked is not None and asked()


def listen(asked: Callable[[], bool]) -> None:
    """For the host of a task, in its thread: what `interrupted` asks."""
    _here.asked = asked
