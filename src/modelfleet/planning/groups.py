"""Groups: which members have one structure and one task, and what tells the others apart."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Members, by position, that may be fused; and what keeps them apart from the first group."""

    positions: tuple[int, ...]
    reason: str | None


def group(
    names: Sequence[str],
    signatures: Sequence[Hashable],
    tasks: Sequence[Any],
    difference: Callable[[Any, Any], str | None],
) -> list[Group]:
    """Put members of equal signature and the same task together, in the order of their first members."""
    found: dict[tuple[Hashable, int], list[int]] = {}
    for position, (signature, task) in enumerate(zip(signatures, tasks, strict=True)):
        found.setdefault((signature, id(task)), []).append(position)
    groups = []
    for positions in found.values():
        first = positions[0]
        reason = None
        if groups:
            what = difference(signatures[first], signatures[0])
            reason = f"{names[first]!r} is unlike {names[0]!r}: {what or 'its optimizer has other options'}"
        plain = getattr(tasks[first], "plain", None)
        if plain is not None:
            reason = f"{names[first]!r} runs on its own: {plain}"
        groups.append(Group(tuple(positions), reason))
    return groups
