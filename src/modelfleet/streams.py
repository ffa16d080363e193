"""Counter-based random streams on the host: a member's numbers are a hash of its seed and a position.

Nothing is drawn from a shared generator, so what a member gets does not depend on who else is there, and any
epoch can be had without the ones before it.
"""

import numpy as np

_FIRST, _SECOND = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)  # tell a member's two keys apart


def permutations(seeds: np.ndarray, epoch: int | np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A shuffle per member for one epoch, the same for all or each its own: `(member, longest)` integers.

    The first `lengths[m]` entries of row m are a permutation of `range(lengths[m])` that depends on the
    member's seed, the epoch and its own length alone. The entries beyond repeat the row from its start.
    """
    seeds = np.asarray(seeds, dtype=np.int64)
    lengths = np.asarray(lengths, dtype=np.int64)
    width = int(lengths.max(initial=0))
    position = np.arange(width, dtype=np.uint32)
    first, second = _key(seeds, epoch, _FIRST), _key(seeds, epoch, _SECOND)
    words = _mix(_mix(position ^ first[:, None]) ^ second[:, None])

    # Sorting (hash, position) pairs packed in one integer each shuffles every row in one call.
    packed = (words.astype(np.uint64) << np.uint64(32)) | position
    even = bool((lengths == width).all())
    if not even:
        packed[position >= lengths[:, None]] = np.iinfo(np.uint64).max
    packed.sort(axis=1)
    order = (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)
    if even:
        return order
    return np.take_along_axis(order, np.arange(width) % np.maximum(lengths, 1)[:, None], axis=1)


def _key(seeds: np.ndarray, epoch: int | np.ndarray, which: np.uint32) -> np.ndarray:
    """A 32-bit key per member."""
    words = seeds.view(np.uint64)
    low, high = words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    return _mix(_mix(_mix(low ^ which) ^ high) ^ np.asarray(epoch).astype(np.uint32))


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 32-bit words in which every input bit moves every output bit."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x21F0AAAD)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x735A2D97)
    x ^= x >> np.uint32(15)
    return x
