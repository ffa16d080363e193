"""Workers in processes of their own: started by the fork server, kept for a while when idle.

Messages go over a socket, arrays through shared memory.
"""

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

from modelfleet.workers import channel, fork_server_client
from modelfleet.workers.entry import Setup
from modelfleet.workers.heartbeat import SilenceTimer
from modelfleet.workers.parcels import Inbox, Outbox, Parcel, SharedMemoryValue, pack
from modelfleet.workers.protocol import Task, WorkerDiedError
from modelfleet.workers.shared_memory import close_descriptors
from modelfleet.workers.source_files import FileStamps, have_changed
from modelfleet.workers.task_runner import END, ERROR, ITEM, PING, SETUP, START

IDLE_SILENCE_LIMIT = 10.0  # seconds without a heartbeat after which a worker that waits for a message is frozen
BUSY_SILENCE_LIMIT = 120.0  # the same for a worker that computes or loads: some code holds up all threads
PING_TIMEOUT = 1.0  # seconds that an idle worker has to answer before it is hired again
IDLE_LIFETIME = 60.0  # seconds that an idle worker is kept
MAX_IDLE = max(4, os.cpu_count() or 1)  # idle workers that are kept
CHECK_INTERVAL = 0.5  # seconds between two checks for frozen workers


class ProcessWorker:
    """One process. `env` is set in it before anything is imported."""

    max_ahead = 1

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self.last_job: object = None
        self.busy = self.starting = False
        self.files: FileStamps = {}
        """Files of the user's own modules that the process has loaded."""
        self.idle_since = 0.0
        self._messages: deque[tuple[str, Any, list[int]]] = deque()  # read, but not received yet
        self._outbox, self._inbox = Outbox(), Inbox()
        self._setup = Setup.current(self.env)
        self._channel, self.process, self._heartbeat = fork_server_client.spawn()
        self._silence = SilenceTimer()
        self._begun_before = self._pings = 0
        _all.add(self)
        with suppress(WorkerDiedError):  # `receive` will raise it
            self._send(SETUP, self._setup)

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return self.process.alive

    @property
    def answers_begun(self) -> int:
        """Number of answers that the task has started to work on."""
        return self._heartbeat.answers_begun - self._begun_before

    @property
    def silent_seconds(self) -> float:
        """Seconds of this process's own running time without a heartbeat."""
        if self._heartbeat.beats:
            return self._silence.read(self._heartbeat.beats)
        # Until the worker is up, the fork server's heartbeat counts, which stands still while it imports.
        server = self.process.server.heartbeat
        return self._silence.read(time.monotonic() if server.busy or not server.beats else server.beats)

    @property
    def frozen(self) -> bool:
        """True if the process has been silent for too long."""
        return self.silent_seconds > (BUSY_SILENCE_LIMIT if self._heartbeat.busy else IDLE_SILENCE_LIMIT)

    def start(self, task: Task, argument: object, description: str) -> None:
        """Begin a task; see `Worker.start`. The argument's arrays belong to the task as long as it runs."""
        parcel, descriptors = pack((task, argument), description)
        try:
            now = Setup.current(self.env)
            if now != self._setup:
                self._send(SETUP, now)
                self._setup = now
            self._begun_before = self._heartbeat.answers_begun
            self.busy = self.starting = True
            self._send(START, tuple(parcel), descriptors)
        finally:
            close_descriptors(descriptors)

    def answer(self, value: object = None) -> None:
        """Let the task continue after an item."""
        parcel, descriptors = self._outbox.pack(value, "an answer")
        try:
            self._send(ITEM, tuple(parcel), descriptors)
        finally:
            close_descriptors(descriptors)

    def interrupt(self) -> None:
        """Ask the task to stop soon."""
        with suppress(WorkerDiedError):
            self._send(END, None)

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Return True if the worker has an item, has died, or is frozen, within `seconds`."""
        return bool(self.wait([self], seconds))

    def receive(self) -> tuple[bool, Any]:
        """Wait for the next item, and return it; see `Worker.receive`."""
        self.poll(None)
        if not self._messages:
            raise WorkerDiedError(self._death_reason())
        kind, value, descriptors = self._messages.popleft()
        self.starting, self.busy = False, kind == ITEM
        if kind == ITEM:
            return True, self._inbox.unpack(Parcel(*value), descriptors)
        self._outbox.close()
        self._inbox.close()
        if kind == ERROR:
            error, trace, self.files = value
            error.add_note(f"In a worker process:\n{trace}")
            raise error
        self.files = value
        return False, None

    def close(self) -> None:
        """End the process at once."""
        if self.alive and not self._heartbeat.beats and self.silent_seconds > PING_TIMEOUT:
            self.process.server.kill()  # it has not started this worker, and would start no other
        self.process.kill()
        self._channel.close()
        self._outbox.close()
        self._inbox.close()
        for _, _, descriptors in self._messages:
            close_descriptors(descriptors)

    def ping(self) -> bool:
        """Return True if the process answers now."""
        self._pings += 1
        with suppress(WorkerDiedError):
            self._send(PING, self._pings)
            end = time.monotonic() + PING_TIMEOUT
            while self.alive and self._heartbeat.last_ping < self._pings and time.monotonic() < end:
                time.sleep(0.0005)
        return self.alive and self._heartbeat.last_ping >= self._pings

    def is_current(self) -> bool:
        """Return True if a new process would load the same files, with the same variables, as this one did."""
        now = Setup.current(self.env)
        return not (
            have_changed(self.files)
            or now.path != self._setup.path
            or fork_server_client.differ_at_import(self._setup.environ, now.environ)
        )

    def abandon(self) -> None:
        """Leave the process to the parent, in a forked child."""
        self._channel.abandon()
        self.process.abandon()
        self._messages.clear()

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float | None) -> list[Self]:
        """Return the workers that have an item, have died or are frozen; wait up to `seconds` for the first."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            ready = [worker for worker in workers if worker._read()]
            left = CHECK_INTERVAL if end is None else min(CHECK_INTERVAL, end - time.monotonic())
            if ready or left <= 0:
                return ready or [worker for worker in workers if not worker.alive]
            readable = channel.wait(
                [one for worker in workers for one in (worker._channel, worker.process.status)], left
            )
            if not readable:
                lost = [worker for worker in workers if worker.frozen]
            else:
                lost = [worker for worker in workers if worker.process.status in readable and not worker.alive]
            if lost:
                return [worker for worker in workers if worker in lost or worker._read()]

    def _read(self) -> bool:
        """Read what has arrived. Return True if there is something to receive, a closed socket included."""
        if not self._messages and (message := self._channel.next()) is not None:
            self._messages.append((*pickle.loads(message[0]), message[1]))
        return bool(self._messages) or self._channel.ended or self._channel.fileno() < 0

    def _send(self, kind: str, value: object, descriptors: Sequence[int] = ()) -> None:
        try:
            self._channel.send(pickle.dumps((kind, value)), descriptors, keep_waiting=lambda: not self.frozen)
        except OSError as error:
            raise WorkerDiedError(self._death_reason()) from error

    def _death_reason(self) -> str:
        if self.alive and not self._channel.ended and self.frozen:
            return f"its worker process is frozen: it has given no sign of life for {self.silent_seconds:.0f} s"
        return self.process.death_reason()


@dataclass(frozen=True)
class ProcessPlace:
    """Starts worker processes for a device of this machine."""

    name: str
    device: str
    env: Mapping[str, str] = field(default_factory=dict)
    on_cluster = False

    def hire(self, last_job: object = None) -> ProcessWorker:
        """Return an idle worker, preferably one whose `last_job` was this, or a new one."""
        while True:
            with _idle_changed:
                matching = [worker for worker in _idle if worker.env == dict(self.env)]
                if not matching:
                    break
                worker = max(matching, key=lambda worker: worker.last_job == last_job)
                _idle.remove(worker)
            if worker.is_current() and worker.ping():
                return worker
            worker.close()
        return ProcessWorker(self.env)

    def release(self, worker: ProcessWorker) -> None:
        """Keep a worker to be hired again. End it if it is busy, or if enough workers are idle."""
        global _idle_thread
        with _idle_changed:
            if worker.alive and not worker.busy and len(_idle) < MAX_IDLE:
                worker.idle_since = time.monotonic()
                _idle.append(worker)
                if _idle_thread is None:
                    _idle_thread = threading.Thread(target=_expire_idle, name="modelfleet-idle", daemon=True)
                    _idle_thread.start()
                return
        worker.close()

    def publish(self, value: object, description: str) -> SharedMemoryValue:
        """Put a value into shared memory."""
        return SharedMemoryValue.put(value, description)


_all: WeakSet[ProcessWorker] = WeakSet()
_idle: list[ProcessWorker] = []
_idle_changed = threading.Condition()
_idle_thread: threading.Thread | None = None


def idle_count() -> int:
    """Return the number of idle workers."""
    return sum(worker.alive for worker in list(_idle))


def hired_pids() -> list[int]:
    """Return the process ids of the workers that are hired."""
    hired = [worker for worker in list(_all) if worker.alive and worker not in _idle]
    return [worker.process.pid for worker in hired if worker.process.pid is not None]


def _expire_idle() -> None:
    """End workers that have been idle for too long, and dismiss the fork server after the last one."""
    global _idle_thread
    while True:
        with _idle_changed:
            now = time.monotonic()
            expired = [worker for worker in _idle if now - worker.idle_since >= IDLE_LIFETIME or not worker.alive]
            for worker in expired:
                _idle.remove(worker)
            none_left = not _idle and not any(worker.alive for worker in list(_all) if worker not in expired)
            if none_left:
                _idle_thread = None
            elif not expired:
                _idle_changed.wait(IDLE_LIFETIME / 4)
        for worker in expired:
            worker.close()
        if none_left:
            fork_server_client.dismiss()
            return


@atexit.register
def dismiss() -> None:
    """End all idle workers, and the fork server if it has no others."""
    while True:
        with _idle_changed:
            if not _idle:
                break
            worker = _idle.pop()
        worker.close()
    fork_server_client.dismiss()


def _abandon_after_fork() -> None:
    """Leave to the parent, in a forked child, what the parent has hired."""
    global _idle_changed, _idle_thread
    _idle_changed, _idle_thread = threading.Condition(), None
    _idle.clear()
    for worker in list(_all):
        worker.abandon()
    _all.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)
