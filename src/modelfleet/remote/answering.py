"""Worker's side of `evaluate` and `predict`: some of a fleet's lanes, one after the other."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import Device
from modelfleet.errors import StrategyError
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.contexts import computing, using_settings
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.lanes import DevicePool, Groups, Lane, LaneSpec
from modelfleet.lanes.work import finish_in_step
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.remote.worker import builder_of
from modelfleet.runs.job import Job
from modelfleet.runs.opening import LaneOpener, OpenLane
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Json, Kind, Model, State
from modelfleet.workers import SharedValue


@dataclass(frozen=True)
class AnswerOrder:
    """Everything that a worker needs to evaluate or predict with some lanes."""

    kind: Kind
    fleet: str
    """Identifies the fleet. A worker keeps the programs of its last fleet."""
    members: list[tuple[str, Model, int, str]]
    """Name, model, seed and framework of each member."""
    recipes: dict[str, Recipe | None]
    devices: tuple[Device, ...] | None
    """Device of the worker. None if the worker chooses."""
    lanes: list[LaneSpec]
    job: Job
    states: dict[str, State]
    """By member, the part of its state that random draws depend on, on the host."""
    generators: global_generators.State
    """State of the random generators, which loaders may draw from."""
    data: SharedValue | None = None
    """Data of the job, if they are the same for all members."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    """Settings of the owner's frameworks that change the numbers, such as a default dtype."""


def answer_lanes(order: AnswerOrder) -> Generator[dict[str, Any] | None, None, None]:
    """Yield None when the worker has started, and then every member's answer: outputs, or metrics by name."""
    yield None
    with using_settings(order.settings), computing():
        yield _answers(order)


def _answers(order: AnswerOrder) -> dict[str, Any]:
    work: Any = Lane.predicting if order.kind == "predict" else Lane.evaluating
    found: dict[str, Any] = {}
    with opened_lanes(order) as (opened, in_step):
        works = [work(one.lane, one.feed) for one in opened]
        results = finish_in_step(works) if in_step else [finish_in_step([own])[0] for own in works]
        for one, result in zip(opened, results, strict=True):
            if order.kind == "predict":
                found.update(zip(one.lane.names, result, strict=True))
            else:
                found.update(values_by_name(one.lane, result))
    return found


@contextmanager
def opened_lanes(order: AnswerOrder) -> Iterator[tuple[list[OpenLane], bool]]:
    """Open the lanes of an order. Yield them, and True if they read one loader in step.

    Raises:
        InputError: Afterwards, if a member's data could not be read.
        StrategyError: Afterwards, if a model has changed.
    """
    opener = opener_of(order)
    opened = [one for spec in order.lanes for one in _open(opener, spec)]
    write_states(opened, order.states)
    with refusing_changes(opened):
        yield opened, len(opened) > 1 and opener.feeding.one_loader
    for one in opened:
        one.lane.refuse_failures(one.feed)


def opener_of(order: AnswerOrder) -> LaneOpener:
    """Return what opens the lanes of an order, in the worker."""
    job = order.job if order.data is None else replace(order.job, data=order.data.get())
    members = [Member(name, model, seed, frameworks.adapter(f)) for name, model, seed, f in order.members]
    global_generators.restore(order.generators)
    groups = Groups(DevicePool(order.devices), members, order.recipes, order.kind)
    return LaneOpener(builder_of(order.fleet), groups, job, order.kind)


def write_states(opened: Sequence[OpenLane], states: Mapping[str, State]) -> None:
    """Give new lanes the state that their members' random draws depend on."""
    for one in opened:
        for name in one.lane.names:
            one.lane.write([name], map_tree(np.array, states.get(name, {})))


@contextmanager
def refusing_changes(opened: Sequence[OpenLane]) -> Iterator[None]:
    """Raise StrategyError at the end of this context if it has changed a model: the change would be lost."""
    before = [_state_of(one.lane) for one in opened]
    yield
    for one, state in zip(opened, before, strict=True):
        _refuse_changes(one.lane, state)


def values_by_name(lane: Lane, values: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the metrics of a lane by member."""
    return {
        name: {metric: float(column[row]) for metric, column in values.items()}
        for row, name in enumerate(lane.names)
    }


def _open(opener: LaneOpener, spec: LaneSpec) -> Sequence[OpenLane]:
    try:
        return [opener.open(spec)]
    except CannotFuseError:
        apart = [replace(spec, members=(name,), fused=False, split=None) for name in spec.members]
        return opener.open_all(apart)


def _state_of(lane: Lane) -> tuple[State, list[Any]]:
    """Return what a call may change in a lane's models: their weights and buffers, and their structure."""
    signatures = [member.framework.signature(member.model) for member in lane.members]
    return lane.read(lane.names, WEIGHTS, host=True), signatures


def _refuse_changes(lane: Lane, before: tuple[State, list[Any]]) -> None:
    """Raise StrategyError if a call has changed a model, because the change would be lost."""
    state, signatures = _state_of(lane)
    for member, now, earlier in zip(lane.members, signatures, before[1], strict=True):
        change = member.framework.difference(now, earlier)
        if change:
            raise _lost(member.name, change)
    for now, earlier in zip(leaves(state), leaves(before[0]), strict=True):
        if not np.array_equal(now, earlier, equal_nan=now.dtype.kind in "fc"):
            raise _lost(lane.names[0], "a buffer has changed")


def _lost(name: str, change: str) -> StrategyError:
    return StrategyError(
        f'strategy="processes" is not possible: member {name!r} changes when it is called: {change}. In a worker '
        f'process that change would be lost. Use "interleaved" or "threads".'
    )
