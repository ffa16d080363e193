"""Counter-based random numbers on the host: a member's numbers depend only on its seed and a counter.

No generator is shared, so a member's numbers do not depend on the other members, and the numbers of any epoch
are available without those of earlier ones. docs/how-fusing-works.md says which counter means what.
"""

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of four rounds each, alternating
PARITY = 0x1BD11BDA  # the third word of a key is this, xor the first two
SHUFFLES = 0x80000000  # added to the key's second word for shuffles; draws add their number, which stays below


def threefry(
    first: np.ndarray, second: np.ndarray, left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return Threefry-2x32-20's two words for the key (first, second) and the counter (left, right).

    All are uint32 arrays that broadcast. Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
    1, 2, 3" (2011).
    """
    keys = first, second, first ^ second ^ np.uint32(PARITY)
    shape = np.broadcast_shapes(first.shape, second.shape, left.shape, right.shape)
    x, y, high = np.empty(shape, np.uint32), np.empty(shape, np.uint32), np.empty(shape, np.uint32)
    np.add(left, first, out=x)
    np.add(right, second, out=y)
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            x += y
            np.left_shift(y, np.uint32(turn), out=high)
            y >>= np.uint32(32 - turn)
            y |= high
            y ^= x
        x += keys[(group + 1) % 3]
        y += keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def words(seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and the high 32 bits of 64-bit seeds."""
    unsigned = np.atleast_1d(np.asarray(seeds, dtype=np.int64)).view(np.uint64)
    return unsigned.astype(np.uint32), (unsigned >> np.uint64(32)).astype(np.uint32)


def permutations(seeds: np.ndarray, epoch: int | np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a shuffle per member for an epoch, which is one for all or `(member,)`: `(member, longest)` integers.

    The first `lengths[m]` entries of row m are a permutation of `range(lengths[m])` that depends only
    on the member's seed, the epoch and its own length. Further entries repeat the row from its start.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    width = int(lengths.max(initial=0))
    low, high = words(seeds)
    epochs = np.atleast_1d(np.asarray(epoch)).astype(np.uint32)
    left, right = threefry(
        low[:, None],
        (high + np.uint32(SHUFFLES))[:, None],
        np.arange(width, dtype=np.uint32),
        epochs[:, None],
    )

    # Rows in the order of 64-bit numbers. Of two equal ones, which are very rare, the first comes first.
    keys = (left.astype(np.uint64) << np.uint64(32)) | right
    even = bool((lengths == width).all())
    if not even:
        keys[np.arange(width) >= lengths[:, None]] = np.iinfo(np.uint64).max
    order = _sorted(keys, lengths)
    if even:
        return order
    return np.take_along_axis(order, np.arange(width) % np.maximum(lengths, 1)[:, None], axis=1)


def _sorted(keys: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the order of the first `lengths[m]` keys of each row m, as a stable sort gives it."""
    order = keys.argsort(axis=1)  # several times as fast as a stable sort
    found = np.take_along_axis(keys, order, axis=1)
    equal = found[:, 1:] == found[:, :-1]
    if equal.any() and (equal & (np.arange(1, keys.shape[1]) < lengths[:, None])).any():
        return keys.argsort(axis=1, kind="stable")
    return order
