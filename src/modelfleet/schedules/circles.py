"""The shortest circle of transfers and collectives that wait for each other."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modelfleet.schedules.matching import Meeting


@dataclass(frozen=True, slots=True)
class Step:
    """Is one step of a circle: a rank comes to the operation `then` only after `first`; both are indices."""

    rank: int
    first: int
    then: int


def shortest_circle(meetings: Sequence[Meeting]) -> tuple[Step, ...]:
    """Return a shortest circle among meetings of which each waits for another one.

    A meeting waits for every one that one of its ranks has in an earlier group.
    """
    return _circle_through(_start(meetings), meetings)


def _start(meetings: Sequence[Meeting]) -> Meeting:
    """Return the first meeting that is on a shortest circle.

    What waits for a meeting on a rank is the end of the rank's list. So all that waits for it over at most k steps
    is one number per rank: `reach`, the first group that waits. The next step follows from a table: what is the
    first group of each rank that waits for something in a rank's group, or in a later one? A shortest circle has
    at most one step on each rank, so there are few steps.
    """
    ranks = 1 + max(place.rank for meeting in meetings for place in meeting.places)
    never = 1 + max(place.group for meeting in meetings for place in meeting.places)
    waits = np.full((ranks, never + 1, ranks), never)  # (rank, group, other rank)
    reach = np.full((len(meetings), ranks), never)  # (meeting, rank)
    for number, meeting in enumerate(meetings):
        for rank, _, group in meeting.places:
            reach[number, rank] = min(reach[number, rank], group + 1)
            for other, _, other_group in meeting.places:
                waits[rank, group, other] = min(waits[rank, group, other], other_group + 1)
    waits = np.minimum.accumulate(waits[:, ::-1], axis=1)[:, ::-1]
    numbers = np.array([number for number, meeting in enumerate(meetings) for _ in meeting.places])
    places = np.array([(place.rank, place.group) for meeting in meetings for place in meeting.places])
    for _ in range(ranks):
        waits_for_itself = places[:, 1] >= reach[numbers, places[:, 0]]
        if waits_for_itself.any():
            return meetings[numbers[waits_for_itself.argmax()]]
        reach = np.minimum(reach, np.min([waits[rank, reach[:, rank]] for rank in range(ranks)], axis=0))
    raise AssertionError("meetings that never happen wait in a circle")


def _circle_through(start: Meeting, meetings: Sequence[Meeting]) -> tuple[Step, ...]:
    """Return the shortest circle through a meeting, by a breadth-first search of those that wait for it."""
    unseen: dict[int, list[tuple[int, int, Meeting]]] = defaultdict(list)  # by rank: group, index, meeting
    for meeting in meetings:
        for place in meeting.places:
            unseen[place.rank].append((place.group, place.index, meeting))
    for own in unseen.values():
        own.sort(key=lambda entry: entry[:2])
    came: dict[Meeting, tuple[Meeting, Step]] = {}
    layer = [start]
    while layer:
        following: list[Meeting] = []
        for meeting in layer:
            for rank, index, group in meeting.places:
                while unseen[rank] and unseen[rank][-1][0] > group:
                    _, then, other = unseen[rank].pop()
                    if other not in came:
                        came[other] = meeting, Step(rank, index, then)
                        following.append(other)
                        if other == start:
                            return _trace(start, came)
        layer = following
    raise AssertionError("the meeting is on a circle")


def _trace(start: Meeting, came: dict[Meeting, tuple[Meeting, Step]]) -> tuple[Step, ...]:
    """Return the steps that led from a meeting back to itself."""
    meeting, step = came[start]
    steps = [step]
    while meeting != start:
        meeting, step = came[meeting]
        steps.append(step)
    return tuple(reversed(steps))
