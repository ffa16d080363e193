"""The proof that a schedule ends, even if every send waits until its receiver is there."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelfleet.errors import DeadlockError, InputError
from modelfleet.schedules.matching import Meeting, doing, match
from modelfleet.schedules.operations import Schedule


def check(schedule: Schedule) -> None:
    """Check that a schedule ends if sends wait for their receivers, and receives for their senders.

    Each rank goes through its list in order. A send waits until its receive has been reached, a sum until all its
    ranks have come, and the transfers of a group run at once. The check is exact: what passes ends, and what does
    not pass hangs.

    Args:
        schedule: The schedule, built or written by hand.

    Raises:
        DeadlockError: If it would hang. The message has the shortest circle of operations that wait for each
            other, or the operation that waits for one that no rank has.
        InputError: If it ends, but a rank would receive another micro-batch than it expects; or if an operation
            names ranks that there are not.
    """
    meetings = match(schedule)
    stuck = _stuck(schedule, meetings)
    if stuck:
        raise _deadlock(schedule, shortest_circle(stuck))
    for meeting in meetings:
        _check_same(schedule, meeting)


def _stuck(schedule: Schedule, meetings: Sequence[Meeting]) -> list[Meeting]:
    """Play the schedule, and return the meetings that never happen. Those that a rank has reached come first."""
    by_group = groups_of(meetings, len(schedule.devices))
    come: dict[Meeting, int] = defaultdict(int)
    pending = [0] * len(by_group)
    reached = [-1] * len(by_group)
    happened: set[Meeting] = set()
    ready = list(range(len(by_group)))
    while ready:
        rank = ready.pop()
        reached[rank] += 1
        if reached[rank] == len(by_group[rank]):
            continue
        group = by_group[rank][reached[rank]]
        pending[rank] = len(group)
        for meeting in group:
            come[meeting] += 1
            if come[meeting] == len(meeting.places):
                happened.add(meeting)
                for place in meeting.places:
                    pending[place.rank] -= 1
                    if pending[place.rank] == 0:
                        ready.append(place.rank)
    stuck = [meeting for meeting in meetings if meeting not in happened]
    return sorted(stuck, key=lambda meeting: not come[meeting])


def groups_of(meetings: Iterable[Meeting], ranks: int) -> list[list[list[Meeting]]]:
    """Return the meetings of every rank, by group and in the order of the rank's list.

    A rank that meets itself within a group is in it twice.
    """
    places = sorted((place, meeting) for meeting in meetings for place in meeting.places)
    groups: list[list[list[Meeting]]] = [[] for _ in range(ranks)]
    for place, meeting in places:
        own = groups[place.rank]
        if place.group == len(own):
            own.append([])
        own[place.group].append(meeting)
    return groups


@dataclass(frozen=True, slots=True)
class Step:
    """Is one step of a circle: a rank comes to the operation `then` only after `first`; both are indices."""

    rank: int
    first: int
    then: int


def shortest_circle(meetings: Sequence[Meeting]) -> tuple[Step, ...]:
    """Return a shortest circle among meetings of which each must wait for another one.

    A meeting waits for every one that one of its ranks has in an earlier group. From each meeting a breadth-first
    search follows those that wait for it. What waits for a meeting on a rank is the end of the rank's list, so a
    search remembers for every rank which part of the list it has seen, and looks at each place once.
    """
    later: dict[int, list[tuple[int, int, Meeting]]] = defaultdict(list)  # by rank: group, index, meeting
    for meeting in meetings:
        for place in meeting.places:
            later[place.rank].append((place.group, place.index, meeting))
    for own in later.values():
        own.sort(key=lambda entry: entry[:2], reverse=True)
    shortest_possible = 1 if any(map(_meets_itself, meetings)) else 2
    best: tuple[Step, ...] = ()
    for start in meetings:
        best = _circle_through(start, later, len(best) - 1 if best else len(meetings)) or best
        if best and len(best) <= shortest_possible:
            break
    assert best, "meetings that never happen must wait in a circle"
    return best


def _meets_itself(meeting: Meeting) -> bool:
    return len({place.rank for place in meeting.places}) < len(meeting.places)


def _circle_through(
    start: Meeting, later: dict[int, list[tuple[int, int, Meeting]]], longest: int
) -> tuple[Step, ...]:
    """Return the shortest circle through a meeting, if it has at most `longest` steps."""
    seen = dict.fromkeys(later, 0)  # how many entries of the rank's list have been seen, from its end
    came: dict[Meeting, tuple[Meeting, Step]] = {}
    layer = [start]
    for _ in range(longest):
        following: list[Meeting] = []
        for meeting in layer:
            for rank, index, group in meeting.places:
                own = later[rank]
                while seen[rank] < len(own) and own[seen[rank]][0] > group:
                    _, then, other = own[seen[rank]]
                    seen[rank] += 1
                    if other == start:
                        return _trace(start, meeting, Step(rank, index, then), came)
                    if other not in came:
                        came[other] = meeting, Step(rank, index, then)
                        following.append(other)
        layer = following
    return ()


def _trace(
    start: Meeting, last: Meeting, step: Step, came: dict[Meeting, tuple[Meeting, Step]]
) -> tuple[Step, ...]:
    steps = [step]
    while last != start:
        last, step = came[last]
        steps.append(step)
    return tuple(reversed(steps))


def _deadlock(schedule: Schedule, circle: Sequence[Step]) -> DeadlockError:
    lines = []
    for step in reversed(circle):
        own = schedule.operations[step.rank]
        lines.append(
            f"  {schedule.devices[step.rank]} {doing(own[step.then], schedule)} only after it has "
            f"{doing(own[step.first], schedule, done=True)}."
        )
    return DeadlockError(
        f"The schedule '{schedule.name}' can't end, because these operations wait for each other:\n"
        + "\n".join(lines)
        + "\nSwap the two operations on one of these devices, or let them run at once (with_previous=True).",
        tuple((step.rank, step.first, step.then) for step in circle),
    )


def _check_same(schedule: Schedule, meeting: Meeting) -> None:
    """Raise InputError if a transfer's receiver expects another micro-batch than the sender sends."""
    send, *rest = (schedule.operations[place.rank][place.index] for place in meeting.places)
    if send.kind == "sum" or send.micro == rest[0].micro:
        return
    sender, receiver = (schedule.devices[place.rank] for place in meeting.places)
    raise InputError(
        f"{sender} {doing(send, schedule)}, but {receiver} expects micro-batch {rest[0].micro} at that time. "
        "Tensors arrive in the order in which they were sent: give both devices the same order."
    )
