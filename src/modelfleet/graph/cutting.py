"""Where to cut a row of pieces into stages: an exact dynamic programme over the pieces, and nothing else.

The longest stage becomes as short as possible. Among cuts that are as good within `SLACK`, the one with the fewest
bytes between stages wins.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from modelfleet.errors import InputError
from modelfleet.formatting import count, size
from modelfleet.frameworks.pieces import Piece

SLACK = 0.02  # what is measured differs by more from run to run

Cost = Callable[[int, int], float]
"""Cost of a stage from its first piece to before its last."""


def best_cuts(
    pieces: Sequence[Piece], stages: int, memory: Sequence[float] | None = None, *, slack: float = SLACK
) -> tuple[int, ...]:
    """Return the piece at which each stage begins, without the first stage's 0.

    Args:
        pieces: The pieces in topological order.
        stages: How many stages to make, not more than pieces.
        memory: Bytes that each stage may take; None if memory does not matter.
        slack: Share by which the longest stage may exceed the shortest possible one, if that saves bytes.

    Raises:
        InputError: The stages can't fit into memory.
    """
    assert stages <= len(pieces)
    seconds = _sums([piece.timing.total for piece in pieces])
    needed = _sums([piece.memory for piece in pieces])

    def fits(stage: int, start: int, stop: int) -> bool:
        return memory is None or needed(start, stop) <= memory[stage]

    found = _smallest(len(pieces), stages, seconds, max, fits)
    if found is None:
        assert memory is not None
        raise InputError(_no_memory(pieces, stages, memory, needed))
    limit = found[0] * (1 + slack)
    arriving = arriving_bytes(pieces)

    def is_short(stage: int, start: int, stop: int) -> bool:
        return seconds(start, stop) <= limit and fits(stage, start, stop)

    cheapest = _smallest(len(pieces), stages, lambda start, stop: arriving[start][stop], _add, is_short)
    assert cheapest is not None, "the shortest cut is one of the cheap ones"
    return cheapest[1]


def arriving_bytes(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return for every `[start][stop]` the bytes that a stage of these pieces needs from earlier stages."""
    sizes: dict[str, int] = {}
    table = []
    for start, own in enumerate(pieces):
        seen: set[str] = set()
        row = [0] * (start + 1)
        for piece in pieces[start:]:
            new = {name for name in piece.needs if name in sizes} - seen
            seen |= new
            row.append(row[-1] + sum(sizes[name] for name in new))
        table.append(row)
        sizes.update(own.makes)
    return table


def _smallest(
    pieces: int,
    stages: int,
    cost: Cost,
    join: Callable[[float, float], float],
    allowed: Callable[[int, int, int], bool],
) -> tuple[float, tuple[int, ...]] | None:
    """Return the smallest joint cost of all stages with the cuts that have it; None if nothing is allowed.

    `best[stop]` is the smallest cost of the first stages that end before `stop`. `join` must not fall if one of
    its arguments rises: so the best whole has the best beginning.
    """
    best: list[tuple[float, tuple[int, ...]] | None] = [None] * (pieces + 1)
    best[0] = 0.0, ()
    for stage in range(stages):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (pieces + 1)
        for stop in range(stage + 1, pieces - (stages - stage - 1) + 1):
            for start in range(stage, stop):
                before = best[start]
                if before is None or not allowed(stage, start, stop):
                    continue
                total = join(before[0], cost(start, stop))
                known = following[stop]
                if known is None or total < known[0]:
                    following[stop] = total, (*before[1], start)
        best = following
    found = best[pieces]
    return None if found is None else (found[0], found[1][1:])


def _add(first: float, second: float) -> float:
    return first + second


def _sums(values: Sequence[float]) -> Cost:
    """Return a function for the sum of a slice of values."""
    totals = [0.0, *accumulate(values)]
    return lambda start, stop: totals[stop] - totals[start]


def _no_memory(pieces: Sequence[Piece], stages: int, memory: Sequence[float], needed: Cost) -> str:
    smallest = _smallest(len(pieces), stages, needed, max, lambda *_: True)
    assert smallest is not None
    given = size(memory[0]) if len(set(memory)) == 1 else ", ".join(map(size, memory))
    total = needed(0, len(pieces))
    return (
        f"memory={given} is too little for {count(stages, 'stage')}: with the most even cut, the largest stage "
        f"needs {size(math.ceil(smallest[0]))}, and all of them {size(math.ceil(total))} (weights, and if it is "
        f"trained gradients, two moments of an optimizer, and activations for the example). Give more memory or "
        f"more stages, or a smaller example."
    )
