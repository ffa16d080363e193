"""Workers in processes of their own: started by the nursery, fed by a socket and shared memory, kept when idle."""

import atexit
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakSet

from modelfleet.workers import channel, code, pieces, shared, starting
from modelfleet.workers._base import Task, WorkerDiedError
from modelfleet.workers.entry import setup
from modelfleet.workers.host import END, ERROR, ITEM, PING, SETUP, START
from modelfleet.workers.signs import Silence

QUIET = 10.0  # seconds without a sign of life after which a worker that waits for a message is taken for frozen
HARD_AT_WORK = 120.0  # and one that is at something, which may keep it from giving signs
ANSWERING = 1.0  # seconds that an idle worker has to show that it is there
KEPT = 60.0  # seconds that an idle worker is kept
LOOK = 0.5  # seconds between two looks at whether a worker is frozen


class ProcessWorker:
    """One process. `env` is set in it before anything is imported."""

    ahead = 1

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self.last: object = None
        self.busy = self.starting = False
        self.files: code.Files = {}
        """The user's own modules that it has loaded."""
        self.idle_since = 0.0
        self._heard: deque[tuple[str, Any, list[int]]] = deque()  # what was read and not received yet
        self._outbox, self._inbox = shared.Outbox(), shared.Inbox()
        self._setup = setup(self.env)
        self._channel, self.process, self._signs = starting.hire()
        self._silence = Silence()
        self._taken = self._pings = 0
        _all.add(self)
        with suppress(WorkerDiedError):  # whoever receives something will hear of it
            self._send(SETUP, self._setup)

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return self.process.alive

    @property
    def taken(self) -> int:
        """How many answers the task has begun with."""
        return self._signs.taken - self._taken

    @property
    def silent(self) -> float:
        """Seconds of this process's own running time without a sign of life."""
        nursery = self.process.home.signs
        if self._signs.beats:
            return self._silence.look(self._signs.beats)
        # Until it is there, the nursery has to show that it is; which it can't while it imports.
        return self._silence.look(time.monotonic() if nursery.busy or not nursery.beats else nursery.beats)

    @property
    def frozen(self) -> bool:
        """Whether it has been silent for so long that nothing is to be expected of it."""
        return self.silent > (HARD_AT_WORK if self._signs.busy else QUIET)

    def start(self, task: Task, order: Any, what: str) -> None:
        """Have it begin a task. The order's arrays are its own, as long as the task runs."""
        parcel, descriptors = shared.pack((task, order), what)
        try:
            now = setup(self.env)
            if now != self._setup:
                self._send(SETUP, now)
                self._setup = now
            self._taken = self._signs.taken
            self.busy = self.starting = True
            self._send(START, tuple(parcel), descriptors)
        finally:
            pieces.close(descriptors)

    def answer(self, value: Any = None) -> None:
        """Let it go on after an item."""
        parcel, descriptors = self._outbox.pack(value, "an answer")
        try:
            self._send(ITEM, tuple(parcel), descriptors)
        finally:
            pieces.close(descriptors)

    def interrupt(self) -> None:
        """Tell it that it is to stop soon."""
        with suppress(WorkerDiedError):
            self._send(END, None)

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether it has something to say, has died, or is frozen."""
        return bool(self._ready([self], seconds))

    def receive(self) -> tuple[bool, Any]:
        """The next item, and whether there is one; blocks until then."""
        self.poll(None)
        if not self._heard:
            raise WorkerDiedError(self._obituary())
        kind, value, descriptors = self._heard.popleft()
        self.starting, self.busy = False, kind == ITEM
        if kind == ITEM:
            return True, self._inbox.unpack(shared.Parcel(*value), descriptors)
        self._outbox.close()
        self._inbox.close()
        if kind == ERROR:
            error, trace, self.files = value
            error.add_note(f"In a worker process:\n{trace}")
            raise error
        self.files = value
        return False, None

    def close(self) -> None:
        """End it."""
        if self.alive and not self._signs.beats and self.silent > ANSWERING:
            self.process.home.kill()  # it has not started this one, and would start no other
        self.process.kill()
        self._channel.close()
        self._outbox.close()
        self._inbox.close()
        for _, _, descriptors in self._heard:
            pieces.close(descriptors)

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Those that have something to say, have died or are frozen; waits at most so long until there is one."""
        return cls._ready(workers, seconds)

    def ping(self) -> bool:
        """Whether it is there and hears, now."""
        self._pings += 1
        with suppress(WorkerDiedError):
            self._send(PING, self._pings)
            end = time.monotonic() + ANSWERING
            while self.alive and self._signs.pong < self._pings and time.monotonic() < end:
                time.sleep(0.0005)
        return self.alive and self._signs.pong >= self._pings

    def fits(self) -> bool:
        """Whether it has loaded what a new one would load: the files as they are now, with these variables."""
        now = setup(self.env)
        return not (
            code.changed(self.files)
            or now["path"] != self._setup["path"]
            or starting.read_once(self._setup["environ"], now["environ"])
        )

    def forget(self) -> None:
        """In a forked child: leave it to the parent."""
        self._channel.forget()
        self.process.forget()
        self._heard.clear()

    @staticmethod
    def _ready(workers: Sequence[Any], seconds: float | None) -> list[Any]:
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            ready = [worker for worker in workers if worker._news()]
            left = LOOK if end is None else min(LOOK, end - time.monotonic())
            if ready or left <= 0:
                return ready or [worker for worker in workers if not worker.alive]
            channels = [one for worker in workers for one in (worker._channel, worker.process.life)]
            told = channel.wait(channels, left)
            if not told:
                lost = [worker for worker in workers if worker.frozen]
            else:
                lost = [worker for worker in workers if worker.process.life in told and not worker.alive]
            if lost:
                return [worker for worker in workers if worker in lost or worker._news()]

    def _news(self) -> bool:
        """Read what has come; whether there is something to receive, if only that its socket is closed."""
        if not self._heard and (message := self._channel.next()) is not None:
            self._heard.append((*pickle.loads(message[0]), message[1]))
        return bool(self._heard) or self._channel.ended or self._channel.fileno() < 0

    def _send(self, kind: str, value: Any, descriptors: Sequence[int] = ()) -> None:
        try:
            self._channel.send(pickle.dumps((kind, value)), descriptors, patience=lambda: not self.frozen)
        except OSError as error:
            raise WorkerDiedError(self._obituary()) from error

    def _obituary(self) -> str:
        if self.alive and not self._channel.ended and self.frozen:
            return f"its worker process is frozen: it has given no sign of life for {self.silent:.0f} s"
        return self.process.obituary()


@dataclass(frozen=True)
class ProcessPlace:
    """A device of this machine that a process of its own uses."""

    name: str
    device: str
    env: Mapping[str, str] = field(default_factory=dict)

    def hire(self, last: object = None) -> ProcessWorker:
        """An idle worker, best the one that worked on `last`, or a new one."""
        return hire(self.env, last)

    def release(self, worker: ProcessWorker) -> None:
        """Keep it for whoever needs one next."""
        release(worker)

    def share(self, value: Any, what: str) -> shared.InMemory:
        """The value in shared memory."""
        return shared.InMemory.put(value, what)


_all: WeakSet[ProcessWorker] = WeakSet()
_idle: list[ProcessWorker] = []
_hiring = threading.Condition()
_keeper: threading.Thread | None = None


def hire(env: Mapping[str, str], last: object = None) -> ProcessWorker:
    """A worker with this environment: an idle one, best the one that worked on `last`, or a new one."""
    while True:
        with _hiring:
            fitting = [worker for worker in _idle if worker.env == dict(env)]
            if not fitting:
                break
            worker = max(fitting, key=lambda worker: worker.last == last)
            _idle.remove(worker)
        if worker.fits() and worker.ping():
            return worker
        worker.close()
    return ProcessWorker(env)


def idle() -> int:
    """How many workers there are that have nothing to do."""
    return sum(worker.alive for worker in list(_idle))


def at_work() -> list[int]:
    """The process ids of the workers that somebody has hired."""
    hired = [worker for worker in list(_all) if worker.alive and worker not in _idle]
    return [worker.process.pid for worker in hired if worker.process.pid is not None]


def release(worker: ProcessWorker, *, most: int = 4) -> None:
    """Keep a worker for whoever needs one next. One that is still busy is ended."""
    global _keeper
    with _hiring:
        if worker.alive and not worker.busy and len(_idle) < max(most, os.cpu_count() or 1):
            worker.idle_since = time.monotonic()
            _idle.append(worker)
            if _keeper is None:
                _keeper = threading.Thread(target=_keep, name="modelfleet-idle", daemon=True)
                _keeper.start()
            return
    worker.close()


def _keep() -> None:
    """Dismiss workers that nobody has needed for a while, and the nursery with the last of them."""
    global _keeper
    while True:
        with _hiring:
            now = time.monotonic()
            late = [worker for worker in _idle if now - worker.idle_since >= KEPT or not worker.alive]
            for worker in late:
                _idle.remove(worker)
            over = not _idle and not any(worker.alive for worker in list(_all) if worker not in late)
            if over:
                _keeper = None
            elif not late:
                _hiring.wait(KEPT / 4)
        for worker in late:
            worker.close()
        if over:
            starting.dismiss()
            return


@atexit.register
def dismiss() -> None:
    """End all idle workers, and the nursery if it has no others."""
    while True:
        with _hiring:
            if not _idle:
                break
            worker = _idle.pop()
        worker.close()
    starting.dismiss()


def _forget() -> None:
    """In a forked child: what its parent has hired is its parent's."""
    global _hiring, _keeper
    _hiring, _keeper = threading.Condition(), None
    _idle.clear()
    for worker in list(_all):
        worker.forget()
    _all.clear()


os.register_at_fork(after_in_child=_forget)
