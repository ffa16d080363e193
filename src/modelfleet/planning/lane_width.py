"""Memory: how many members of a lane fit on a device at once."""

from collections.abc import Sequence

from modelfleet.free_memory import available, requested_limit
from modelfleet.lanes import Lane
from modelfleet.runs.opening import OpenLane
from modelfleet.trees import leaves


def widest(opened: OpenLane) -> int:
    """Return how many of a lane's members fit on the device at once: at least 1, since fewer can't be tried."""
    lane = opened.lane
    limit = _limit(lane)
    if limit is None or _is_small(opened, limit):
        return len(lane.members)
    first = opened.feed.first()
    need = lane.engine.bytes + (lane.engine.working_bytes(first) or 0)
    return max(1, min(len(lane.members), int(limit // max(need / len(lane.members), 1))))


def _limit(lane: Lane) -> int | None:
    """Return the bytes that lanes may take on a lane's device. None if it is not known."""
    requested = requested_limit()
    if requested is not None:
        return requested
    free = available(lane.members[0].framework, lane.engine.device, lane.device)
    return None if free is None else free + lane.engine.bytes


def _is_small(opened: OpenLane, limit: int) -> bool:
    """Return True if the lane is so small that measuring its memory is not worth a compile."""
    rows = sum(leaf.nbytes for leaf in leaves(opened.feed.first().data))
    return 20 * opened.lane.engine.bytes + 1000 * rows < limit


def waves(width: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Divide names into as few pieces of at most `width` as possible, of even sizes."""
    return pieces(-(-len(names) // width), names)


def pieces(count: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Divide names into `count` pieces of even sizes."""
    size, more = divmod(len(names), count)
    found, start = [], 0
    for number in range(count):
        end = start + size + (number < more)
        found.append(tuple(names[start:end]))
        start = end
    return found
