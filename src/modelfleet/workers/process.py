"""Workers in processes of their own: spawned, fed by a pipe and shared memory, kept when they are idle."""

import atexit
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, Self

from modelfleet.workers import shared
from modelfleet.workers._base import Task, WorkerDiedError, listen

START, ITEM, END, ERROR, READY, TAKEN = "start", "item", "end", "error", "ready", "taken"
_environment = threading.Lock()


class ProcessWorker:
    """One spawned process. `env` is set in it before anything is imported."""

    ahead = 1
    silent = 0.0

    def __init__(self, env: Mapping[str, str]) -> None:
        context = get_context("spawn")
        self.token = token = f"mf-{secrets.token_hex(8)}"
        """What the names of its shared memory begin with."""
        self.env = dict(env)
        self.last: object = None
        self.busy = self.starting = False
        self.taken = 0
        self._order: Any = None  # the memory of an order that was not read yet
        self._heard: deque[tuple[str, Any]] = deque()  # what was read and not received yet
        self._pipe, theirs = context.Pipe()
        self._outbox, self._inbox = shared.Outbox(f"{token}-in"), shared.Inbox(f"{token}-out")
        self.process = context.Process(target=_main, args=(theirs, token), name="modelfleet-worker", daemon=True)
        with _environment:
            before = {name: os.environ.get(name) for name in env}
            os.environ.update(env)  # inherited: what the main module imports anew sees it, too
            try:
                with _without_a_script():
                    self.process.start()
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return self.process.is_alive()

    def start(self, task: Task, order: Any, what: str) -> None:
        """Have it begin a task. The order's arrays are its own, as long as the task runs."""
        parcel, self._order = shared.pack((task, order), what)
        self.busy = self.starting = True
        self.taken = 0
        self._send((START, parcel))

    def answer(self, value: Any = None) -> None:
        """Let it go on after an item."""
        self._send((ITEM, self._outbox.pack(value, "an answer")))

    def interrupt(self) -> None:
        """Tell it that it is to stop soon."""
        with suppress(WorkerDiedError):
            self._send((END, None))

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether it has something to say, or has died."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self._heard:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not connection.wait([self._pipe], left):
                return False
            if not self._read():
                return True
        return True

    def _read(self) -> bool:
        """Read one message; False if the worker has died."""
        try:
            kind, value = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return False
        if kind == READY:
            shared.discard(self._order, unlink=True)
            self._order = None
        elif kind == TAKEN:
            self.taken += 1
        else:
            self._heard.append((kind, value))
        return True

    def receive(self) -> tuple[bool, Any]:
        """The next item, and whether there is one; blocks until then."""
        self.poll(None)
        if not self._heard:
            raise WorkerDiedError(self._obituary())
        kind, value = self._heard.popleft()
        self.starting = False
        self.busy = kind == ITEM
        if kind == ERROR:
            error, trace = value
            error.add_note(f"In a worker process:\n{trace}")
            raise error
        return (True, self._inbox.unpack(value)) if kind == ITEM else (False, None)

    def close(self) -> None:
        """End it."""
        shared.discard(self._order, unlink=True)
        self._order = None
        with suppress(OSError):
            self._pipe.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._outbox.close()
        self._inbox.close(sweep=True)

    @classmethod
    def wait(cls, workers: Sequence[Self]) -> list[Self]:
        """Those that have something to say, or have died; blocks until there is one."""
        while True:
            told = any(worker._heard for worker in workers)
            ready = connection.wait([worker._pipe for worker in workers], 0.0 if told else None)
            found = [worker for worker in workers if worker._heard or (worker._pipe in ready and worker.poll())]
            if found:
                return found

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send_bytes(pickle.dumps(message))
        except OSError as error:
            raise WorkerDiedError(self._obituary()) from error

    def _obituary(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            return "its worker process closed its pipe"
        if code < 0:
            hint = ", which the system does for want of memory" if -code == signal.SIGKILL else ""
            return f"its worker process was killed by {signal.Signals(-code).name}{hint}"
        return (
            f"its worker process ended with code {code}. A script that uses processes keeps what it runs under "
            f'if __name__ == "__main__":'
        )


@contextmanager
def _without_a_script() -> Iterator[None]:
    """Within this context a new process does not look for a script that is none, as in `python -`."""
    main = sys.modules["__main__"]
    named = getattr(main, "__file__", None)
    if named is None or shared.importable_main():
        yield
        return
    main.__file__ = None
    try:
        yield
    finally:
        main.__file__ = named


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


_idle: list[ProcessWorker] = []
_hiring = threading.Lock()


def hire(env: Mapping[str, str], last: object = None) -> ProcessWorker:
    """A worker with this environment: an idle one, best the one that worked on `last`, or a new one."""
    with _hiring:
        for worker in [w for w in _idle if not w.alive]:
            _idle.remove(worker)
            worker.close()
        fitting = [worker for worker in _idle if worker.env == dict(env)]
        fitting.sort(key=lambda worker: worker.last == last, reverse=True)
        if fitting:
            _idle.remove(fitting[0])
            return fitting[0]
    return ProcessWorker(env)


def idle() -> int:
    """How many workers there are that have nothing to do."""
    return sum(worker.alive for worker in _idle)


def release(worker: ProcessWorker, *, most: int = 4) -> None:
    """Keep a worker for whoever needs one next: starting one takes seconds. One that is still busy is ended."""
    with _hiring:
        if worker.alive and not worker.busy and len(_idle) < max(most, os.cpu_count() or 1):
            _idle.append(worker)
            return
    worker.close()


@atexit.register
def dismiss() -> None:
    """End all idle workers."""
    while _idle:
        _idle.pop().close()


# --- in the worker -------------------------------------------------------------------------------------------


def _main(pipe: Connection, token: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to hear
    host = _Host(pipe, token)
    listen(host.interrupted)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            parcel = host.awaited(START)
            try:
                host.run(parcel)
            except Exception as error:
                host.fail(error)


class _Host:
    def __init__(self, pipe: Connection, token: str) -> None:
        self._pipe = pipe
        self._inbox, self._outbox = shared.Inbox(f"{token}-in"), shared.Outbox(f"{token}-out")
        self._told_to_stop = False
        self._early: deque[tuple[str, Any]] = deque()  # what came before it was waited for

    def run(self, parcel: shared.Parcel) -> None:
        self._told_to_stop = False
        (task, order), memory = shared.unpack(parcel)
        self._say((READY, None))  # the memory can be unlinked now; it lives on here
        running = task(order)
        del order
        try:
            item = next(running)
            while True:
                self._say((ITEM, self._outbox.pack(item, "a result")))
                answer = self.awaited(ITEM)
                self._say((TAKEN, None))
                item = running.send(self._inbox.unpack(answer))
        except StopIteration:
            pass
        finally:
            running.close()
            del running
            shared.discard(memory, unlink=False)
        self._say((END, None))

    def fail(self, error: Exception) -> None:
        """Tell what a task has raised."""
        self._say((ERROR, (shared.portable(error), traceback.format_exc())))

    def _say(self, message: Any) -> None:
        self._pipe.send_bytes(pickle.dumps(message))

    def awaited(self, kind: str) -> Any:
        """The next message of a kind; being told to stop is noted, whenever it comes."""
        while True:
            found, value = self._early.popleft() if self._early else self._next()
            if found == kind:
                return value
            self._told_to_stop = True

    def interrupted(self) -> bool:
        while not self._told_to_stop and self._pipe.poll():
            message = self._next()
            if message[0] == END:
                self._told_to_stop = True
            else:
                self._early.append(message)
        return self._told_to_stop

    def _next(self) -> tuple[str, Any]:
        return pickle.loads(self._pipe.recv_bytes())
