"""Measured times on disk: of a lane's step, and of an epoch of lanes that share a device.

They are in a JSON file in the user's cache (`MODELFLEET_CACHE` names another folder; an empty name keeps nothing).
Only plans depend on the file, never results. It may be deleted at any time. If it can't be read or written,
nothing is remembered.
"""

import hashlib
import os
import platform
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from modelfleet import frameworks
from modelfleet.user_cache import read_numbers, user_cache, write_numbers

_MOST = 5000  # entries in the file; the oldest are dropped first
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VERSION = re.compile(r"^Version: .*$", re.MULTILINE)


def key(*parts: object) -> str:
    """Return a name for a measurement, made from structures, shapes, the device and the installed versions."""
    text = _ADDRESS.sub("", repr((parts, _machine())))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Timings:
    """Keeps the measurements on disk. They are read once."""

    def __init__(self) -> None:
        self._path = _path()
        self._known: dict[str, float] = {}
        if self._path is not None:
            self._known = read_numbers(self._path)
        self._fresh: dict[str, float] = {}

    def get(self, name: str) -> float | None:
        """Return the measurement of a name; None if there is none."""
        return self._known.get(name)

    def put(self, name: str, value: float) -> None:
        """Add a measurement. `save` writes it to disk."""
        self._known.pop(name, None)
        self._known[name] = self._fresh[name] = value

    def save(self) -> None:
        """Add the new measurements to the file."""
        if self._path is None or not self._fresh:
            return
        kept = read_numbers(self._path)
        kept = {name: value for name, value in kept.items() if name not in self._fresh} | self._fresh
        with suppress(OSError):
            write_numbers(self._path, dict(list(kept.items())[-_MOST:]))
            self._fresh = {}


def _path() -> Path | None:
    folder = user_cache()
    return None if folder is None else folder / "timings.json"


@cache
def _machine() -> tuple[object, ...]:
    versions = []
    for package in ("modelfleet", *frameworks.ADAPTERS):
        with suppress(PackageNotFoundError):
            # importlib.metadata.version parses all of this text: 6 ms in every process, before its first step.
            found = _VERSION.search(distribution(package).read_text("METADATA") or "")
            versions.append((package, found and found[0]))
    threads = os.environ.get("OMP_NUM_THREADS")
    return platform.machine(), _processor(), os.cpu_count(), threads, tuple(versions)


def _processor() -> str:
    """Return the name of the processor's model. Python itself knows it on some systems only."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
