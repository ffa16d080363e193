"""Threefry as a loop in C, for draws on the CPU.

As tensor operations, Threefry takes a hundred passes over memory: a third of a step that drops out. A loop of C
takes one. It is compiled by the machine's own C compiler, in the background, once a process has drawn enough to
win that back, and kept in the user's cache. Until then, and without a compiler, draws are tensor operations. The
words are the same.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from modelfleet.shuffles import PARITY, ROTATIONS
from modelfleet.user_cache import user_cache

WORTH = 2_000_000  # pairs of words that a process draws before it looks for a compiler
GRAIN = 65_536  # pairs of words for which a second thread is worth its while
BUILD_SECONDS = 60.0

Kernel = Callable[..., None]
logger = logging.getLogger("modelfleet")


def _round(turn: int) -> str:
    return f"x += y; y = ((y << {turn}) | (y >> {32 - turn})) ^ x;"


def _group(number: int) -> str:
    rounds = " ".join(_round(turn) for turn in ROTATIONS[number % 2])
    return f"{rounds} x += k{(number + 1) % 3}; y += k{(number + 2) % 3} + {number + 1}u;"


SOURCE = """
#include <stdint.h>

void words(const uint32_t *restrict first, const uint32_t *restrict second, const uint32_t *restrict right,
           const uint32_t *restrict left, int64_t stride, int64_t rows, int64_t blocks, uint32_t *restrict out) {
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t k0 = first[row], k1 = second[row], k2 = k0 ^ k1 ^ PARITYu, counter = right[row];
        const uint32_t *restrict counters = left + row * stride;
        uint32_t *restrict to = out + row * 2 * blocks;
        for (int64_t i = 0; i < blocks; i++) {
            uint32_t x = counters[i] + k0, y = counter + k1;
            GROUPS
            to[2 * i] = x;
            to[2 * i + 1] = y;
        }
    }
}
""".replace("PARITY", str(PARITY)).replace("GROUPS", "\n            ".join(_group(number) for number in range(5)))


class _Loop:
    """The loop, once there is one."""

    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self._lock = threading.Lock()
        self._drawn = 0

    def wanted(self, pairs: int) -> Kernel | None:
        """Return the loop for a draw of so many pairs of words; None if there is none yet."""
        if self.kernel is None and self._drawn < WORTH:
            with self._lock:
                before, self._drawn = self._drawn, self._drawn + pairs
                begin = before < WORTH <= self._drawn and os.environ.get("MODELFLEET_COMPILE") != "never"
            if begin:
                threading.Thread(target=self._prepare, name="modelfleet-draws", daemon=True).start()
        return self.kernel

    def _prepare(self) -> None:
        try:
            self.kernel = prepare()
        except Exception as error:  # no compiler, no space, another system: draws stay tensor operations
            logger.debug("draws are not compiled: %s: %s", type(error).__name__, error)


LOOP = _Loop()


def prepare() -> Kernel:
    """Return the loop: from the cache, or newly compiled.

    Raises:
        OSError: There is no compiler, or no place to write to.
        subprocess.SubprocessError: The compiler fails.
    """
    folder = user_cache()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="modelfleet-draws-") as own:
            return _load(_built(Path(own)))
    path = folder / "draws" / f"{_key()}.so"
    if not _whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, suffix=".partial") as own:
            os.replace(_built(Path(own)), path)
    return _load(path)


def words(kernel: Kernel, first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    """Return what `threefry.words` does, by the loop; None for shapes that it does not take."""
    shape = torch.broadcast_shapes(first.shape, second.shape, left.shape, right.shape)
    if not 1 <= len(shape) <= 2 or any(t.dim() and t.shape[-1] != 1 for t in (first, second, right)):
        return None
    blocks = shape[-1]
    rows = shape[0] if len(shape) == 2 else 1
    first, second, right = (_column(t, rows) for t in (first, second, right))
    left = left.contiguous() if left.dim() < 2 or left.stride(0) else left[0].contiguous()
    stride = blocks if left.dim() == 2 and len(left) > 1 else 0
    if left.shape[-1] != blocks:
        return None
    out = torch.empty((*shape, 2), dtype=torch.int32)

    def run(begin: int, end: int) -> None:
        kernel(
            *(t.data_ptr() + 4 * begin for t in (first, second, right)),
            left.data_ptr() + 4 * stride * begin,
            stride,
            end - begin,
            blocks,
            out.data_ptr() + 8 * blocks * begin,
        )

    parts = min(torch.get_num_threads(), rows, rows * blocks // GRAIN)
    if parts < 2:
        run(0, rows)
        return out
    edges = [rows * part // parts for part in range(parts + 1)]
    others = [_pool(parts - 1).submit(run, *pair) for pair in pairwise(edges[1:])]
    run(0, edges[1])
    for other in others:
        other.result()
    return out


def _column(tensor: Tensor, rows: int) -> Tensor:
    return tensor.reshape(-1).expand(rows).contiguous()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="modelfleet-draws")


@cache
def _key() -> str:
    """Return a name for the loop as this machine's compiler makes it for this machine's processor."""
    processor = f"{platform.system()} {platform.machine()} {platform.processor()}"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{SOURCE} {_command()} {processor}".encode()).hexdigest()[:32]


def _command() -> list[str]:
    named = os.environ.get("CC", "").split()
    found = next((path for name in (*named[:1], "cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError("there is no C compiler")
    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    return [found, "-O3", *native, "-std=c99", "-shared", "-fPIC"]


def _built(folder: Path) -> Path:
    """Compile the loop in a folder, and return the library's path. Its last bytes are the digest of the others."""
    source, library = folder / "draws.c", folder / "draws.so"
    source.write_text(SOURCE)
    command = [*_command(), "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS, stdin=subprocess.DEVNULL)
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())
    return library


def _whole(path: Path) -> bool:
    """Return True if a library is as it was written. To load a damaged one would end the process."""
    with suppress(OSError):
        content = path.read_bytes()
        return hashlib.sha256(content[:-32]).digest() == content[-32:]
    return False


def _load(path: Path) -> Kernel:
    kernel = ctypes.CDLL(str(path)).words
    kernel.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    kernel.restype = None
    return kernel
