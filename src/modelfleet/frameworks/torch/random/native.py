"""Threefry as loops in C, for draws on the CPU.

As tensor operations, Threefry takes a hundred passes over memory: a third of a step that drops out. A loop of C
takes one. The loops are compiled by the machine's own C compiler, in the background, once a process has drawn
enough to win that back, and kept in the user's cache. Until then, and without a compiler, draws are tensor
operations. The words are the same.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelfleet.frameworks.torch.cpu import c_library
from modelfleet.shuffles import PARITY, ROTATIONS

WORTH = 2_000_000  # pairs of words that a process draws before it looks for a compiler
GRAIN = 65_536  # pairs of words for which a second thread is worth its while

Loop = Callable[..., None]
logger = logging.getLogger("modelfleet")


def _round(turn: int) -> str:
    return f"x += y; y = ((y << {turn}) | (y >> {32 - turn})) ^ x;"


def _group(number: int) -> str:
    rounds = " ".join(_round(turn) for turn in ROTATIONS[number % 2])
    return f"{rounds} x += k{(number + 1) % 3}; y += k{(number + 2) % 3} + {number + 1}u;"


_SOURCE = """
#include <math.h>
#include <stdint.h>

#define WORDS(counter_, right_) \\
    uint32_t x = (uint32_t)(counter_) + k0, y = (right_) + k1; \\
    GROUPS

void words(const uint32_t *restrict first, const uint32_t *restrict second, const uint32_t *restrict right,
           const uint32_t *restrict left, int64_t stride, int64_t rows, int64_t blocks, uint32_t *restrict out) {
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t k0 = first[row], k1 = second[row], k2 = k0 ^ k1 ^ PARITYu, counter = right[row];
        const uint32_t *restrict counters = left + row * stride;
        uint32_t *restrict to = out + row * 2 * blocks;
        for (int64_t i = 0; i < blocks; i++) {
            WORDS(counters[i], counter)
            to[2 * i] = x;
            to[2 * i + 1] = y;
        }
    }
}

// 1 / (1 - rate) where dropout keeps a number, and 0 elsewhere: numbers in their order, or at some positions.
#define NOISE(name, type) \\
void name(const uint32_t *restrict first, const uint32_t *restrict second, const uint32_t *restrict right, \\
          const int32_t *restrict positions, const double *restrict rates, \\
          int64_t rows, int64_t size, type *restrict out) { \\
    for (int64_t row = 0; row < rows; row++) { \\
        const uint32_t k0 = first[row], k1 = second[row], k2 = k0 ^ k1 ^ PARITYu, counter = right[row]; \\
        const int64_t last = ((int64_t)ceil((1.0 - rates[row]) * 16777216.0) - 8388608) * 256 - 1; \\
        const int32_t most = (int32_t)(last < INT32_MIN ? INT32_MIN : last); \\
        const type factor = (type)(rates[row] == 1.0 ? 0.0 : 1.0 / (1.0 - rates[row])); \\
        type *restrict to = out + row * size; \\
        if (positions) { \\
            const int32_t *restrict at = positions + row * size; \\
            for (int64_t i = 0; i < size; i++) { \\
                WORDS(at[i] >> 1, counter) \\
                to[i] = (int32_t)(at[i] & 1 ? y : x) <= most ? factor : (type)0; \\
            } \\
            continue; \\
        } \\
        for (int64_t i = 0; i < size / 2; i++) { \\
            WORDS(i, counter) \\
            to[2 * i] = (int32_t)x <= most ? factor : (type)0; \\
            to[2 * i + 1] = (int32_t)y <= most ? factor : (type)0; \\
        } \\
        if (size % 2) { \\
            WORDS(size / 2, counter) \\
            (void)y; \\
            to[size - 1] = (int32_t)x <= most ? factor : (type)0; \\
        } \\
    } \\
}

NOISE(noise32, float)
NOISE(noise64, double)
"""
SOURCE = _SOURCE.replace("PARITY", str(PARITY)).replace("GROUPS", " ".join(_group(number) for number in range(5)))


@dataclass(frozen=True)
class Kernels:
    """The loops: one for words, and one for the noise of dropout in each dtype that has one."""

    words: Loop
    noise: dict[torch.dtype, Loop]


class _Loops:
    """The loops, once there are any."""

    def __init__(self) -> None:
        self.kernels: Kernels | None = None
        self._lock = threading.Lock()
        self._drawn = 0

    def wanted(self, pairs: int) -> Kernels | None:
        """Return the loops for a draw of so many pairs of words; None if there are none yet."""
        if self.kernels is None and self._drawn < WORTH:
            with self._lock:
                before, self._drawn = self._drawn, self._drawn + pairs
                begin = before < WORTH <= self._drawn and os.environ.get("MODELFLEET_COMPILE") != "never"
            if begin:
                threading.Thread(target=self._prepare, name="modelfleet-draws", daemon=True).start()
        return self.kernels

    def _prepare(self) -> None:
        try:
            self.kernels = prepare()
        except Exception as error:  # no compiler, no space, another system: draws stay tensor operations
            logger.debug("draws are not compiled: %s: %s", type(error).__name__, error)


LOOPS = _Loops()


def prepare() -> Kernels:
    """Return the loops: from the cache, or newly compiled.

    Raises:
        OSError: There is no compiler, or no place to write to.
        subprocess.SubprocessError: The compiler fails.
    """
    return _loops_of(c_library.library("draws", SOURCE))


def words(kernels: Kernels, first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    """Return what `threefry.words` does, by a loop; None for shapes that it does not take."""
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
        kernels.words(
            *(t.data_ptr() + 4 * begin for t in (first, second, right)),
            left.data_ptr() + 4 * stride * begin,
            stride,
            end - begin,
            blocks,
            out.data_ptr() + 8 * blocks * begin,
        )

    c_library.in_threads(run, rows, rows * blocks // GRAIN)
    return out


def noise(
    kernels: Kernels,
    first: Tensor,
    second: Tensor,
    right: Tensor,
    positions: Tensor | None,
    rates: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return what `threefry.noise` does, by a loop; None for dtypes that have none."""
    loop, rows = kernels.noise.get(dtype), len(rates)
    if loop is None or rates.dtype != torch.float64:
        return None
    first, second, right, rates = (_column(tensor, rows) for tensor in (first, second, right, rates))
    positions = None if positions is None else positions.expand(rows, size).contiguous()
    out = torch.empty((rows, size), dtype=dtype)
    keys = first.data_ptr(), second.data_ptr(), right.data_ptr()
    at, given, to = 0 if positions is None else positions.data_ptr(), rates.data_ptr(), out.data_ptr()
    row_bytes = size * out.element_size()

    def run(begin: int, end: int) -> None:
        loop(
            *(key + 4 * begin for key in keys),
            at and at + 4 * size * begin,
            given + 8 * begin,
            end - begin,
            size,
            to + row_bytes * begin,
        )

    c_library.in_threads(run, rows, rows * size // (2 if positions is None else 1) // GRAIN)
    return out


def _column(tensor: Tensor, rows: int) -> Tensor:
    if tensor.numel() == rows and tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1).expand(rows).contiguous()


def _loops_of(library: ctypes.CDLL) -> Kernels:
    integer, pointer = ctypes.c_int64, ctypes.c_void_p

    def loop(name: str, *arguments: type) -> Loop:
        found = library[name]
        found.argtypes, found.restype = arguments, None
        return found

    noise = pointer, pointer, pointer, pointer, pointer, integer, integer, pointer
    return Kernels(
        loop("words", pointer, pointer, pointer, pointer, integer, integer, integer, pointer),
        {torch.float32: loop("noise32", *noise), torch.float64: loop("noise64", *noise)},
    )
