"""The compile processes of this program: few at a time, the most valuable first, and none left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from modelfleet.frameworks.torch.compiling.graph_source import GraphSource
from modelfleet.frameworks.torch.compiling.worker import DONE, FAILED, remove
from modelfleet.frameworks.torch.diagnosis import cache_folder

MANY_CORES = 8  # from here on two programs are compiled at once
SETTLING = 0.5  # seconds that the first to ask waits: others, worth more, may be about to


@dataclass(frozen=True)
class Outcome:
    """How compiling ended."""

    form: str | None
    """The form that was compiled; None if it failed."""
    reason: str = ""


class CompileProcess:
    """A process that compiles one program into torch's cache. Its folder goes with it, however it ends."""

    def __init__(self, forms: Sequence[GraphSource]) -> None:
        self.forms = list(forms)
        self._owner = os.getpid()
        self._outcome: Outcome | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="modelfleet-compile-"))
        try:
            for source in forms:
                source.write(self._folder / source.form)
            (self._folder / "forms.json").write_text(json.dumps([source.form for source in forms]))
            self._process = self._start()
        except BaseException:
            remove(self._folder)
            raise

    def _start(self) -> "subprocess.Popen[bytes]":
        scratch = self._folder / "tmp"
        scratch.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder()),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no helper processes
            "TMPDIR": str(scratch),  # a C++ compiler that is killed leaves its files there
        }
        worker = Path(__file__).with_name("worker.py")
        return subprocess.Popen(
            # -P: the folder of the script is not to be imported from.
            [sys.executable, "-P", str(worker), str(self._folder), str(self._owner)],
            stdin=subprocess.PIPE,  # by its end the process learns of ours
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, which Ctrl-C does not reach, and which is killed as one
            env=environment,
        )

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, and then nothing of it is left; None while it compiles."""
        if self._outcome is None and os.getpid() == self._owner:
            found = self._look()
            if found is not None:
                self.stop()
                self._outcome = found
        return self._outcome

    def _look(self) -> Outcome | None:
        # First whether it lives: what it says, it says before it ends. Not reaped here: until it is, no other
        # process or group can have its number.
        try:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            status = None if ended is None else str(ended.si_status)
        except ChildProcessError:  # somebody else's wait() was told of it
            status = "unknown"
        with suppress(FileNotFoundError):
            return Outcome((self._folder / DONE).read_text())
        with suppress(FileNotFoundError):
            return Outcome(None, (self._folder / FAILED).read_text())
        if status is None:
            return None
        return Outcome(None, f"the compile process ended by itself, with status {status}")

    def stop(self) -> None:
        """End it, whatever it is at, with the compilers that it has started, and remove its folder."""
        if self._outcome is not None or os.getpid() != self._owner:
            return
        self._outcome = Outcome(None, "it was stopped")
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()
        remove(self._folder)

    def _close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def forget(self) -> None:
        """Leave it to the process that started it: this one was forked from that, and has its end of the pipe."""
        self._close()
        self._process.returncode = 0  # it is no child of ours: nobody waits for it here


class CompileQueue:
    """Who compiles next. Lanes ask at their steps, with what compiling is worth to them by now."""

    def __init__(self) -> None:
        self.places = 2 if _cores() >= MANY_CORES else 1
        self.forget()

    def forget(self) -> None:
        """Begin anew, with nobody waiting."""
        self._lock = threading.Lock()
        self._running: list[CompileProcess] = []
        self._first: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # when each asked first
        self._asking: WeakKeyDictionary[Any, tuple[float, float]] = WeakKeyDictionary()  # what, and until when

    def abandon(self) -> None:
        """Forget everything in a process that was forked from the one whose queue it is."""
        for process in self._running:
            process.forget()
        self.forget()

    def ask(self, who: Any, value: float, seconds_per_step: float, forms: Any) -> CompileProcess | None:
        """Compile, if there is a place and nobody is known for whom it is worth more; None: ask again later.

        forms: gives the sources to compile. One that does not ask again for many of its steps has ended, or has
        too few steps left: it does not hold up others.
        """
        now = time.monotonic()
        with self._lock:
            first = self._first.setdefault(who, now)
            self._asking[who] = value, now + 10 * (SETTLING + seconds_per_step)
            self._running = [process for process in self._running if process.outcome is None]
            if len(self._running) >= self.places or now - first < SETTLING:
                return None
            if value < max(worth for worth, until in list(self._asking.values()) if until >= now):
                return None
            self._drop(who)
            process = CompileProcess(forms())
            self._running.append(process)
            return process

    def withdraw(self, who: Any) -> None:
        """Compile nothing for one that asked: it has ended, or has too few steps left."""
        with self._lock:
            self._drop(who)

    def _drop(self, who: Any) -> None:
        self._first.pop(who, None)
        self._asking.pop(who, None)


def _cores() -> int:
    """How many cores this program may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


QUEUE = CompileQueue()
os.register_at_fork(after_in_child=QUEUE.abandon)
