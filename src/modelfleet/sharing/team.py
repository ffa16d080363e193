"""Teams: workers on several devices that take the same steps together, each on its part of the rows."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from modelfleet.errors import GroupError
from modelfleet.workers import Place, SharedValue, Task, Worker, WorkerDiedError
from modelfleet.workers.rendezvous import Rendezvous

LOOK = 0.5  # seconds between two looks at whether all of a team are there


class TeamWorker:
    """Several workers as one. All do the same; only what the first of them says is heard."""

    max_ahead = 0

    def __init__(self, places: Sequence[Place], workers: Sequence[Worker]) -> None:
        self.last_job: object = None
        self._places, self.workers = list(places), list(workers)
        self._meeting: Rendezvous | None = None

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
    def silent_seconds(self) -> float:
        """Since when nothing was heard of the one that was heard of last."""
        return max(worker.silent_seconds for worker in self.workers)

    @property
    def answers_begun(self) -> int:
        """How many answers the furthest of them has begun with."""
        return max(worker.answers_begun for worker in self.workers)

    @property
    def frozen(self) -> bool:
        """Whether nothing is to be expected of one of them."""
        return any(worker.frozen for worker in self.workers)

    def start(self, task: Task, argument: Any, description: str) -> None:
        """Have all of them begin, each with its rank and on its device."""
        address = self._address()
        size = len(self.workers)
        for rank, (place, worker) in enumerate(zip(self._places, self.workers, strict=True)):
            own = replace(argument, devices=argument.on(place.device), parallel=(address, rank, size))
            worker.start(task, own, description)

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

    def _address(self) -> "str | Rendezvous":
        """A new address for the ranks to meet at: on the first one's machine, or a file of this one."""
        host = getattr(self._places[0], "host", None)
        if host is not None:
            return f"tcp://{host}:{20_000 + secrets.randbelow(10_000)}"
        self._forget()
        self._meeting = Rendezvous()
        return self._meeting

    def _forget(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


@dataclass(frozen=True)
class TeamPlace:
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

    @property
    def on_cluster(self) -> bool:
        """True if a cluster runs the workers."""
        return self.places[0].on_cluster

    def hire(self, last_job: object = None) -> TeamWorker:
        """A worker at each."""
        return TeamWorker(self.places, [place.hire(last_job) for place in self.places])

    def release(self, worker: TeamWorker) -> None:
        """Have them back."""
        for place, one in zip(self.places, worker.workers, strict=True):
            place.release(one)
        worker._forget()

    def share(self, value: Any, description: str) -> SharedValue:
        """A value for all of them."""
        return self.places[0].share(value, description)
