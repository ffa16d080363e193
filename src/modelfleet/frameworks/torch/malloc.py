"""Pages for large temporary tensors on the CPU.

By default every temporary above a few megabytes is mapped anew at every step, and the kernel clears its pages
one fault at a time. For wide lanes that is most of the step: 328 ms against 88 for 32 MLPs of 270,000 numbers. So
while anything is computed on the CPU, malloc is to keep the pages of freed tensors for the next step. What it has
kept is given back a moment after the last computation: a `fit` that is called in a loop goes on with the pages of
the one before, and giving them back, which takes milliseconds, is nobody's time.
"""

import ctypes
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # of mallopt
_KEEPING = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20}
# glibc's own. The thresholds are those that it comes to by itself once a large array was freed: as soon as one of
# them is set, it no longer adjusts them.
_DEFAULTS = {_MMAP_MAX: 65536, _TRIM_THRESHOLD: 64 * 2**20, _TOP_PAD: 128 * 2**10, _MMAP_THRESHOLD: 32 * 2**20}

LINGER = 1.0  # seconds without a computation until pages are given back
LOOK = 0.25  # seconds between two looks at that

_lock = threading.Lock()
_scopes = 0
_wanted = _keeping = False
_ended = 0.0  # when the last of them was over
_watcher: threading.Thread | None = None


def keep_pages_for(device: torch.device) -> None:
    """Have the pages of freed tensors kept within every `kept` from now on, if the device is a CPU."""
    global _wanted
    if device.type == "cpu" and _libc() is not None:
        with _lock:
            _wanted = True
            _keep()


@contextmanager
def keeping_pages() -> Iterator[None]:
    """Within this context the pages of freed tensors are kept, once something is computed on the CPU."""
    global _scopes
    with _lock:
        _scopes += 1
        _keep()
    try:
        yield
    finally:
        with _lock:
            _scopes -= 1
            _end()


def _keep() -> None:
    global _keeping
    if _wanted and _scopes and not _keeping:
        _keeping = True
        _set(_KEEPING)


def _end() -> None:
    global _ended, _watcher
    if _keeping and not _scopes:
        _ended = time.monotonic()
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="modelfleet-pages", daemon=True)
            _watcher.start()


def _watch() -> None:
    """Give the pages back when nothing has been computed for a while."""
    global _keeping, _watcher
    while True:
        with _lock:
            left = LOOK if _scopes else _ended + LINGER - time.monotonic()
            if left <= 0:
                _set(_DEFAULTS)
                _trim()
                _keeping, _watcher = False, None
                return
        time.sleep(min(left, LOOK))


def _after_fork() -> None:
    """A forked process has no watcher, and nobody to release a lock that was held."""
    global _lock, _watcher
    _lock, _watcher = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _set(settings: dict[int, int]) -> None:
    for parameter, value in settings.items():
        _libc().mallopt(parameter, value)


def _trim() -> None:
    """Give all free pages back."""
    _libc().malloc_trim(0)


@cache
def _libc() -> Any:
    """The C library, if it is glibc; None too where its settings were made by the user."""
    own = os.environ.get("GLIBC_TUNABLES", "") + "".join(name for name in os.environ if name.startswith("MALLOC_"))
    if platform.libc_ver()[0] != "glibc" or "malloc" in own.lower():
        return None
    return ctypes.CDLL(None)
