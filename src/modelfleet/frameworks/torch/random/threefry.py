"""Threefry-2x32-20 on tensors: the published generator behind every draw of a member.

`modelfleet.shuffles.threefry` is the same in NumPy. Here words are int32 tensors, because torch can't shift
unsigned ones. The arithmetic wraps, so the bits are the same.
"""

import torch
from torch import Tensor

from modelfleet.frameworks.torch.random import native
from modelfleet.shuffles import PARITY, ROTATIONS

LIBRARY = torch.library.Library("modelfleet", "FRAGMENT")
LIBRARY.define("words(Tensor first, Tensor second, Tensor left, Tensor right) -> Tensor")
WORDS = torch.ops.modelfleet.words.default


def words(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the pairs of words `(…, 2)` of `threefry`. On the CPU, that is one operation in a traced program."""
    run = WORDS if first.device.type == "cpu" else words_by_operations
    return run(first, second, left, right)


def words_by_operations(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the pairs of words `(…, 2)` of `threefry`, by operations on tensors: what a compiler takes."""
    return torch.stack(threefry(first, second, left, right), -1)


def _words_on_cpu(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor:
    kernel = native.LOOP.wanted(left.shape[-1] * max(first.numel(), right.numel()))
    found = None if kernel is None else native.words(kernel, first, second, left, right)
    return words_by_operations(first, second, left, right) if found is None else found


def _shape_of_words(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(first.shape, second.shape, left.shape, right.shape)
    return left.new_empty((*shape, 2))


LIBRARY.impl("words", _words_on_cpu, "CPU")
torch.library.register_fake("modelfleet::words", _shape_of_words, lib=LIBRARY)


def threefry(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words for the key (first, second) and the counter (left, right).

    All are int32 tensors that broadcast: `left` has the last axis of the result, and no other has.
    """
    keys = first, second, first ^ second ^ PARITY
    x, y = left + first, right + second
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            x = _add(x, y)
            y = _rotated(y, turn, x)
        x = _add(x, keys[(group + 1) % 3])
        y = _add(y, keys[(group + 2) % 3] + (group + 1))
    return x, y


def join_words(pairs: Tensor) -> Tensor:
    """Return 64-bit words made of pairs `(…, 2)` of 32-bit words, the left one in the upper half."""
    left, right = pairs[..., 0].to(torch.int64), pairs[..., 1].to(torch.int64)
    return (left << 32).bitwise_or_(right.bitwise_and_(0xFFFFFFFF))


# In place where the shape allows it: uncompiled, memory traffic takes most of a step's time. All of these tensors
# were created here, so no other code sees the writes.


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y) if x.numel() >= y.numel() else x + y


def _rotated(y: Tensor, turn: int, x: Tensor) -> Tensor:
    """Return y, rotated to the left, XOR x."""
    # torch's shift keeps the sign, so the bits that it shifts in are masked. The other part is added as a multiple
    # of y: one operation for a shift and an OR.
    found = (y >> (32 - turn)).bitwise_and_((1 << turn) - 1).add_(y, alpha=1 << turn)
    return found.bitwise_xor_(x) if found.shape == x.shape else found ^ x
