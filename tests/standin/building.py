"""Builds the C++ libraries of the tests once, and keeps them in the user's cache."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
STANDIN = (FOLDER / "operations.cpp", FOLDER / "graphs.h", FOLDER / "device.h")
PRETEND_CUDA = (FOLDER / "pretend_cuda.cpp",)


def compiler() -> str | None:
    """Return the C++ compiler; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


def library(sources: Sequence[Path] = STANDIN) -> Path:
    """Return where the library of some sources and this torch is, or will be."""
    parts = [version("torch"), sys.platform, *(path.read_text(encoding="utf-8") for path in sources)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "modelfleet-tests" / f"{sources[0].stem}-{key}.so"


def build(sources: Sequence[Path] = STANDIN) -> Path:
    """Return the library of some sources, of which the first is compiled, unless it is in the cache."""
    path = library(sources)
    if path.exists():
        return path
    spec, command = find_spec("torch"), compiler()
    assert spec is not None
    assert spec.origin is not None
    assert command is not None
    torch = Path(spec.origin).parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes want it at the same time
        if path.exists():
            return path
        made = Path(folder) / path.name
        headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        flags = ["-shared", "-fPIC", "-O1", "-std=c++20", "-w", *headers, f"-L{torch / 'lib'}"]
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
        result = subprocess.run(
            [command, *flags, str(sources[0]), "-o", str(made), *libraries],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(f"{sources[0].name} can't be built:\n{result.stderr[-4000:]}")
        made.replace(path)  # at once: another process may look for it
    return path
