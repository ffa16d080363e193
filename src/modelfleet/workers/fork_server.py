"""Fork server: a small clean process that starts a program's workers by forking itself.

It has imported what workers need, and nothing of the user's: so a worker starts at once, and the user's script is
never run again. It has one thread, computes nothing, and ends when its owner does; its workers end with it.
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

from modelfleet.frameworks import ADAPTERS
from modelfleet.workers.channel import Channel
from modelfleet.workers.entry import adopt_orphans, run_worker
from modelfleet.workers.heartbeat import BEAT_INTERVAL, Heartbeat
from modelfleet.workers.shared_memory import close_descriptors


def command(module: str, *numbers: int) -> list[str]:
    """Return the command that runs `main(*numbers)` of a module with this process's `sys.path`."""
    code = f"import sys; given = sys.argv[1:]; sys.path[:] = given[{len(numbers)}:]; " + (
        f"from {module} import main; main(*map(int, given[:{len(numbers)}]))"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return [sys.executable, *flags, "-c", code, *map(str, numbers), *sys.path]


def main(connection: int, heartbeat: int) -> None:
    """Start workers until the owner is gone."""
    for number in (signal.SIGINT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    sys.path[:] = map(os.path.abspath, sys.path)
    os.chdir(os.sep)  # the owner's directory may be removed while this process runs
    server = _Server(Channel(socket.socket(fileno=connection)), Heartbeat(heartbeat))
    os.close(heartbeat)
    try:
        server.run()
    finally:
        server.end()
        os._exit(0)


class _Server:
    def __init__(self, owner: Channel, heartbeat: Heartbeat) -> None:
        self._owner = owner
        self._heartbeat = heartbeat
        self._workers: dict[int, Channel | None] = {}  # by process: where to report its end, if anywhere
        self._imported: set[str] = set()
        self._child_ended, wakeup = socket.socketpair()  # readable when a child has ended
        self._child_ended.setblocking(False)
        wakeup.setblocking(False)
        self._wakeup = wakeup
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve the owner's requests, and report when workers end."""
        while not self._owner.ended:
            self._heartbeat.beats += 1
            poll = select.poll()
            statuses = {status.fileno(): pid for pid, status in self._workers.items() if status is not None}
            for descriptor in (self._owner.fileno(), self._child_ended.fileno(), *statuses):
                poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(BEAT_INTERVAL * 1000)]
            if self._child_ended.fileno() in ready:
                with suppress(BlockingIOError):
                    self._child_ended.recv(4096)
                self._reap()
            for descriptor in ready:
                if statuses.get(descriptor) in self._workers:  # the owner has closed it
                    self._kill(statuses[descriptor])
            while (message := self._owner.next()) is not None:
                modules, fork = pickle.loads(message[0])
                self._start(modules, fork, message[1])

    def end(self) -> None:
        """End all workers, and the processes that they have left behind."""
        for pid in [*self._workers]:
            self._kill(pid)
        with suppress(ChildProcessError):
            while True:
                for pid in _children():
                    _kill(pid)
                os.waitpid(-1, 0)

    def _start(self, modules: Sequence[str], fork: bool, descriptors: list[int]) -> None:
        """Start a worker.

        `descriptors` are its socket, the socket to report its end to, its heartbeat, its output and its errors.
        """
        own, status_descriptor, *rest = descriptors
        status = Channel(socket.socket(fileno=status_descriptor))
        try:
            self._import(modules)
            pid = self._fork(own, *rest) if fork and _can_fork() else _spawn(own, *rest)
            self._workers[pid] = status
            pidfd = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
            with suppress(OSError):
                status.send(pickle.dumps(("process", pid)), pidfd)
            close_descriptors(pidfd)
        except OSError as error:  # no more processes, or no memory
            with suppress(OSError):
                status.send(pickle.dumps(("refused", str(error))))
            status.close()
        finally:
            close_descriptors([own, *rest])

    def _import(self, modules: Sequence[str]) -> None:
        missing = [name for name in modules if name not in sys.modules and name not in self._imported]
        if missing:
            self._heartbeat.busy = 1
            for name in missing:
                self._imported.add(name)
                with suppress(Exception):  # the worker that needs the module will raise it again
                    importlib.import_module(name)
            gc.collect()
            gc.freeze()  # so that a worker's garbage collector does not touch, and thereby copy, all of this
            self._heartbeat.busy = 0

    def _fork(self, own: int, heartbeat: int, output: int, errors: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._become_worker(own, heartbeat, output, errors, parent)
        return pid

    def _become_worker(self, own: int, heartbeat: int, output: int, errors: int, parent: int) -> None:
        """Turn the forked child into a worker."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            os.close(output)
            os.close(errors)
            for channel in (self._owner, *self._workers.values()):
                if channel is not None:
                    channel.abandon()
            self._child_ended.close()
            self._wakeup.close()
            del self._heartbeat
            run_worker(socket.socket(fileno=own), heartbeat, parent)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Report the workers that have ended, and end the processes that they have left behind."""
        ended = False
        with suppress(ChildProcessError):
            while True:
                pid, exit_status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid not in self._workers:
                    continue
                ended = True
                status = self._workers.pop(pid)
                if status is not None:
                    with suppress(OSError):
                        status.send(pickle.dumps(("ended", os.waitstatus_to_exitcode(exit_status))))
                    status.close()
        if ended:
            for orphan in _children() - self._workers.keys():
                _kill(orphan)

    def _kill(self, pid: int) -> None:
        _kill(pid)
        status, self._workers[pid] = self._workers[pid], None
        if status is not None:
            status.close()


def _can_fork() -> bool:
    """Return True if this process has one thread, and no library that must not be forked."""
    unsafe = ["ray", *(name for name, entry in ADAPTERS.items() if not entry.forkable)]
    return (
        sys.platform == "linux"
        and len(os.listdir("/proc/self/task")) == 1
        and not any(name in sys.modules for name in unsafe)
    )


def _spawn(own: int, heartbeat: int, output: int, errors: int) -> int:
    """Start a worker as a program of its own."""
    started = subprocess.Popen(
        command("modelfleet.workers.entry", own, heartbeat, os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        pass_fds=(own, heartbeat),
    )
    started.returncode = 0  # `_reap` waits for it, as for all others
    return started.pid


def _children() -> set[int]:
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return {int(pid) for pid in file.read().split()}
    return set()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
