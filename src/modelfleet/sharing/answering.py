"""Evaluating and predicting in worker processes."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from modelfleet.types import Kind, State
from modelfleet.workers import Place, SharedValue, Task, Worker, WorkerDiedError
from modelfleet.workers.places import machine_places, shared_place
from modelfleet.workers.supervisor import RestartBudget, Supervisor

CHECK_SECONDS = 0.02  # for each of several workers that are waited for together


class AnsweringWorkers:
    """Worker processes that evaluate and predict.

    Args:
        fleet: Identifies the fleet. Workers keep the programs of their last fleet.
        members: The members, by name.
        recipes: Their recipes.
        devices: The devices of this machine that they may run on.
        cluster: The places of a Ray cluster, if the fleet is on one.
    """

    def __init__(
        self,
        fleet: str,
        members: Mapping[str, Member],
        recipes: Mapping[str, Recipe | None],
        devices: Sequence[Device],
        cluster: Sequence[Place] = (),
    ) -> None:
        self._fleet, self._members, self._recipes, self._devices = fleet, members, recipes, devices
        self._cluster = cluster

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
        found: dict[str, Any] = {}
        for own in self.ask(kind, job, specs, states, answer_lanes, lambda orders, places: orders):
            found.update(own)
        return found

    def ask(
        self,
        kind: Kind,
        job: Job,
        specs: Sequence[LaneSpec],
        states: Mapping[str, State],
        task: Task,
        arguments: Callable[[list[AnswerOrder], list[Place]], Sequence[object]],
        *,
        together: bool = False,
    ) -> list[Any]:
        """Return what a task yields in every worker, for orders that have all lanes between them.

        Args:
            kind: "predict" or "evaluate".
            job: The arguments of the verb.
            specs: The lanes.
            states: By member, the part of its state that random draws depend on, on the host.
            task: Yields None when it has started, and then its result.
            arguments: Returns the argument of every task, given all orders and their places.
            together: True if the tasks wait for each other. If one fails, all are then ended.

        Raises:
            CannotSendError: A model or the data can't be sent to another process.
            StrategyError: A worker has died.
        """
        done = False
        with self.orders(kind, job, specs, states) as given:
            supervisors = [Supervisor(place, WORKER_POLICY) for place, _ in given]
            orders = [order for _, order in given]
            try:
                starts = [
                    _starting(supervisor, task, argument, order)
                    for supervisor, argument, order in zip(
                        supervisors, arguments(orders, [place for place, _ in given]), orders, strict=True
                    )
                ]
                # All begin before the first is waited for.
                budgets = [_begin(start) for start in starts]
                if together:
                    found = _receive_together(supervisors)
                else:
                    found = [_receive(*own) for own in zip(supervisors, starts, budgets, strict=True)]
                done = True
                return found
            finally:
                for supervisor in supervisors:
                    with suppress(WorkerDiedError):
                        supervisor.release() if done else supervisor.drop()

    @contextmanager
    def orders(
        self, kind: Kind, job: Job, specs: Sequence[LaneSpec], states: Mapping[str, State]
    ) -> Iterator[list[tuple[Place, AnswerOrder]]]:
        """Yield the orders for workers that have all lanes between them, with the place of each.

        Data that are the same for all members stay published within this context.
        """
        generators = global_generators.state()
        job = copy_loaders(job, {name: self._members[name] for name in job.names})
        shares = self._divide(specs)
        shared = None if isinstance(job.data, Each) else shares[0][0].publish(job.data, "the data")
        try:
            yield [
                (place, self._order(kind, job, own, states, generators, place.device, shared))
                for place, own in shares
            ]
        finally:
            if shared is not None:
                shared.close()

    def _divide(self, specs: Sequence[LaneSpec]) -> list[tuple[Place, list[LaneSpec]]]:
        """Return places for workers, each with its lanes: one for each device, or a few on a single device."""
        if self._cluster or len(self._devices) > 1:
            places = self._cluster or machine_places(self._devices)
            by_name = {place.name: [spec for spec in specs if spec.device == place.name] for place in places}
            return [(place, by_name[place.name]) for place in places if by_name[place.name]]
        cores = os.cpu_count() or 1
        count = max(1, min(cores, len(specs)))
        place = shared_place(self._devices[0], max(1, cores // count))
        return [(place, list(specs[number::count])) for number in range(count)]

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


def _starting(supervisor: Supervisor, task: Task, argument: object, order: AnswerOrder) -> Callable[[], None]:
    def start() -> None:
        supervisor.start(task, argument, described(order), job=order.fleet)

    return start


def described(order: AnswerOrder) -> str:
    """Return what is sent with an order, for errors."""
    return f"members {', '.join(repr(name) for name, *_ in order.members)} with their data"


def _begin(start: Callable[[], None], budget: RestartBudget | None = None) -> RestartBudget:
    budget = RestartBudget(WORKER_POLICY) if budget is None else budget
    with suppress(WorkerDiedError):  # `_receive` will notice
        start()
    return budget


def _receive(supervisor: Supervisor, start: Callable[[], None], budget: RestartBudget) -> Any:
    """Return a worker's result. A worker that dies is replaced, as often as the budget allows."""
    while True:
        try:
            if supervisor.worker is None:
                start()
            if not supervisor.started:
                supervisor.wait_started(lambda: False)
                assert supervisor.worker is not None
                supervisor.worker.answer()
            return _result(supervisor)
        except WorkerDiedError as error:
            budget.charge(supervisor.lose(error))
            if budget.is_spent:
                raise StrategyError(
                    f'strategy="processes" is not possible: a worker process has died again and again: {error}. '
                    f'Use "interleaved", or see what the model does there.'
                ) from error


def _receive_together(supervisors: Sequence[Supervisor]) -> list[Any]:
    """Return the results of workers that wait for each other. The first that fails ends the wait for all."""
    results: dict[int, Any] = {}
    try:
        for supervisor in supervisors:
            supervisor.wait_started(lambda: False)
        for supervisor in supervisors:
            _hired(supervisor).answer()
        while len(results) < len(supervisors):
            for number, supervisor in enumerate(supervisors):
                if number not in results and _hired(supervisor).poll(CHECK_SECONDS):
                    results[number] = _result(supervisor)
    except WorkerDiedError as error:
        raise StrategyError(
            f'strategy="processes" is not possible: of several workers that need each other, one has died: '
            f'{error}. Call again, use "interleaved", or see what the model does there.'
        ) from error
    return [results[number] for number in range(len(supervisors))]


def _result(supervisor: Supervisor) -> Any:
    """Wait for a worker's result, and for the end of its task."""
    _, found = supervisor.receive()
    found = copied(found)
    _hired(supervisor).answer()
    supervisor.receive()  # its end
    return found


def _hired(supervisor: Supervisor) -> Worker:
    assert supervisor.worker is not None
    return supervisor.worker


def copied(result: Any) -> Any:
    """Return a copy of a worker's item, whose arrays would be gone with the next message."""
    return copy.deepcopy(result)
