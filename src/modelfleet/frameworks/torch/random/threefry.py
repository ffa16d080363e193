"""Threefry-2x32-20 on tensors: the published generator behind every draw of a member.

`modelfleet.shuffles.threefry` is the same in NumPy. Here words are int32 tensors, because torch can't shift
unsigned ones. The arithmetic wraps, so the bits are the same.
"""

import torch
from torch import Tensor

from modelfleet.shuffles import PARITY, ROTATIONS


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


def join_words(left: Tensor, right: Tensor) -> Tensor:
    """Return 64-bit words made of two 32-bit words each, the left one in the upper half."""
    return (left.to(torch.int64) << 32).bitwise_or_(right.to(torch.int64).bitwise_and_(0xFFFFFFFF))


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
