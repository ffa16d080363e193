"""Evaluating and predicting in worker processes."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modelfleet.devices import Device, parse_devices
from modelfleet.each import Each
from modelfleet.errors import StrategyError
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.contexts import current_settings
from modelfleet.lanes import LaneSpec
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.remote.answering import AnswerOrder, answer_lanes
from modelfleet.remote.copies import copy_loaders
from modelfleet.runs.job import Job
from modelfleet.runs.remote_state import WORKER_POLICY
from modelfleet.trees import map_tree
from modelfleet.types import Kind, State
from modelfleet.workers import Place, SharedValue, WorkerDiedError
from modelfleet.workers.places import machine_places
from modelfleet.workers.process import ProcessPlace
from modelfleet.workers.supervisor import RestartBudget, Supervisor


class AnsweringWorkers:
    """Worker processes that evaluate and predict.

    Args:
        fleet: Identifies the fleet. Workers keep the programs of their last fleet.
        members: The members, by name.
        recipes: Their recipes.
        devices: The devices of this machine that they may run on.
    """

    def __init__(
        self,
        fleet: str,
        members: Mapping[str, Member],
        recipes: Mapping[str, Recipe | None],
        devices: Sequence[Device],
    ) -> None:
        self._fleet, self._members, self._recipes, self._devices = fleet, members, recipes, devices

    def run(self, kind: Kind, job: Job, specs: Sequence[LaneSpec], states: Mapping[str, State]) -> dict[str, Any]:
        """Return every member's answer: outputs, or metrics by name.

        Args:
            kind: "predict" or "evaluate".
            job: The arguments of the verb.
            specs: The lanes.
            states: By member, the part of its state that random draws depend on, on the host.

        Raises:
            CannotSendError: A model or the data can't be sent to another process.
            StrategyError: A worker has died again and again, or a model changes when it is called.
        """
        generators = global_generators.state()
        job = copy_loaders(job, {name: self._members[name] for name in job.names})
        shares = self._divide(specs)
        supervisors = [Supervisor(place, WORKER_POLICY) for place, _ in shares]
        shared: SharedValue | None = None
        done = False
        try:
            if not isinstance(job.data, Each):
                shared = supervisors[0].place.publish(job.data, "the data")
            starts = []
            for supervisor, (place, own) in zip(supervisors, shares, strict=True):
                order = self._order(kind, job, own, states, generators, place.device, shared)
                starts.append(_starting(supervisor, order))
            # All begin before the first is waited for.
            budgets = [_begin(start) for start in starts]
            found: dict[str, Any] = {}
            for supervisor, start, budget in zip(supervisors, starts, budgets, strict=True):
                found.update(_receive(supervisor, start, budget))
            done = True
            return found
        finally:
            for supervisor in supervisors:
                with suppress(WorkerDiedError):
                    supervisor.release() if done else supervisor.drop()
            if shared is not None:
                shared.close()

    def _divide(self, specs: Sequence[LaneSpec]) -> list[tuple[Place, list[LaneSpec]]]:
        """Return places for workers, each with its lanes: one for each device, or a few on a single device."""
        if len(self._devices) > 1:
            places = machine_places(self._devices)
            by_name = {place.name: [spec for spec in specs if spec.device == place.name] for place in places}
            return [(place, by_name[place.name]) for place in places if by_name[place.name]]
        cores = os.cpu_count() or 1
        count = max(1, min(cores, len(specs)))
        env = {"OMP_NUM_THREADS": str(max(1, cores // count))}
        return [(ProcessPlace("", "", env), list(specs[number::count])) for number in range(count)]

    def _order(
        self,
        kind: Kind,
        job: Job,
        specs: Sequence[LaneSpec],
        states: Mapping[str, State],
        generators: global_generators.State,
        device: str,
        data: SharedValue | None,
    ) -> AnswerOrder:
        names = [name for spec in specs for name in spec.members]
        own = job.only(names)
        members = [self._members[name] for name in names]
        return AnswerOrder(
            kind=kind,
            fleet=self._fleet,
            members=[(m.name, m.model, m.seed, m.framework.NAME) for m in members],
            recipes={name: self._recipes[name] for name in names},
            devices=parse_devices(device) if device else tuple(self._devices),
            lanes=[replace(spec, device=None) for spec in specs],
            job=own if data is None else replace(own, data=None),
            states={name: states[name] for name in names if name in states},
            generators=generators,
            data=data,
            settings=current_settings(None),
        )


def _starting(supervisor: Supervisor, order: AnswerOrder) -> Callable[[], None]:
    names = ", ".join(repr(name) for name, *_ in order.members)

    def start() -> None:
        supervisor.start(answer_lanes, order, f"members {names} with their data", job=order.fleet)

    return start


def _begin(start: Callable[[], None], budget: RestartBudget | None = None) -> RestartBudget:
    budget = RestartBudget(WORKER_POLICY) if budget is None else budget
    with suppress(WorkerDiedError):  # `_receive` will notice
        start()
    return budget


def _receive(supervisor: Supervisor, start: Callable[[], None], budget: RestartBudget) -> dict[str, Any]:
    """Return a worker's answers. A worker that dies is replaced, as often as the budget allows."""
    while True:
        try:
            if supervisor.worker is None:
                start()
            if not supervisor.started:
                supervisor.wait_started(lambda: False)
                assert supervisor.worker is not None
                supervisor.worker.answer()
            _, answers = supervisor.receive()
            found = map_tree(_kept, answers)
            assert supervisor.worker is not None
            supervisor.worker.answer()
            supervisor.receive()  # its end
            return found
        except WorkerDiedError as error:
            budget.charge(supervisor.lose(error))
            if budget.is_spent:
                raise StrategyError(
                    f'strategy="processes" is not possible: a worker process has died again and again: {error}. '
                    f'Use "interleaved", or see what the model does there.'
                ) from error


def _kept(value: Any) -> Any:
    """Return a copy of an array, which would be gone with the next message."""
    return value.copy() if hasattr(value, "copy") and hasattr(value, "dtype") else value
