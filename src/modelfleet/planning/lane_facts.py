"""Describing plans: the sizes, programs and times of lanes that are built."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from modelfleet.feeds import Feed
from modelfleet.lanes import Lane, LaneSpec
from modelfleet.lanes.spec import join_reasons
from modelfleet.planning.plan import Plan
from modelfleet.runs.job import Job


def describe(
    plan: Plan, lanes: Sequence[tuple[Lane, Feed | None]], job: Job | None, seconds_per_epoch: float | None
) -> Plan:
    """Return a plan with what is known about its lanes: sizes, programs, times and reasons.

    Args:
        plan: The plan.
        lanes: Its lanes, each with its feed if there are data.
        job: The arguments of the verb, if there are data.
        seconds_per_epoch: Time of an epoch in the last run.
    """
    specs = [_describe(spec, *own, job) for spec, own in zip(plan.lanes, lanes, strict=True)]
    return replace(plan, lanes=tuple(specs), seconds_per_epoch=seconds_per_epoch)


def _describe(spec: LaneSpec, lane: Lane, feed: Feed | None, job: Job | None) -> LaneSpec:
    engine = lane.engine
    steps = None
    if job is not None and feed is not None and feed.steps is not None:
        epochs = job.by_name("epochs")
        per_epoch = job.limit_steps(feed.steps, lane.names)
        assert per_epoch is not None
        steps = int((per_epoch * np.array([int(epochs[name]) for name in lane.names])).max())
    return replace(
        spec,
        fused=engine.fused,
        reason=_reason(spec, lane),
        parameters=engine.parameters,
        state_bytes=engine.bytes,
        working_bytes=None if feed is None else engine.working_bytes(feed.first()),
        steps=steps,
        seconds_per_step=lane.seconds_per_step,
        program=engine.program,
    )


def _reason(spec: LaneSpec, lane: Lane) -> str:
    together = None
    if spec.split is not None:
        group, devices = spec.split
        together = f"{spec.width} of {group} of one structure, split over {devices} devices"
    elif lane.engine.fused and spec.width > 1:
        widths = len(lane.by_width(lane.names))
        alike = "one structure" if widths == 1 else f"{widths} widths, padded to the widest"
        together = f"{spec.width} of {alike}, fused"
    optimizers = Counter(task.optimizer_name for task in lane.tasks)
    several = ", ".join(f"{count} {name}" for name, count in optimizers.items()) if len(optimizers) > 1 else None
    untraced = lane.engine.untraced
    python = untraced and f"every step runs its Python: {untraced}"
    uncompiled = lane.engine.uncompiled
    slower = uncompiled and f"not compiled: {uncompiled}"
    uncaptured = lane.engine.uncaptured
    launches = uncaptured and f"not captured: {uncaptured}"
    return join_reasons(together, several, spec.apart_because, python, slower, launches) or "on its own"
