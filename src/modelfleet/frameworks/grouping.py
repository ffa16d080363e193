"""Group the operations of a model that is to be cut into pieces that are worth measuring one by one."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def group(
    boundaries: Sequence[int], seconds: Sequence[float], crossing: Sequence[int], stages: int, per_stage: int = 16
) -> list[tuple[int, int]]:
    """Return ranges of operations, each of about `1 / per_stage` of a stage's time if they can be parted.

    Of the boundaries where a piece may end, the one that the fewest bytes cross is taken.

    Args:
        boundaries: Indices of operations before which a cut is possible.
        seconds: Time of each operation.
        crossing: Bytes that cross the boundary before each operation, as `crossing_bytes` returns them.
        stages: How many stages the pieces are for.
        per_stage: How many pieces a stage has.
    """
    kept = list(boundaries)
    if len(kept) >= stages * per_stage:
        kept = _chosen(boundaries, seconds, crossing, stages * per_stage)
    if len(kept) < stages - 1:  # one operation takes nearly all of the time
        kept = list(boundaries[:: max(1, len(boundaries) // (stages * per_stage))])
    edges = [0, *kept, len(seconds)]
    return list(pairwise(edges))


def crossing_bytes(count: int, values: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return for each boundary the bytes of the values that are made before and needed after it.

    Args:
        count: The number of operations.
        values: For each value, the operation that makes it, the last one that needs it, and its bytes.
    """
    change = [0] * (count + 1)
    for first, last, size in values:
        if last > first:
            change[first + 1] += size
            change[last + 1] -= size
    return list(accumulate(change))


def _chosen(
    boundaries: Sequence[int], seconds: Sequence[float], crossing: Sequence[int], pieces: int
) -> list[int]:
    elapsed = [0.0, *accumulate(seconds)]
    step = elapsed[-1] / pieces
    chosen: list[int] = []
    window: list[int] = []  # boundaries where the present piece may end
    last = 0.0
    for boundary in (*boundaries, len(seconds)):
        if window and elapsed[boundary] - last > step:
            best = min(window, key=lambda cut: (crossing[cut], -cut))
            chosen.append(best)
            last = elapsed[best]
            window = [cut for cut in window if cut > best and elapsed[cut] - last > step / 2]
        if elapsed[boundary] - last > step / 2:
            window.append(boundary)
    return chosen
