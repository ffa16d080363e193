"""What compiling has cost and saved on this machine, kept from run to run beside the planner's times.

Each model of accelerator has numbers of its own: another compiler makes its kernels, and they save another part of
a step. Only the decision to compile depends on them, never a result.
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


def measured(name: str, default: float, hardware: str | None = None) -> float:
    """Return a number as it was measured on the CPU, or on a model of accelerator; the default if it was not."""
    return _known(user_cache()).get(_key(name, hardware), default)


def learn(hardware: str | None = None, **found: float) -> None:
    """Keep numbers that were measured. Each is averaged with what was known, because one measurement is noisy.

    Args:
        hardware: The name of the accelerator's model; None for the CPU.
        **found: The numbers.
    """
    folder = user_cache()
    if folder is None:
        return
    known = _known(folder)
    for name, value in found.items():
        if name != COST:
            value = min(MAX_PART, max(LEAST_SAVED if name == SAVED else 0.0, value))
        key = _key(name, hardware)
        known[key] = (known[key] + value) / 2 if key in known else value
    with suppress(OSError):
        write_numbers(_path(folder), known)


@cache
def _known(folder: Path | None) -> dict[str, float]:
    # Read once: steps ask again and again.
    return {} if folder is None else read_numbers(_path(folder))


def _key(name: str, hardware: str | None) -> str:
    return name if hardware is None else f"{name} on {hardware}"


def _path(folder: Path) -> Path:
    return folder / "compiling.json"
