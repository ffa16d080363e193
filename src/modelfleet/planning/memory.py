"""How much fits: what lanes need of a device, and what it has."""

import os
import re
from collections.abc import Sequence
from typing import Any

from modelfleet.devices import host_memory
from modelfleet.errors import InputError
from modelfleet.feeds import Feed
from modelfleet.lanes import Lane
from modelfleet.trees import leaves

_PART = 0.9  # of the free memory may be planned for
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def limit(lane: Lane) -> int | None:
    """The bytes that lanes may take on a lane's device; None if that is not known."""
    asked = _asked()
    if asked is not None:
        return asked
    free = available(lane.members[0].framework, lane.engine.device, lane.device)
    return None if free is None else free + lane.engine.bytes


def available(framework: Any, device: Any, name: str) -> int | None:
    """The bytes that may be planned for on a framework's device; None if that is not known.

    `MODELFLEET_MEMORY`, as in "6GB", sets it. Else it is most of what is free now.
    """
    asked = _asked()
    if asked is not None:
        return asked
    memory = framework.memory(device)
    if memory is None and name.startswith("cpu"):
        memory = host_memory()
    return None if memory is None else int(memory.free * _PART)


def _asked() -> int | None:
    asked = os.environ.get("MODELFLEET_MEMORY")
    if not asked:
        return None
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)i?b?\s*", asked.lower())
    if match is None:
        raise InputError(f"MODELFLEET_MEMORY is {asked!r}; expected a size such as 6GB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2]])


def need(lane: Lane, feed: Feed) -> int:
    """What a lane takes on its device while it steps: its state, and what a step works with."""
    return lane.engine.bytes + (lane.engine.working_bytes(feed.first()) or 0)


def widest(lane: Lane, feed: Feed) -> int:
    """How many of a lane's members fit on the device at once; 1 at least, for less can't be tried."""
    most = limit(lane)
    if most is None or _plenty(lane, feed, most):
        return len(lane.members)
    each = need(lane, feed) / len(lane.members)
    return max(1, min(len(lane.members), int(most // max(each, 1))))


def _plenty(lane: Lane, feed: Feed, most: int) -> bool:
    """Whether so little is at stake that what a step takes need not be known: to know it may mean to compile."""
    rows = sum(leaf.nbytes for leaf in leaves(feed.first().data))
    return 20 * lane.engine.bytes + 1000 * rows < most


def waves(width: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names in as few parts of at most so many as can be, as even as can be."""
    return pieces(-(-len(names) // width), names)


def pieces(count: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names in so many parts, as even as can be."""
    size, more = divmod(len(names), count)
    found, start = [], 0
    for number in range(count):
        end = start + size + (number < more)
        found.append(tuple(names[start:end]))
        start = end
    return found
