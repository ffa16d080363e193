"""Events of a fit, and the interface that all sharings have in common."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from modelfleet.feeds import Batch
from modelfleet.lanes.work import finish_in_step
from modelfleet.runs.lane_run import EpochReport, LaneRun

Reports = list[tuple[LaneRun, EpochReport]]
Teach = Callable[[Sequence[tuple[LaneRun, Batch]]], list[Batch]]
"""Function of the lanes that take their next step and their batches. It returns batches in their place."""


@dataclass(frozen=True)
class StepsTaken:
    """Says that a lane has taken a turn of one or more steps."""

    run: LaneRun
    steps: int


@dataclass(frozen=True)
class EpochsEnded:
    """Says that one lane has ended its epoch, or all training lanes have, if they wait for each other."""

    reports: Reports


Event = StepsTaken | EpochsEnded


@dataclass(frozen=True)
class RunOptions:
    """Options for running the lanes of a fit."""

    together: bool
    """True if a lane that has ended its epoch waits for the others."""
    watched: bool
    """True if every step is an event, because a callback wants to see it."""
    stopped: Callable[[], bool]
    """Return True if the fit should stop after the current steps."""
    in_step: bool
    """True if several lanes read one loader, so that all take a batch before any takes the next."""
    halve: Callable[[LaneRun], None]
    """Replace a lane that has run out of memory by two."""
    teach: Teach | None = None
    """Replace the batches of the lanes' next step, which are read before any takes it. `in_step` is True then."""


Sharing = Callable[[Sequence[LaneRun], RunOptions], Iterator[Event]]
"""Function that runs lanes to their end on a device that they share, and yields events."""


def next_wave(runs: Sequence[LaneRun]) -> list[LaneRun]:
    """Return the runs that may train now: those of the first wave that is not done."""
    working = [run for run in runs if run.working]
    wave = min((run.lane.spec.wave for run in working), default=0)
    return [run for run in working if run.lane.spec.wave == wave]


def due(runs: Sequence[LaneRun], options: RunOptions) -> list[LaneRun]:
    """Return the runs that take turns now: one wave, or all that read one loader, which is read only once."""
    return [run for run in runs if run.working] if options.in_step else next_wave(runs)


def end_epochs(runs: Sequence[LaneRun]) -> Reports:
    """End the epoch of several lanes, which read their validation data in step."""
    return list(zip(runs, finish_in_step([run.ending() for run in runs]), strict=True))
