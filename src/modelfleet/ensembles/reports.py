"""Worker's side of a quorum: lanes are opened, run and reported one by one, so that who fails is alone."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from modelfleet.ensembles.parts import Merging, Outputs, Part
from modelfleet.ensembles.reduction import Reduction, batches_of
from modelfleet.errors import FleetError, StrategyError
from modelfleet.frameworks.contexts import computing, using_settings, without_callers_contexts
from modelfleet.lanes import LaneSpec
from modelfleet.remote.answering import AnswerOrder, opener_of, refusing_changes, write_states
from modelfleet.runs.opening import LaneOpener, OpenLane
from modelfleet.trees import leaves
from modelfleet.types import State
from modelfleet.workers import interrupted

NOT_FINITE = "its outputs are not finite (NaN or infinity)"


@dataclass(frozen=True)
class LocalOrder:
    """Lanes to report on in this process."""

    opener: LaneOpener
    lanes: Sequence[LaneSpec]
    states: dict[str, State]


@dataclass(frozen=True)
class ReportOrder:
    """Everything that a worker needs to reduce lanes one by one."""

    way: Merging
    lanes: AnswerOrder | LocalOrder


@dataclass(frozen=True)
class Report:
    """What the members of one lane say."""

    answered: tuple[str, ...] = ()
    parts: list[Part] = field(default_factory=list)
    """Their part of every batch."""
    failed: dict[str, str] = field(default_factory=dict)
    """Members without an answer, with the reasons."""


def report_lanes(order: ReportOrder) -> Generator[Report | None, None, None]:
    """Yield None when the worker has started, and then a report for one lane after the other."""
    yield None
    if isinstance(order.lanes, LocalOrder):
        given = order.lanes
        with without_callers_contexts():
            for spec in given.lanes:
                yield from _reports(given.opener, spec, given.states, order.way, remote=False)
        return
    with using_settings(order.lanes.settings), computing():
        opener = opener_of(order.lanes)
        for spec in order.lanes.lanes:
            yield from _reports(opener, spec, order.lanes.states, order.way, remote=True)


def _reports(
    opener: LaneOpener, spec: LaneSpec, states: dict[str, State], way: Merging, *, remote: bool
) -> Iterator[Report]:
    """Yield the reports of a lane. If it can't run as a whole, its members run one by one."""
    try:
        one = opener.open(spec)
        write_states([one], states)
        changes: AbstractContextManager[None] = refusing_changes([one]) if remote else nullcontext()
        with changes:
            report = _report(one, way)
        if one.lane.engine.changed:
            one.lane.scatter(one.lane.names)
    except StrategyError:
        raise
    except Exception as error:  # a model may raise anything
        if len(spec.members) == 1:
            yield Report(failed={spec.members[0]: _reason(error)})
            return
    else:
        yield report
        return
    for name in spec.members:
        yield from _reports(
            opener, replace(spec, members=(name,), fused=False, split=None), states, way, remote=remote
        )


def _report(one: OpenLane, way: Merging) -> Report:
    """Return the report of an open lane. It runs again without the members whose outputs are not finite."""
    failed: set[str] = set()
    while True:
        reduction, found = Reduction(way), set[str]()
        for batch, outputs in enumerate(batches_of(one.lane, one.feed)):
            if interrupted():
                return Report()  # which nobody waits for
            for own in outputs:
                found |= _not_finite(own) - failed
                kept = own.without(failed)
                if kept is not None:
                    reduction.add(batch, way.part(kept))
        if not found:
            answered = tuple(name for name in one.lane.names if name not in failed)
            return Report(answered, reduction.parts, dict.fromkeys(failed, NOT_FINITE))
        failed |= found


def _not_finite(outputs: Outputs) -> set[str]:
    found: set[str] = set()
    for leaf in leaves(outputs.tree):
        if leaf.dtype.kind in "fc":
            fine = np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
            found.update(name for name, good in zip(outputs.names, fine.tolist(), strict=True) if not good)
    return found


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
