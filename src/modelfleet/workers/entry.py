"""The start of a worker process. It is never the user's script that begins here.

A worker is forked from the nursery, or started by it as a program of its own. Either way its first message says
what to take over from its owner: the environment, the folder, where modules are found.
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
from typing import Any

from modelfleet.workers.channel import Channel

_DIE_WITH_PARENT, _ADOPT = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER

Setup = dict[str, Any]


def setup(env: dict[str, str]) -> Setup:
    """What a worker is to take over from this process as it is now; `env` comes on top of the environment."""
    with suppress(OSError):  # the folder may have been deleted
        return {
            "environ": {**os.environ, **env},
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "argv": list(sys.argv),
        }
    return {"environ": {**os.environ, **env}, "cwd": None, "path": list(sys.path), "argv": list(sys.argv)}


def take_over(given: Setup) -> None:
    """In a worker: be as its owner is."""
    if given["environ"] != dict(os.environ):
        os.environ.clear()
        os.environ.update(given["environ"])
    if given["cwd"] is not None:
        with suppress(OSError):
            os.chdir(given["cwd"])
    sys.path[:] = given["path"]
    sys.argv[:] = given["argv"]


def main(connection: int, signs: int, parent: int) -> None:
    """A worker that was started as a program of its own."""
    work(socket.socket(fileno=connection), signs, parent)


def work(own: socket.socket, signs: int, parent: int) -> None:
    """Be a worker, until its owner is gone or ends it."""
    code = 1
    try:
        die_with(parent)
        for number in (signal.SIGINT, signal.SIGTTOU):  # Ctrl-C is the owner's to hear, and anybody may print
            signal.signal(number, signal.SIG_IGN)
        sys.modules["__main__"] = types.ModuleType("__main__")
        channel = Channel(own)
        # What is forked from here, for a DataLoader say, is not the worker, and does not outlive it unnoticed.
        os.register_at_fork(after_in_child=channel.forget)
        while (first := channel.next()) is None:
            if channel.ended:
                os._exit(0)
            channel.wait(None)
        take_over(pickle.loads(first[0])[1])

        from modelfleet.workers.host import Host  # not before: libraries look at the environment as they load

        Host(channel, signs).run()
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
    """Have the system kill this process when its parent ends, whatever this process is at then."""
    if sys.platform == "linux":
        _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def adopt() -> None:
    """Become the parent of those whose parent ends, if that was a descendant of this process."""
    if sys.platform == "linux":
        _prctl(_ADOPT, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
