"""The nursery: a small clean process that starts workers for one program, by forking itself.

It has imported what workers need, and nothing of the user's: so a worker is there at once, and the user's script
is never run again. It has one thread, computes nothing, and ends when its owner does; its workers end with it.
"""

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from modelfleet.workers import pieces
from modelfleet.workers.channel import Channel
from modelfleet.workers.entry import adopt, work
from modelfleet.workers.signs import BEAT, Signs

UNSAFE = ("tensorflow", "keras", "jax", "ray")  # have threads, or look at the environment, once they are imported


def command(module: str, *numbers: int) -> list[str]:
    """The command that runs `main(*numbers)` of a module of ours, and finds modules where this process does."""
    code = f"import sys; given = sys.argv[1:]; sys.path[:] = given[{len(numbers)}:]; " + (
        f"from {module} import main; main(*map(int, given[:{len(numbers)}]))"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return [sys.executable, *flags, "-c", code, *map(str, numbers), *sys.path]


def main(connection: int, signs: int) -> None:
    """Start workers until the owner is gone."""
    for number in (signal.SIGINT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    adopt()
    sys.path[:] = map(os.path.abspath, sys.path)
    os.chdir(os.sep)  # the owner's folder may be removed while this process is there
    nursery = _Nursery(Channel(socket.socket(fileno=connection)), Signs(signs))
    os.close(signs)
    try:
        nursery.run()
    finally:
        nursery.end()
        os._exit(0)


class _Nursery:
    def __init__(self, owner: Channel, signs: Signs) -> None:
        self._owner = owner
        self._signs = signs
        self._workers: dict[int, Channel | None] = {}  # by process: whom to tell how it ended, if anybody cares
        self._tried: set[str] = set()
        self._bell, ringing = socket.socketpair()  # rings when a child has ended
        self._bell.setblocking(False)
        ringing.setblocking(False)
        self._ringing = ringing
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ringing.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Hear the owner, and the end of workers."""
        while not self._owner.ended:
            self._signs.beats += 1
            poll = select.poll()
            lives = {life.fileno(): process for process, life in self._workers.items() if life is not None}
            for descriptor in (self._owner.fileno(), self._bell.fileno(), *lives):
                poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(BEAT * 1000)]
            if self._bell.fileno() in ready:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)
                self._reap()
            for descriptor in ready:
                if lives.get(descriptor) in self._workers:  # its owner has no use for it any more
                    self._kill(lives[descriptor])
            while (message := self._owner.next()) is not None:
                modules, fork = pickle.loads(message[0])
                self._start(modules, fork, message[1])

    def end(self) -> None:
        """End all workers, and what they have left behind."""
        for process in [*self._workers]:
            self._kill(process)
        with suppress(ChildProcessError):
            while True:
                for process in _children():
                    _kill(process)
                os.waitpid(-1, 0)

    def _start(self, modules: Sequence[str], fork: bool, descriptors: list[int]) -> None:
        """Start a worker.

        Of it come its socket, the socket to tell of its end, its signs of life, its output and its errors.
        """
        own, life, *rest = descriptors
        teller = Channel(socket.socket(fileno=life))
        try:
            self._import(modules)
            process = self._forked(own, *rest) if fork and _safe() else _spawned(own, *rest)
            self._workers[process] = teller
            pidfd = [os.pidfd_open(process)] if hasattr(os, "pidfd_open") else []
            with suppress(OSError):
                teller.send(pickle.dumps(("process", process)), pidfd)
            pieces.close(pidfd)
        except OSError as error:  # no more processes, or no memory
            with suppress(OSError):
                teller.send(pickle.dumps(("refused", str(error))))
            teller.close()
        finally:
            pieces.close([own, *rest])

    def _import(self, modules: Sequence[str]) -> None:
        missing = [name for name in modules if name not in sys.modules and name not in self._tried]
        if missing:
            self._signs.busy = 1
            for name in missing:
                self._tried.add(name)
                with suppress(Exception):  # then the worker will say what is wrong with it
                    importlib.import_module(name)
            gc.collect()
            gc.freeze()  # so that a worker's collector does not touch, and thereby copy, all of this
            self._signs.busy = 0

    def _forked(self, own: int, signs: int, output: int, errors: int) -> int:
        parent = os.getpid()
        process = os.fork()
        if not process:
            self._become(own, signs, output, errors, parent)
        return process

    def _become(self, own: int, signs: int, output: int, errors: int, parent: int) -> None:
        """In the child: be a worker, and nothing else any more."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            os.close(output)
            os.close(errors)
            for channel in (self._owner, *self._workers.values()):
                if channel is not None:
                    channel.forget()
            self._bell.close()
            self._ringing.close()
            del self._signs
            work(socket.socket(fileno=own), signs, parent)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Tell of the workers that have ended; what they had started, and did not end, ends now."""
        ended = False
        with suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if not process:
                    break
                if process not in self._workers:
                    continue
                ended = True
                life = self._workers.pop(process)
                if life is not None:
                    with suppress(OSError):
                        life.send(pickle.dumps(("ended", os.waitstatus_to_exitcode(status))))
                    life.close()
        if ended:
            for orphan in _children() - self._workers.keys():
                _kill(orphan)

    def _kill(self, process: int) -> None:
        _kill(process)
        life, self._workers[process] = self._workers[process], None
        if life is not None:
            life.close()


def _safe() -> bool:
    """Whether this process can be forked: it has one thread, and nothing in it that minds."""
    return (
        sys.platform == "linux"
        and len(os.listdir("/proc/self/task")) == 1
        and not any(name in sys.modules for name in UNSAFE)
    )


def _spawned(own: int, signs: int, output: int, errors: int) -> int:
    """A worker as a program of its own."""
    kept = (own, signs)
    started = subprocess.Popen(
        command("modelfleet.workers.entry", own, signs, os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        pass_fds=kept,
    )
    started.returncode = 0  # it is waited for with all others
    return started.pid


def _children() -> set[int]:
    """The processes whose parent this is now."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return {int(process) for process in file.read().split()}
    return set()


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
