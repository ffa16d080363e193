"""Data parallelism: workers on several devices that take the same steps together, each on its part of the rows."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from modelfleet.errors import RankLostError
from modelfleet.remote.messages import LaneOrder, WorkerUpdate
from modelfleet.workers import Place, SharedValue, Task, Worker, WorkerDiedError
from modelfleet.workers.rendezvous import Rendezvous

CHECK_SECONDS = 0.5  # between two checks that all ranks are alive


def new_address(first: Place) -> "str | Rendezvous":
    """Return a new address for ranks to meet at: on the first rank's machine, or a file on this one."""
    host = getattr(first, "host", None)
    return Rendezvous() if host is None else f"tcp://{host}:{20_000 + secrets.randbelow(10_000)}"


class RankedWorkers:
    """Several workers, one for each rank, that act as one. All do the same; the first one reports."""

    max_ahead = 0

    def __init__(self, places: Sequence[Place], workers: Sequence[Worker]) -> None:
        self.last_job: object = None
        self._places, self.workers = list(places), list(workers)
        self._rendezvous: Rendezvous | None = None

    @property
    def alive(self) -> bool:
        """Return True if all ranks are alive."""
        return all(worker.alive for worker in self.workers)

    @property
    def busy(self) -> bool:
        """Return True if any rank has a task."""
        return any(worker.busy for worker in self.workers)

    @property
    def starting(self) -> bool:
        """Return True if any rank has sent nothing since its task was started."""
        return any(worker.starting for worker in self.workers)

    @property
    def silent_seconds(self) -> float:
        """Return the longest time that a rank has given no sign of life."""
        return max(worker.silent_seconds for worker in self.workers)

    @property
    def answers_begun(self) -> int:
        """Return how many answers the furthest rank has begun to handle."""
        return max(worker.answers_begun for worker in self.workers)

    @property
    def frozen(self) -> bool:
        """Return True if any rank is frozen."""
        return any(worker.frozen for worker in self.workers)

    def start(self, task: Task, argument: LaneOrder, description: str) -> None:
        """Start a task on all ranks, each with its rank and on its device."""
        address = self._new_address()
        size = len(self.workers)
        for rank, (place, worker) in enumerate(zip(self._places, self.workers, strict=True)):
            worker.start(task, replace(argument.on(place.device), ranks=(address, rank, size)), description)

    def receive(self) -> tuple[bool, WorkerUpdate]:
        """Return the first rank's item, once all ranks have got as far."""
        self.poll(None)
        try:
            for worker in self._lost():
                while not self.workers[0].poll():  # if it has an item, all ranks had got as far before the loss
                    worker.receive()
            item = self.workers[0].receive()
            for worker in self.workers[1:]:
                worker.receive()
        except RankLostError as error:  # a rank is gone, and another has noticed it first
            raise WorkerDiedError(str(error)) from error
        return item

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Return True if the first rank has an item, or will never have one because another rank is lost."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = CHECK_SECONDS if end is None else min(CHECK_SECONDS, end - time.monotonic())
            if self.workers[0].poll(max(0.0, left)) or self._lost():
                return True
            if left <= 0:
                return False

    def _lost(self) -> list[Worker]:
        return [worker for worker in self.workers[1:] if worker.frozen or not worker.alive]

    def answer(self, value: object = None) -> None:
        """Send an answer to all ranks."""
        for worker in self.workers:
            worker.answer(value)

    def interrupt(self) -> None:
        """Interrupt all ranks. They agree on the step after which they stop."""
        for worker in self.workers:
            worker.interrupt()

    def close(self) -> None:
        """Kill all ranks."""
        for worker in self.workers:
            worker.close()
        self._close_rendezvous()

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Wait for the only worker there is."""
        return list(workers[:1]) if workers[0].poll(seconds) else []

    def _new_address(self) -> "str | Rendezvous":
        """Return a new address for the ranks to meet at, and close that of the last task."""
        self._close_rendezvous()
        address = new_address(self._places[0])
        self._rendezvous = address if isinstance(address, Rendezvous) else None
        return address

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None


@dataclass(frozen=True)
class RankedPlace:
    """Several devices that act as one place."""

    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        """Return the names of all devices."""
        return ", ".join(place.name for place in self.places)

    @property
    def device(self) -> str:
        """Return the first device."""
        return self.places[0].device

    @property
    def on_cluster(self) -> bool:
        """Return True if a cluster runs the workers."""
        return self.places[0].on_cluster

    def hire(self, last_job: object = None) -> RankedWorkers:
        """Hire a worker at each place."""
        return RankedWorkers(self.places, [place.hire(last_job) for place in self.places])

    def release(self, worker: RankedWorkers) -> None:
        """Return all workers to their places."""
        for place, one in zip(self.places, worker.workers, strict=True):
            place.release(one)
        worker._close_rendezvous()

    def publish(self, value: object, description: str) -> SharedValue:
        """Share a value with all workers."""
        return self.places[0].publish(value, description)
