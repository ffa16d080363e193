"""Let malloc keep the memory of large temporary tensors on the CPU from step to step.

By default, every temporary above a few megabytes is mapped again at every step, and the kernel clears its pages
one fault at a time. For wide lanes that is most of the step: 328 ms instead of 88 for 32 MLPs of 270,000 numbers.
So malloc keeps the pages of freed tensors while anything is computed on the CPU. They are returned shortly after
the last computation. A `fit` that is called in a loop continues with the pages of the one before, and returning
them, which takes milliseconds, delays no computation.
"""

import ctypes
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # parameters of mallopt
_KEEP_PAGES = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20}
# glibc's own settings. The thresholds are those that it reaches by itself after a large array was freed: once one
# of them is set, it no longer adjusts them.
_DEFAULTS = {_MMAP_MAX: 65536, _TRIM_THRESHOLD: 64 * 2**20, _TOP_PAD: 128 * 2**10, _MMAP_THRESHOLD: 32 * 2**20}

IDLE_SECONDS = 1.0  # without a computation, after which pages are returned
CHECK_SECONDS = 0.25  # between two checks of that time

_lock = threading.Lock()
_scopes = 0  # active `keeping_pages` contexts
_wanted = _keeping = False
_ended = 0.0  # when the last context ended
_watcher: threading.Thread | None = None


def keep_pages_for(device: torch.device) -> None:
    """Keep the pages of freed tensors within `keeping_pages` from now on, if the device is a CPU."""
    global _wanted
    if device.type == "cpu" and _libc() is not None:
        with _lock:
            _wanted = True
            _start_keeping()


@contextmanager
def keeping_pages() -> Iterator[None]:
    """Context in which the pages of freed tensors are kept, as soon as something is computed on the CPU."""
    global _scopes
    with _lock:
        _scopes += 1
        _start_keeping()
    try:
        yield
    finally:
        with _lock:
            _scopes -= 1
            _start_watcher()


def _start_keeping() -> None:
    global _keeping
    if _wanted and _scopes and not _keeping:
        _keeping = True
        _set(_KEEP_PAGES)


def _start_watcher() -> None:
    global _ended, _watcher
    if _keeping and not _scopes:
        _ended = time.monotonic()
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="modelfleet-malloc", daemon=True)
            _watcher.start()


def _watch() -> None:
    """Return the pages once nothing has been computed for a while."""
    global _keeping, _watcher
    while True:
        with _lock:
            left = CHECK_SECONDS if _scopes else _ended + IDLE_SECONDS - time.monotonic()
            if left <= 0:
                _set(_DEFAULTS)
                _trim()
                _keeping, _watcher = False, None
                return
        time.sleep(min(left, CHECK_SECONDS))


def _after_fork() -> None:
    # A forked process has no watcher thread, and no thread that could release a lock that was held.
    global _lock, _watcher
    _lock, _watcher = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _set(settings: dict[int, int]) -> None:
    libc = _libc()
    assert libc is not None
    for parameter, value in settings.items():
        libc.mallopt(parameter, value)


def _trim() -> None:
    """Return all free pages to the system."""
    libc = _libc()
    assert libc is not None
    libc.malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library; None if it is not glibc, or if the user has set options of its malloc."""
    options = [name for name in os.environ if name.startswith("MALLOC_")]
    options.append(os.environ.get("GLIBC_TUNABLES", ""))
    if platform.libc_ver()[0] != "glibc" or "malloc" in " ".join(options).lower():
        return None
    return ctypes.CDLL(None)
