"""The proof that a schedule ends, even if every send waits until its receiver is there."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from modelfleet.errors import DeadlockError, InputError
from modelfleet.schedules.circles import Step, shortest_circle
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
