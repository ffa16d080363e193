"""Queue of compile processes: few at a time, the most valuable program first, and none left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from modelfleet.devices import cores
from modelfleet.frameworks.torch.compiling import settings
from modelfleet.frameworks.torch.compiling.graph_source import GraphSource
from modelfleet.frameworks.torch.compiling.worker import DONE, FAILED, remove
from modelfleet.frameworks.torch.doctor_facts import cache_folder

MANY_CORES = 8  # from this number on, two programs are compiled at once
SETTLING_SECONDS = 0.5  # a first request waits this long, because more valuable ones may follow


@dataclass(frozen=True)
class Outcome:
    """Outcome of compiling.

    Attributes:
        form: The form that was compiled; None if compiling failed.
        reason: The reason why it failed.
    """

    form: str | None
    reason: str = ""


class CompileProcess:
    """Process that compiles one program into torch's cache. Its folder is removed however it ends."""

    def __init__(self, forms: Sequence[GraphSource]) -> None:
        self.forms = list(forms)
        self.settings = settings.present()
        """Settings that the program is compiled under."""
        self._owner = os.getpid()
        self._outcome: Outcome | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="modelfleet-compile-"))
        try:
            for source in forms:
                source.write(self._folder / source.form)
            (self._folder / "forms.json").write_text(json.dumps([source.form for source in forms]))
            (self._folder / "settings.json").write_text(json.dumps(self.settings))
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
            "TMPDIR": str(scratch),  # a C++ compiler that is killed leaves files there
        }
        worker = Path(__file__).with_name("worker.py")
        return subprocess.Popen(
            # -P: imports do not look into the folder of the script.
            [sys.executable, "-P", str(worker), str(self._folder), str(self._owner)],
            stdin=subprocess.PIPE,  # closes when this process ends, which the compile process notices
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own: Ctrl-C does not reach it, and it is killed as one
            env=environment,
        )

    @property
    def outcome(self) -> Outcome | None:
        """Return how compiling ended; None while it runs. Once it has ended, process and folder are removed."""
        if self._outcome is None and os.getpid() == self._owner:
            found = self._poll()
            if found is not None:
                self.stop()
                self._outcome = found
        return self._outcome

    def _poll(self) -> Outcome | None:
        # First check if the process is alive: it writes its outcome before it ends. It is not reaped here, because
        # until then no other process or group can get its number.
        try:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            status = None if ended is None else str(ended.si_status)
        except ChildProcessError:  # other code has already waited for it
            status = "unknown"
        with suppress(FileNotFoundError):
            return Outcome((self._folder / DONE).read_text())
        with suppress(FileNotFoundError):
            return Outcome(None, (self._folder / FAILED).read_text())
        if status is None:
            return None
        return Outcome(None, f"the compile process ended by itself, with status {status}")

    def stop(self) -> None:
        """Kill the process and the compilers that it has started, and remove its folder."""
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
        """Leave the process to its owner, from which this process was forked with the owner's end of the pipe."""
        self._close()
        self._process.returncode = 0  # not a child of this process, so it is never waited for


class CompileQueue:
    """Decides which program is compiled next.

    At their steps, programs request to be compiled, with the seconds that compiling would save by then.
    """

    def __init__(self) -> None:
        self.max_running = 2 if cores() >= MANY_CORES else 1
        self.forget()

    def forget(self) -> None:
        """Drop all requests and processes."""
        self._lock = threading.Lock()
        self._running: list[CompileProcess] = []
        self._first: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # time of each one's first request
        # By requester: the value of its request, and until when that counts.
        self._requests: WeakKeyDictionary[Any, tuple[float, float]] = WeakKeyDictionary()

    def abandon(self) -> None:
        """Drop everything in a process that was forked from the owner of the queue."""
        for process in self._running:
            process.forget()
        self.forget()

    def request(
        self, requester: object, value: float, seconds_per_step: float, forms: Callable[[], Sequence[GraphSource]]
    ) -> CompileProcess | None:
        """Start to compile, unless too many processes run or another request is worth more.

        A request that is not repeated for many steps has ended, or has too few steps left. It holds up no other.

        Args:
            requester: Stands for the program in later requests.
            value: The seconds that compiling would save.
            seconds_per_step: How long a step takes, and so how often the request can be repeated.
            forms: Returns the graphs to compile.

        Returns:
            The process; None if the request must be repeated later.
        """
        now = time.monotonic()
        with self._lock:
            first = self._first.setdefault(requester, now)
            self._requests[requester] = value, now + 10 * (SETTLING_SECONDS + seconds_per_step)
            self._running = [process for process in self._running if process.outcome is None]
            if len(self._running) >= self.max_running or now - first < SETTLING_SECONDS:
                return None
            if value < max(worth for worth, until in list(self._requests.values()) if until >= now):
                return None
            self._drop(requester)
            process = CompileProcess(forms())
            self._running.append(process)
            return process

    def withdraw(self, requester: object) -> None:
        """Drop a request: its program has ended, or has too few steps left."""
        with self._lock:
            self._drop(requester)

    def _drop(self, requester: object) -> None:
        self._first.pop(requester, None)
        self._requests.pop(requester, None)


QUEUE = CompileQueue()
os.register_at_fork(after_in_child=QUEUE.abandon)
