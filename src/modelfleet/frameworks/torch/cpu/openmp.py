"""Let torch's waiting CPU threads sleep instead of spin while other processes need the cores.

GNU's OpenMP, which torch uses on Linux, lets a thread spin for about a millisecond while it waits for its team. On
an idle machine that is quickest. But if other processes are busy, a spinning thread keeps its core from the thread
that it waits for, and every small operation takes a time slice: beside three busy processes, the example of the
README took 3 to 5 s instead of 0.6. `OMP_WAIT_POLICY=passive` prevents that, but it is read when torch is
imported, and it slows down an idle machine.

OpenMP stops spinning for long by itself if a process has more of its threads than there are cores. So while others
are busy, a second team of threads is kept here, asleep.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

CHECK_SECONDS = 0.25  # between two checks for busy processes
# Checks in a row after which threads sleep, or spin again. To sleep in vain can double the time of a small step.
CROWDED_CHECKS = 4
CALM_CHECKS = 2
IDLE_SECONDS = 1.0  # without a computation, after which the checks end

_GRAIN = 1 << 15  # numbers for which torch's operations use one more thread
_USERS_OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


class SleepingTeam:
    """One more team of torch's threads, which sleeps until it is released."""

    def __init__(self) -> None:
        self._started, self._released = threading.Event(), threading.Event()
        # A team belongs to the thread that has used it, and ends with that thread.
        threading.Thread(target=self._hold, name="modelfleet-openmp-team", daemon=True).start()
        self._started.wait()

    def _hold(self) -> None:
        torch.ones(2 * _GRAIN * torch.get_num_threads()).add_(1)
        self._started.set()
        self._released.wait()

    def release(self) -> None:
        """End the threads of the team."""
        self._released.set()


class Watch:
    """Looks for busy processes while anything is computed, and keeps a sleeping team while there are some."""

    def __init__(self) -> None:
        self.team: SleepingTeam | None = None
        self._lock = threading.Lock()
        self._scopes = 0
        self._ended = 0.0  # when the last scope ended
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """Begin a computation."""
        with self._lock:
            self._scopes += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="modelfleet-openmp", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        """End a computation."""
        with self._lock:
            self._scopes -= 1
            self._ended = time.monotonic()

    def _run(self) -> None:
        crowded = calm = 0  # checks in a row
        while True:
            time.sleep(CHECK_SECONDS)
            with self._lock:
                if not self._scopes and time.monotonic() > self._ended + IDLE_SECONDS:
                    self._thread = None
                    self._release()
                    return
                crowded, calm = (crowded + 1, 0) if is_crowded() else (0, calm + 1)
                if crowded >= CROWDED_CHECKS and self.team is None:
                    self.team = SleepingTeam()
                elif calm >= CALM_CHECKS:
                    self._release()

    def _release(self) -> None:
        if self.team is not None:
            self.team.release()
            self.team = None


_watch = Watch()


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Context for computations, in which torch's waiting threads sleep if other processes need the cores."""
    if not _can_spin():
        yield
        return
    watch = _watch
    watch.enter()
    try:
        yield
    finally:
        watch.leave()


def crowded() -> bool:
    """Return True if waiting threads sleep now, because other processes need the cores."""
    return _watch.team is not None


def is_crowded() -> bool:
    """Return True if other processes and torch's threads are more than there are cores. Linux only."""
    cores = os.cpu_count() or 1
    with suppress(OSError, ValueError, IndexError):  # a system without these files, or a thread that has ended
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        others = runnable - sum(_is_running(task) for task in os.listdir("/proc/self/task"))
        return others > 0 and others + torch.get_num_threads() > cores
    return False


def _is_running(task: str) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "R"
    return False


def _can_spin() -> bool:
    return (
        sys.platform == "linux"
        and torch.get_num_threads() > 1
        and not any(name in os.environ for name in _USERS_OWN)
    )


def _after_fork() -> None:
    # A forked process has none of the threads, and no thread that could release a lock that was held.
    global _watch
    _watch = Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
