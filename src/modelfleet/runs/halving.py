"""Halving: two lanes in place of one whose step has run out of memory (`LaneRun._run_out_of_memory` decides)."""

from dataclasses import replace

import numpy as np

from modelfleet.lanes import Groups, LaneBuilder
from modelfleet.runs.lane_run import LaneRun


def halve(builder: LaneBuilder, groups: Groups, run: LaneRun) -> list[LaneRun]:
    """Return two runs for the members that still train, with their state. The second waits for the first."""
    lane = run.lane
    state = lane.arrays()
    training = run.training()
    middle = -(-len(training) // 2)
    halves = []
    for wave, names in enumerate((training[:middle], training[middle:])):
        spec = replace(
            lane.spec,
            members=tuple(names),
            apart_because=f"a lane of {len(training)} ran out of memory",
            wave=run.wave + wave,
        )
        positions = np.array([lane.positions[name] for name in names])
        slots = [int(np.flatnonzero(lane.slots == position)[0]) for position in positions]
        feed = run.feed.select(slots)
        half = builder.build(groups, spec)
        # Not made ready: that could run out of memory again, and a step that does halves the lane once more.
        half.engine.check(feed.first(), names[0])
        half.load_arrays({name: array[positions] for name, array in state.items()})
        half.steps, half.epochs = lane.steps[positions], lane.epochs[positions]
        progress = run.schedules.state()
        schedules = half.members[0].framework.Schedules(
            half.schedules,
            half.columns,
            half.engine.task,
            None if run.known_steps is None else run.known_steps[positions],
            run.epochs[positions],
            names=names,
            initial_epoch=run.initial_epoch,
        )
        own = isinstance(progress, list) and progress
        schedules.restore([progress[position] for position in positions] if own else progress)
        made = replace(
            run,
            lane=half,
            feed=feed,
            validation=run.validation and run.validation.select(slots),
            schedules=schedules,
            epochs=run.epochs[positions],
            steps_per_epoch=None if run.steps_per_epoch is None else run.steps_per_epoch[positions],
        )
        made.steps_before, made.updates_before = run.steps_before[positions], run.updates_before[positions]
        made.epochs_before = run.epochs_before[positions]
        halves.append(made)
    return halves
