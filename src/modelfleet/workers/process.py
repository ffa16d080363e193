"""A worker: a spawned process that runs generators for this one.

    worker.start(task, order)           # task(order) is a generator function, run in the worker
    more, item = worker.receive()       # its items come one by one
    worker.answer(value)                # and each `yield` there gives what was answered

The worker waits after every item until it is answered. When it dies, `receive` raises `WorkerDiedError` with what
is known of its death.
"""

import atexit
import os
import signal
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any

from modelfleet.errors import FleetError
from modelfleet.workers import shared

_START, _ITEM, _END, _ERROR, _READY = "start", "item", "end", "error", "ready"


class WorkerDiedError(FleetError):
    """A worker process is gone."""


class Worker:
    """One spawned process. `env` is set in it before anything is imported."""

    def __init__(self, env: Mapping[str, str]) -> None:
        context = get_context("spawn")
        self.env = dict(env)
        self.last: object = None
        """What it worked on last; whoever hires it may note it."""
        self.memory: Any = None
        self.busy = False
        """Whether it has begun something that it has not ended."""
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs,), name="modelfleet-worker", daemon=True)
        before = {name: os.environ.get(name) for name in env}
        os.environ.update(env)  # inherited: what the main module imports anew sees it, too
        try:
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

    def start(self, task: Callable[[Any], Generator[Any, Any, None]], order: Any, what: str) -> None:
        """Have it run a generator function on an order."""
        parcel, self.memory = shared.pack((task, order), what)
        self.busy = True
        self._send((_START, parcel))

    def answer(self, value: Any = None) -> None:
        """Let it go on after an item."""
        self._send((_ITEM, value))

    def interrupt(self) -> None:
        """Tell it, between two items, that it is to stop soon; the generator asks `interrupted`."""
        with suppress(WorkerDiedError):
            self._send((_END, None))

    def receive(self) -> tuple[bool, Any]:
        """The next item, and whether there is one; blocks until then."""
        while True:
            try:
                kind, value = self.pipe.recv()
            except (EOFError, OSError) as error:
                raise WorkerDiedError(self._obituary()) from error
            if kind == _READY:
                shared.discard(self.memory, unlink=True)
                self.memory = None
                continue
            self.busy = kind == _ITEM
            if kind == _ERROR:
                error, trace = value
                error.add_note(f"In a worker process:\n{trace}")
                raise error
            return kind == _ITEM, value

    def close(self) -> None:
        """End it."""
        shared.discard(self.memory, unlink=True)
        self.memory = None
        with suppress(OSError):
            self.pipe.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
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


def wait(workers: list[Worker]) -> list[Worker]:
    """Those that have something to say, or have died; blocks until there is one."""
    ready = connection.wait([worker.pipe for worker in workers])
    return [worker for worker in workers if worker.pipe in ready]


_idle: list[Worker] = []


def hire(env: Mapping[str, str], last: object = None) -> Worker:
    """A worker with this environment: an idle one, best the one that worked on `last`, or a new one."""
    for worker in [w for w in _idle if not w.alive]:
        _idle.remove(worker)
        worker.close()
    fitting = [worker for worker in _idle if worker.env == dict(env)]
    fitting.sort(key=lambda worker: worker.last == last, reverse=True)
    if not fitting:
        return Worker(env)
    _idle.remove(fitting[0])
    return fitting[0]


def idle() -> int:
    """How many workers there are that have nothing to do."""
    return sum(worker.alive for worker in _idle)


def release(worker: Worker, *, most: int = 4) -> None:
    """Keep a worker for whoever needs one next: starting one takes seconds. One that is still busy is ended."""
    if worker.alive and not worker.busy and len(_idle) < most:
        _idle.append(worker)
    else:
        worker.close()


@atexit.register
def dismiss() -> None:
    """End all idle workers."""
    while _idle:
        _idle.pop().close()


# --- in the worker -------------------------------------------------------------------------------------------

_pipe: Connection | None = None
_told_to_stop = False


def interrupted() -> bool:
    """In a worker: whether its owner wants it to stop soon."""
    global _told_to_stop
    while not _told_to_stop and _pipe is not None and _pipe.poll():
        kind, _ = _pipe.recv()
        _told_to_stop = kind == _END
    return _told_to_stop


def _main(pipe: Connection) -> None:
    global _pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to hear
    _pipe = pipe
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            _, parcel = _awaited(pipe, _START)
            try:
                _run(pipe, parcel)
            except Exception as error:
                pipe.send((_ERROR, (_portable(error), traceback.format_exc())))


def _run(pipe: Connection, parcel: shared.Parcel) -> None:
    global _told_to_stop
    _told_to_stop = False
    (task, order), memory = shared.unpack(parcel)
    pipe.send((_READY, None))  # the memory can be unlinked now; it lives on here
    running = task(order)
    del order
    try:
        item = next(running, None)
        while item is not None:
            pipe.send((_ITEM, item))
            _, answer = _awaited(pipe, _ITEM)
            try:
                item = running.send(answer)
            except StopIteration:
                break
    finally:
        running.close()
        del running
        shared.discard(memory, unlink=False)
    pipe.send((_END, None))


def _awaited(pipe: Connection, kind: str) -> tuple[str, Any]:
    """The next message of a kind; being told to stop is noted, whenever it comes."""
    global _told_to_stop
    while True:
        message = pipe.recv()
        if message[0] == kind:
            return message
        _told_to_stop = True


def _portable(error: Exception) -> Exception:
    """An error that can be sent: itself, or its words."""
    try:
        shared.pack(error, "an error")
        return error
    except FleetError:
        return RuntimeError(f"{type(error).__name__}: {error}")
