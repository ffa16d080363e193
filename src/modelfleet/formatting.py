"""Numbers and names as people read them."""

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 member`, `2,000 members`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(number: float) -> str:
    """Return a number of bytes in a suitable unit: `14 MB`."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def some(names: Sequence[str]) -> str:
    """Return up to three names, or the first and the last of many with their number: `a … z (26)`."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names):,})"


def duration(seconds: float) -> str:
    """Return a duration: `0.4 s`, `3 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def without_period(error: object) -> str:
    """Return an error's message without its final period, to continue the sentence."""
    return str(error).rstrip().rstrip(".")
