"""Trials: a few steps on copies of the members, to see how long they take. The members do not change."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from modelfleet.each import Each
from modelfleet.errors import FleetError
from modelfleet.feeds import Batch
from modelfleet.feeds.several_steps import group_steps
from modelfleet.lanes import Groups, Lane, LaneBuilder, LaneSpec
from modelfleet.runs.events import EpochsEnded, RunOptions, Sharing
from modelfleet.runs.job import Job
from modelfleet.runs.opening import LaneOpener, OpenLane
from modelfleet.runs.starting import make_runs
from modelfleet.trees import map_tree
from modelfleet.types import Tensor

MIN_SECONDS = 0.005  # of steps that a trial times together: less than another process has a core for
LOOK_SECONDS = 0.01  # of the shortest look at a step
ROUNDS = 12  # of such steps. The quickest one counts
EPOCHS = 3  # of a trial of a sharing


def step_seconds(builder: LaneBuilder, groups: Groups, spec: LaneSpec, batch: Batch, max_seconds: float) -> float:
    """Return the time of a lane's step, measured within `max_seconds`. Making the lane ready does not count."""
    lane = builder.build(groups, spec, scratch=True)
    lane.engine.check(batch, lane.names[0])
    lane.ready(batch, "train")
    several = lane.engine.steps_per_call
    arrays = lane.members[0].framework.arrays
    one = next(group_steps(iter([batch] * several), several, arrays)) if batch.full else batch

    def timed(calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            lane.train(one, lane.columns, 0)
        lane.epoch_values()  # waits until the device has done all steps
        return time.perf_counter() - begun

    begun = time.perf_counter()
    timed(1)
    best = looked = timed(1)
    while looked < LOOK_SECONDS:  # the first steps of a process take several times as long as those after them
        best = min(best, again := timed(1))
        looked += again
    calls = max(1, min(50, int(MIN_SECONDS / max(best, 1e-6))))
    for _ in range(ROUNDS):
        if time.perf_counter() - begun + calls * best > max_seconds:
            break
        best = min(best, timed(calls) / calls)
    return best / (one.steps or 1)


def epoch_seconds(
    known: LaneOpener, opened: Sequence[OpenLane], sharing_of: Callable[[Job], Sharing], steps: Sequence[int]
) -> float:
    """Return the time of `steps` of every lane when the lanes share their device in a given way."""
    trial = _trial_job(opened, known.job, steps)
    stored = known.feeding.stored
    opener = LaneOpener(known.builder, known.groups, trial, "train", scratch=True, stored=stored)
    runs = make_runs(opener.open_all([one.spec for one in opened]), opener.feeding)
    for run in runs:
        run.choose_turn_length()
    ends = [time.perf_counter()]
    options = RunOptions(
        together=True, watched=False, stopped=lambda: False, in_step=False, halve=lambda run: None
    )
    for event in sharing_of(trial)(runs, options):
        if isinstance(event, EpochsEnded):
            ends.append(time.perf_counter())
            for run, _ in event.reports:
                run.leave([])
    for run in runs:
        run.close()
        run.lane.engine.stop()
    if any(run.ran_out_of_memory for run in runs):
        raise FleetError("the lanes of a trial do not fit beside each other")
    return min(np.diff(ends[1:]).tolist() or [ends[-1] - ends[0]])  # of the epochs after the first, if any


def _trial_job(opened: Sequence[OpenLane], job: Job, steps: Sequence[int]) -> Job:
    """Return a job of a few epochs, in which every member has its first batch again and again."""
    data: dict[str, object] = {}
    sizes: dict[str, int] = {}
    for one, count in zip(opened, steps, strict=True):
        batch = one.feed.first()
        for position, name in enumerate(one.lane.names):
            own = batch.data if batch.shared else map_tree(lambda leaf, row=position: leaf[row], batch.data)
            data[name] = map_tree(_repeat(one.lane, count), own)
            sizes[name] = batch.size
    return Job(job.names, Each(data), epochs=EPOCHS, batch_size=Each(sizes), shuffle=False, share=job.share)


def _repeat(lane: Lane, count: int) -> Callable[[Tensor], np.ndarray]:
    host = lane.members[0].framework.arrays.host
    return lambda leaf: np.concatenate([host(leaf)] * count)
