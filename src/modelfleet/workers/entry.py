"""Start of a worker process. The user's script is never run again.

A worker is forked from the fork server, or started by it as a program of its own. Either way its first message
says what to copy from its owner: the environment, the working directory, and where modules are found.
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
import types
from contextlib import suppress
from dataclasses import dataclass

from modelfleet.workers.channel import Channel

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Setup:
    """Surroundings that a worker copies from its owner."""

    environ: dict[str, str]
    cwd: str | None
    path: list[str]
    argv: list[str]

    @classmethod
    def current(cls, env: dict[str, str]) -> "Setup":
        """Return the setup of this process as it is now, with `env` added to the environment."""
        cwd = None
        with suppress(OSError):  # the directory may have been deleted
            cwd = os.getcwd()
        return cls({**os.environ, **env}, cwd, list(sys.path), list(sys.argv))

    def apply(self) -> None:
        """Make this process, a worker, like its owner."""
        if self.environ != dict(os.environ):
            os.environ.clear()
            os.environ.update(self.environ)
        if self.cwd is not None:
            with suppress(OSError):
                os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv


def main(connection: int, heartbeat: int, parent: int) -> None:
    """Run a worker that was started as a program of its own."""
    run_worker(socket.socket(fileno=connection), heartbeat, parent)


def run_worker(own: socket.socket, heartbeat: int, parent: int) -> None:
    """Run tasks until the owner is gone or ends this process."""
    code = 1
    try:
        die_with(parent)
        for number in (signal.SIGINT, signal.SIGTTOU):  # Ctrl-C is for the owner, and every process may print
            signal.signal(number, signal.SIG_IGN)
        sys.modules["__main__"] = types.ModuleType("__main__")
        channel = Channel(own)
        # A process forked from here, by a DataLoader for example, is not the worker: it must not keep its socket.
        os.register_at_fork(after_in_child=channel.abandon)
        while (first := channel.next()) is None:
            if channel.ended:
                os._exit(0)
            channel.wait(None)
        pickle.loads(first[0])[1].apply()

        from modelfleet.workers.task_runner import (
            TaskRunner,  # not before: libraries read the environment as they load
        )

        TaskRunner(channel, heartbeat).run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, whatever this process is doing then."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of this process's descendants whose own parent ends."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
