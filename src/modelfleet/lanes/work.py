"""Work on several feeds at once, batch by batch."""

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Work = Generator[None, None, T]
"""Work on a feed. It yields after every batch, and returns its result at the end."""


def finish_in_step(works: Sequence[Work[T]]) -> list[T]:
    """Do several pieces of work in step, one batch of each at a time, so that a shared loader is read once."""
    results: dict[int, T] = {}
    while len(results) < len(works):
        for number, work in enumerate(works):
            if number not in results:
                try:
                    next(work)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(works))]
