"""Runs for the lanes of a fit, with their schedules and validation data."""

from collections.abc import Sequence

import numpy as np

from modelfleet.frameworks.adapter_protocol import Schedules
from modelfleet.lanes.lane import Lane
from modelfleet.runs.feeding import Feeding
from modelfleet.runs.lane_run import LaneRun
from modelfleet.runs.opening import OpenLane


def make_runs(opened: Sequence[OpenLane], feeding: Feeding) -> list[LaneRun]:
    """Return the runs of open lanes. Their validation data are checked."""
    job = feeding.job
    epochs, shares = job.by_name("epochs"), job.by_name("share")
    validation = [None if job.validation is None else feeding.feed(one.lane, "validation") for one in opened]
    for one, feed in zip(opened, validation, strict=True):
        if feed is not None:
            feeding.check(one.lane, feed, "validation")
    runs = []
    for one, feed in zip(opened, validation, strict=True):
        lane = one.lane
        own_epochs = np.array([epochs[name] for name in lane.names])
        steps = job.limit_steps(one.feed.steps, lane.names)
        schedules = make_schedules(lane, steps, own_epochs, job.initial_epoch)
        lane.engine.clear_trouble()
        lane.record_losses(on=job.record_steps)
        turns = max(shares[name] or 1 for name in lane.names)
        runs.append(
            LaneRun(
                lane,
                one.feed,
                feed,
                schedules,
                own_epochs,
                turns,
                steps_per_epoch=job.step_limits(lane.names),
                initial_epoch=job.initial_epoch,
            )
        )
    return runs


def make_schedules(lane: Lane, steps: np.ndarray | None, epochs: np.ndarray, initial_epoch: int) -> Schedules:
    """Return the schedules of a lane's members for a fit, from the steps per epoch and the epochs of each."""
    make = lane.members[0].framework.Schedules
    given, names = (lane.schedules, lane.columns, lane.tasks), lane.names
    return make(*given, steps, epochs, names=names, initial_epoch=initial_epoch)
