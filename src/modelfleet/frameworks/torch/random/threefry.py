"""Threefry-2x32-20 on tensors: the published generator behind every draw of a member.

`modelfleet.shuffles.threefry` is the same in NumPy. Here words are int32 tensors, because torch can't shift
unsigned ones. The arithmetic wraps, so the bits are the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from modelfleet.frameworks.torch.random import native
from modelfleet.shuffles import PARITY, ROTATIONS

LIBRARY = torch.library.Library("modelfleet", "FRAGMENT")
LIBRARY.define("words(Tensor first, Tensor second, Tensor left, Tensor right) -> Tensor")
LIBRARY.define(
    "noise(Tensor first, Tensor second, Tensor right, Tensor? positions, Tensor rates, int size,"
    " ScalarType dtype) -> Tensor"
)
WORDS = torch.ops.modelfleet.words.default
"""Returns the pairs of words `(…, 2)` of `threefry`: one operation in a traced program."""
NOISE = torch.ops.modelfleet.noise.default


def words_by_operations(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the pairs of words `(…, 2)` of `threefry`, by operations on tensors: what a compiler takes."""
    return torch.stack(threefry(first, second, left, right), -1)


def noise(
    first: Tensor,
    second: Tensor,
    right: Tensor,
    positions: Tensor | None,
    rates: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return `(member, size)`: 1 / (1 - rate) for the numbers that dropout keeps, and 0 for the others.

    On the CPU, that is one operation in a traced program.

    Args:
        first: The first word of the keys, `(member, 1)`.
        second: The second word, `(member, 1)`.
        right: The right word of the counters, `(member, 1)`.
        positions: `(member, size)`: the positions of the numbers in the draw, as int32; None for their order.
        rates: The rate at which each member drops, `(member,)`, in float64.
        size: The count of numbers per member.
        dtype: The dtype of the result.
    """
    args = first, second, right, positions, rates, size, dtype
    return NOISE(*args) if first.device.type == "cpu" else _noise_of(WORDS, *args)


def noise_by_operations(
    first: Tensor,
    second: Tensor,
    right: Tensor,
    positions: Tensor | None,
    rates: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return what `noise` does, by operations on tensors: what a compiler takes."""
    return _noise_of(words_by_operations, first, second, right, positions, rates, size, dtype)


def _noise_of(
    draw: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    first: Tensor,
    second: Tensor,
    right: Tensor,
    positions: Tensor | None,
    rates: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    if positions is None:
        counters = torch.arange((size + 1) // 2, dtype=torch.int32, device=first.device)
        drawn = draw(first, second, counters, right).flatten(-2)[..., :size]
    else:
        pairs = draw(first, second, positions >> 1, right)
        drawn = torch.where((positions & 1).bool(), pairs[..., 1], pairs[..., 0])
    return (drawn <= last_kept(rates).unsqueeze(1)) * kept_scale(rates, dtype).unsqueeze(1)


def last_kept(rates: Tensor) -> Tensor:
    """Return `(member,)`: the last of the signed words of numbers that dropout keeps, as in `Streams.below`."""
    least = torch.ceil((1.0 - rates) * 2**24).to(torch.int64)
    return (((least - 2**23) << 8) - 1).clamp(min=-(2**31)).to(torch.int32)


def kept_scale(rates: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `(member,)`: what dropout multiplies the numbers by that it keeps."""
    one = rates == 1
    return torch.where(one, 0.0, 1.0 / torch.where(one, 1.0, 1.0 - rates)).to(dtype)


def _words_on_cpu(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor:
    kernels = native.LOOPS.wanted(left.shape[-1] * max(first.numel(), right.numel()))
    found = None if kernels is None else native.words(kernels, first, second, left, right)
    return words_by_operations(first, second, left, right) if found is None else found


def _noise_on_cpu(
    first: Tensor,
    second: Tensor,
    right: Tensor,
    positions: Tensor | None,
    rates: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    kernels = native.LOOPS.kernels  # words that are drawn without it are counted by `_words_on_cpu`
    if kernels is not None:
        found = native.noise(kernels, first, second, right, positions, rates, size, dtype)
        if found is not None:
            return found
    return _noise_of(_words_on_cpu, first, second, right, positions, rates, size, dtype)


def _shape_of_words(first: Tensor, second: Tensor, left: Tensor, right: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(first.shape, second.shape, left.shape, right.shape)
    return left.new_empty((*shape, 2))


def _shape_of_noise(
    first: Tensor,
    second: Tensor,
    right: Tensor,
    positions: Tensor | None,
    rates: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    return rates.new_empty((len(rates), size), dtype=dtype)


LIBRARY.impl("words", words_by_operations, "CompositeExplicitAutograd")
LIBRARY.impl("words", _words_on_cpu, "CPU")
LIBRARY.impl("noise", _noise_on_cpu, "CPU")
torch.library.register_fake("modelfleet::words", _shape_of_words, lib=LIBRARY)
torch.library.register_fake("modelfleet::noise", _shape_of_noise, lib=LIBRARY)


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
