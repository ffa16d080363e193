"""Teams: workers on several devices that take the same steps together, each on its part of the rows."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from modelfleet.errors import GroupError
from modelfleet.workers import Place, Shared, Worker, WorkerDiedError
from modelfleet.workers._base import Task
from modelfleet.workers.meeting import Meeting

LOOK = 0.5  # seconds between two looks at whether all of a team are there


class RankedWorkers:
    """Several workers as one. All do the same; only what the first of them says is heard."""

    ahead = 0

    def __init__(self, places: Sequence[Place], workers: Sequence[Worker]) -> None:
        self.last: object = None
        self._places, self.workers = list(places), list(workers)
        self._meeting: Meeting | None = None

    @property
    def alive(self) -> bool:
        """Whether all of them are there."""
        return all(worker.alive for worker in self.workers)

    @property
    def busy(self) -> bool:
        """Whether any of them is at something."""
        return any(worker.busy for worker in self.workers)

    @property
    def starting(self) -> bool:
        """Whether any of them has said nothing since it was given a task."""
        return any(worker.starting for worker in self.workers)

    @property
    def silent(self) -> float:
        """Since when nothing was heard of the one that was heard of last."""
        return max(worker.silent for worker in self.workers)

    @property
    def taken(self) -> int:
        """How many answers the furthest of them has begun with."""
        return max(worker.taken for worker in self.workers)

    @property
    def frozen(self) -> bool:
        """Whether nothing is to be expected of one of them."""
        return any(worker.frozen for worker in self.workers)

    def start(self, task: Task, order: Any, what: str) -> None:
        """Have all of them begin, each with its rank and on its device."""
        address = self._address()
        size = len(self.workers)
        for rank, (place, worker) in enumerate(zip(self._places, self.workers, strict=True)):
            own = replace(order.on(place.device), ranks=(address, rank, size))
            worker.start(task, own, what)

    def receive(self) -> tuple[bool, Any]:
        """What the first says; all have come as far."""
        self.poll(None)
        try:
            for worker in self._lost():
                while not self.workers[0].poll():  # else all have come as far, and it was lost after that
                    worker.receive()
            said = self.workers[0].receive()
            for worker in self.workers[1:]:
                worker.receive()
        except GroupError as error:  # one of them is gone, and another has noticed it first
            raise WorkerDiedError(str(error)) from error
        return said

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether the first has something to say, or will not have, as another is lost."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = LOOK if end is None else min(LOOK, end - time.monotonic())
            if self.workers[0].poll(max(0.0, left)) or self._lost():
                return True
            if left <= 0:
                return False

    def _lost(self) -> list[Worker]:
        return [worker for worker in self.workers[1:] if worker.frozen or not worker.alive]

    def answer(self, value: Any = None) -> None:
        """Let all of them go on."""
        for worker in self.workers:
            worker.answer(value)

    def interrupt(self) -> None:
        """Tell all of them; they agree on the step after which they stop."""
        for worker in self.workers:
            worker.interrupt()

    def close(self) -> None:
        """End all of them."""
        for worker in self.workers:
            worker.close()
        self._forget()

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """There is one team, and it is waited for."""
        return list(workers[:1]) if workers[0].poll(seconds) else []

    def _address(self) -> "str | Meeting":
        """A new address for the ranks to meet at: on the first one's machine, or a file of this one."""
        host = getattr(self._places[0], "host", None)
        if host is not None:
            return f"tcp://{host}:{20_000 + secrets.randbelow(10_000)}"
        self._forget()
        self._meeting = Meeting()
        return self._meeting

    def _forget(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


@dataclass(frozen=True)
class RankedPlace:
    """Several devices as one place."""

    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        """All of their names."""
        return ", ".join(place.name for place in self.places)

    @property
    def device(self) -> str:
        """That of the first."""
        return self.places[0].device

    def hire(self, last: object = None) -> RankedWorkers:
        """A worker at each."""
        return RankedWorkers(self.places, [place.hire(last) for place in self.places])

    def release(self, worker: RankedWorkers) -> None:
        """Have them back."""
        for place, one in zip(self.places, worker.workers, strict=True):
            place.release(one)
        worker._forget()

    def share(self, value: Any, what: str) -> Shared:
        """A value for all of them."""
        return self.places[0].share(value, what)
