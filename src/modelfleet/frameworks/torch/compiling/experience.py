"""What compiling has cost and saved on this machine, kept from run to run beside the planner's times.

Only the decision to compile depends on it, never a result.
"""

from contextlib import suppress
from functools import cache
from pathlib import Path

from modelfleet.user_cache import read_numbers, user_cache, write_numbers

COST, SLOWED, SAVED = "seconds_per_node", "slowed", "saved"
"""Seconds of compiling for each operation; the part of the steps' speed that is lost meanwhile; and what is saved
afterwards, as a part of the time that was spent in operations that a compiler can merge."""
MAX_PART = 0.9
LEAST_SAVED = 0.1  # what has saved nothing once is tried again in a very long run


def measured(name: str, default: float) -> float:
    """Return a number as it was measured here, or the default."""
    return _known(user_cache()).get(name, default)


def learn(**found: float) -> None:
    """Keep numbers that were measured. Each is averaged with what was known, because one measurement is noisy."""
    folder = user_cache()
    if folder is None:
        return
    known = _known(folder)
    for name, value in found.items():
        if name != COST:
            value = min(MAX_PART, max(LEAST_SAVED if name == SAVED else 0.0, value))
        known[name] = (known[name] + value) / 2 if name in known else value
    with suppress(OSError):
        write_numbers(_path(folder), known)


@cache
def _known(folder: Path | None) -> dict[str, float]:
    # Read once: steps ask again and again.
    return {} if folder is None else read_numbers(_path(folder))


def _path(folder: Path) -> Path:
    return folder / "compiling.json"
