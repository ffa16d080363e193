"""Trials: a few steps on copies of the members, to see how long they take. Nothing of the run is touched."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from modelfleet.each import Each
from modelfleet.feeds import Batch, Feed
from modelfleet.feeds.grouping import group_steps
from modelfleet.lanes import Lane
from modelfleet.planning import supply
from modelfleet.planning.assembly import Part, Studied
from modelfleet.sharing.shifts import Ended, Sharing, Shift, Way
from modelfleet.trees import map_tree

LEAST = 0.05  # seconds of steps that a trial times at once
ROUNDS = 3


def step_seconds(studied: Studied, part: Part, batch: Batch, most: float) -> float:
    """How long a step of a part takes as a lane of its own, in at most so many seconds beside making it ready."""
    lane = studied.assembly.lane(studied, part, scratch=True)
    lane.engine.check(batch, lane.names[0])
    lane.ready(batch, "train")
    several = lane.engine.several
    framework = lane.members[0].framework
    one = next(group_steps(iter([batch] * several), several, framework.arrays)) if batch.full else batch
    steps = one.steps or 1

    def took(calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            lane.train(one, lane.columns, 0)
        lane.epoch_values()  # here at the latest the device has done them all
        return time.perf_counter() - begun

    begun = time.perf_counter()
    took(1)
    best = took(1)
    calls = max(1, min(50, int(LEAST / max(best, 1e-6))))
    for _ in range(ROUNDS):
        if time.perf_counter() - begun + calls * best > most:
            break
        best = min(best, took(calls) / calls)
    return best / steps


def epoch_seconds(
    studied: Studied,
    lanes: Sequence[tuple[Lane, Feed]],
    job: supply.Job,
    sharing_of: Callable[[supply.Job], Sharing],
    steps: Sequence[int],
) -> float:
    """How long so many steps of every lane take when they share the device in a way; a warm epoch's."""
    scratch = _scratch(lanes, job, steps)
    copies = [studied.assembly.lane(studied, lane.part, scratch=True) for lane, _ in lanes]
    fed = supply.feeds(copies, scratch)
    for lane, feed in fed:
        supply.check(lane, feed, scratch)
        lane.ready(feed.first(), "train")
    shifts = supply.shifts(fed, scratch)
    for shift in shifts:
        shift.take_several()
    ends = [time.perf_counter()]
    way = Way(True, watched=False, stopped=lambda: False, side_by_side=False, halve=lambda shift: None)
    for moment in sharing_of(scratch)(shifts, way):
        if isinstance(moment, Ended):
            ends.append(time.perf_counter())
            for shift, _ in moment.reports:
                shift.leave([])
    _finish(shifts)
    return min(np.diff(ends[1:]).tolist() or [ends[-1] - ends[0]])


def _finish(shifts: Sequence[Shift]) -> None:
    for shift in shifts:
        shift.close()
        shift.lane.engine.stop()


def _scratch(lanes: Sequence[tuple[Lane, Feed]], job: supply.Job, steps: Sequence[int]) -> supply.Job:
    """A job of a few epochs of so many steps, on the first batch of every member again and again."""
    data: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for (lane, feed), count in zip(lanes, steps, strict=True):
        batch = feed.first()
        host = lane.members[0].framework.arrays.host
        for slot, name in enumerate(lane.names):
            own = batch.data if batch.shared else map_tree(lambda leaf, slot=slot: leaf[slot], batch.data)
            data[name] = map_tree(_repeated(host, count), own)
            sizes[name] = batch.size
    return supply.Job(job.names, Each(data), epochs=ROUNDS, batch_size=Each(sizes), shuffle=False, share=job.share)


def _repeated(host: Callable[[Any], np.ndarray], count: int) -> Callable[[Any], np.ndarray]:
    return lambda leaf: np.concatenate([host(leaf)] * count)
