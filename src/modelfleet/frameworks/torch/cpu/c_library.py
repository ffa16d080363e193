"""Loops in C for the CPU, compiled by the machine's own C compiler and kept in the user's cache."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from modelfleet.user_cache import user_cache

BUILD_SECONDS = 60.0


def library(kind: str, source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Return a library of some loops: from the cache, or newly compiled.

    Args:
        kind: The folder of the cache that it is kept in.
        source: The loops.
        flags: Flags of the compiler, besides the usual ones.

    Raises:
        OSError: There is no compiler, or no place to write to.
        subprocess.SubprocessError: The compiler fails.
    """
    path = _path(kind, source, flags)
    if path is None:
        with tempfile.TemporaryDirectory(prefix=f"modelfleet-{kind}-") as own:
            return ctypes.CDLL(str(_built(Path(own), source, flags)))
    if not whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, suffix=".partial") as own:
            os.replace(_built(Path(own), source, flags), path)
    return ctypes.CDLL(str(path))


def is_kept(kind: str, source: str, flags: Sequence[str] = ()) -> bool:
    """Return True if a library is in the cache, so that it need not be compiled."""
    with suppress(OSError):
        path = _path(kind, source, flags)
        return path is not None and path.exists()
    return False


def whole(path: Path) -> bool:
    """Return True if a library is as it was written. To load a damaged one would end the process."""
    with suppress(OSError):
        content = path.read_bytes()
        return hashlib.sha256(content[:-32]).digest() == content[-32:]
    return False


def in_threads(run: Callable[[int, int], None], count: int, parts: int) -> None:
    """Call `run(begin, end)` for all of `count`, in up to `parts` threads, as far as torch may use so many."""
    parts = min(count, parts)
    parts = min(parts, torch.get_num_threads()) if parts > 1 else 1
    if parts < 2:
        run(0, count)
        return
    edges = [count * part // parts for part in range(parts + 1)]
    others = [_pool(parts - 1).submit(run, *pair) for pair in pairwise(edges[1:])]
    run(0, edges[1])
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="modelfleet-loops")


def _path(kind: str, source: str, flags: Sequence[str]) -> Path | None:
    folder = user_cache()
    if folder is None:
        return None
    text = f"{source} {_command()} {flags} {_processor()}"
    return folder / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"


@cache
def _processor() -> str:
    processor = f"{platform.system()} {platform.machine()} {platform.processor()}"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return processor


def _command() -> list[str]:
    named = os.environ.get("CC", "").split()
    found = next((path for name in (*named[:1], "cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError("there is no C compiler")
    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    return [found, "-O3", *native, "-std=c99", "-shared", "-fPIC"]


def _built(folder: Path, source: str, flags: Sequence[str]) -> Path:
    """Compile loops in a folder, and return the path of the library, which ends with a digest of the rest."""
    text, built = folder / "loops.c", folder / "loops.so"
    text.write_text(source)
    command = [*_command(), *flags, "-o", str(built), str(text), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS, stdin=subprocess.DEVNULL)
    content = built.read_bytes()
    built.write_bytes(content + hashlib.sha256(content).digest())
    return built
