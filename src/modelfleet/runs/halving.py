"""Halving: two lanes in place of one whose step has run out of memory (`LaneRun._run_out_of_memory` decides)."""

from dataclasses import replace

import numpy as np

from modelfleet.lanes import Groups, LaneBuilder
from modelfleet.runs.lane_run import LaneRun
from modelfleet.runs.starting import make_schedules


def halve(builder: LaneBuilder, groups: Groups, run: LaneRun) -> list[LaneRun]:
    """Return two runs for the members that still train, with their state. The second waits for the first."""
    lane = run.lane
    training = run.training()
    middle = -(-len(training) // 2)
    halves = []
    both = training[:middle], training[middle:]
    lane.engine.park()  # the device has no memory for another copy
    states = [lane.read_apart(names, host=True) for names in both]
    for wave, names in enumerate(both):
        spec = replace(
            lane.spec,
            members=tuple(names),
            apart_because=f"a lane of {len(training)} ran out of memory",
            wave=lane.spec.wave + wave,
        )
        positions = np.array([lane.positions[name] for name in names])
        slots = [int(np.flatnonzero(lane.slots == position)[0]) for position in positions]
        feed = run.feed.select(slots)
        half = builder.build(groups, spec)
        # Not made ready here: that could run out of memory again. A step that does so halves the lane once more.
        half.engine.check(feed.first(), names[0])
        half.record_losses(on=lane.losses is not None)
        for own, state in states[wave]:
            half.write(own, state)
        steps = None if run.known_steps is None else run.known_steps[positions]
        schedules = make_schedules(half, steps, run.epochs[positions], run.initial_epoch)
        state = run.schedules.state()
        own = isinstance(state, list) and state
        schedules.restore([state[position] for position in positions] if own else state)
        made = replace(
            run,
            lane=half,
            feed=feed,
            validation=run.validation and run.validation.select(slots),
            schedules=schedules,
            epochs=run.epochs[positions],
            steps_per_epoch=None if run.steps_per_epoch is None else run.steps_per_epoch[positions],
        )
        made.factors.restore(run.factors.select(positions))
        made.before = {name: column[positions] for name, column in run.before.items()}
        halves.append(made)
    return halves
