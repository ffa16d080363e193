"""Time programs in turns, so that a moment in which the machine is busy does not fall on one of them alone."""

import time
from collections.abc import Callable, Sequence

LEAST, MOST = 5, 40  # rounds
ENOUGH = 2.0  # seconds after which no round beyond the least is begun

Timed = Callable[[], tuple[float, ...]]
"""Runs a program once and returns the seconds of each of its parts."""


def shortest_times(programs: Sequence[Timed]) -> list[tuple[float, ...]]:
    """Return for each program the shortest times of its parts in several rounds, after one that warms up."""
    for program in programs:
        program()
    start = time.perf_counter()
    best = [program() for program in programs]
    for done in range(1, MOST):
        if done >= LEAST and time.perf_counter() - start > ENOUGH:
            break
        best = [tuple(map(min, known, program())) for known, program in zip(best, programs, strict=True)]
    return best
