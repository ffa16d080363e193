"""Answers of `evaluate` and `predict`: from members and a strategy to outputs and metrics by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from modelfleet.each import Each
from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks.contexts import computing
from modelfleet.lanes import DevicePool, Groups, Lane, LaneSpec
from modelfleet.planning.fusability import check_strategy
from modelfleet.reading import Reading
from modelfleet.recipe import Recipe
from modelfleet.remote.answering import values_by_name
from modelfleet.repeating import Repeating
from modelfleet.runs.job import Job
from modelfleet.runs.opening import OpenLane
from modelfleet.sharing.answering import AnsweringWorkers
from modelfleet.sharing.each_lane import for_each_lane
from modelfleet.types import Data, State, Strategy
from modelfleet.unknown_names import unknown
from modelfleet.workers import CannotSendError

T = TypeVar("T")
Verb = Literal["evaluate", "predict"]
Answers = dict[str, Any]
"""By member: outputs, or metrics by name."""


class Answering:
    """Answers the verbs of one fleet that only read.

    Args:
        reading: Chooses and opens the lanes.
        repeating: Answers calls on data of a form that was there before.
        recipes: The recipe of each member.
        pool: The devices of the fleet.
        token: Identifies the fleet to worker processes.
    """

    def __init__(
        self,
        reading: Reading,
        repeating: Repeating,
        recipes: Mapping[str, Recipe | None],
        pool: DevicePool,
        token: str,
    ) -> None:
        self._reading, self.repeating = reading, repeating
        self._members, self._gate = reading.members, reading.gate
        self._recipes, self._pool, self._token = recipes, pool, token

    def answer(
        self,
        verb: Verb,
        data: Data,
        batch_size: int | Each | None,
        strategy: Strategy,
        members: Sequence[str] | None,
    ) -> Answers:
        """Return what members answer to data. Takes the arguments of `Fleet.predict`."""
        usual = strategy == "auto" and members is None
        if usual:
            known = self.repeating.answer(verb, data, batch_size)
            if known is not None:
                return known
        check_reading_strategy(verb, strategy)
        job = self.job(data, batch_size, members)
        if strategy == "processes":
            found = self.in_workers(
                verb, job, lambda workers, specs, states: workers.run(verb, job, specs, states)
            )
            return {name: found[name] for name in job.names}
        found: Answers = {}
        with self.opened(verb, job, strategy) as (opened, in_step):
            work: Any = Lane.predicting if verb == "predict" else Lane.evaluating
            results = for_each_lane(opened, work, in_step=in_step, threads=strategy == "threads")
            for one, result in zip(opened, results, strict=True):
                one.lane.refuse_failures(one.feed)
                if verb == "evaluate":
                    found.update(values_by_name(one.lane, result))
                else:
                    found.update(zip(one.lane.names, result, strict=True))
            if usual:
                self.repeating.learn(verb, data, batch_size, opened)
        return {name: found[name] for name in job.names}

    @contextmanager
    def opened(self, verb: Verb, job: Job, strategy: Strategy) -> Iterator[tuple[list[OpenLane], bool]]:
        """Open the lanes of a verb in this process. Yield them, and True if they read one loader in step."""
        with self._gate.reading(verb), computing(), self._reading.open(verb, job, strategy) as found:
            yield found

    def job(self, data: Data, batch_size: int | Each | None, members: Sequence[str] | None) -> Job:
        """Return the job of a call. `each(...)` has values for all members, or for those that were chosen."""
        whole = Job(tuple(self._members), data, batch_size=batch_size, shuffle=False)
        if members is None:
            return whole
        names = self._chosen(members)
        given = [value for value in (data, batch_size) if isinstance(value, Each)]
        if len(names) < len(self._members) and all(len(value) == len(self._members) for value in given):
            return whole.only(names)
        return Job(names, data, batch_size=batch_size, shuffle=False)

    def _chosen(self, members: Sequence[str]) -> tuple[str, ...]:
        """Return the names in an argument `members=`. Raises InputError if it is no list of members."""
        if isinstance(members, str):
            raise InputError(f"members is {members!r}; expected a list of names. Give members=[{members!r}].")
        names = tuple(members)
        if not names:
            raise InputError("members is empty. Name at least one member, or leave it out for all.")
        for name in names:
            if name not in self._members:
                raise unknown("member", name, self._members)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"members has {twice!r} twice. Give every name once.")
        return names

    @contextmanager
    def unopened(
        self, verb: Verb, job: Job, strategy: Strategy
    ) -> Iterator[tuple[list[LaneSpec], dict[str, State], Groups]]:
        """Yield the lanes of a verb, which are opened elsewhere.

        Beside them there are the states that members' random draws depend on, and the members in groups.
        """
        with self._gate.reading(verb):
            lanes, changed = self._reading.lanes_of(job.names, strategy)
            specs = lanes.specs_for(job, verb, strategy, changed)
            yield specs, lanes.draw_states(job.names), lanes.groups

    def in_workers(
        self,
        verb: Verb,
        job: Job,
        ask: Callable[[AnsweringWorkers, list[LaneSpec], dict[str, State]], T],
        *,
        on_cluster: bool = False,
    ) -> T:
        """Return what is asked of workers, given the lanes and the states that random draws depend on.

        Raises:
            StrategyError: A model can't be sent, or the fleet is on a cluster and `on_cluster` is False.
        """
        if self._pool.clustered and not on_cluster:
            raise StrategyError(
                f'strategy="processes" is not possible: the fleet is on a Ray cluster, where {verb} runs in this '
                f'process. Use "auto".'
            )
        with self.unopened(verb, job, "processes") as (specs, states, _):
            try:
                return ask(self.workers(job), specs, states)
            except CannotSendError as error:
                raise StrategyError(
                    f'strategy="processes" is not possible: {error} Or use "interleaved" or "threads".'
                ) from error

    def workers(self, job: Job) -> AnsweringWorkers:
        """Return worker processes for the members of a job. Within `unopened`, those of a cluster are known."""
        members = {name: self._members[name] for name in job.names}
        devices = self._pool.of_all(list(members.values()))
        return AnsweringWorkers(self._token, members, self._recipes, devices, self._pool.places)


def check_reading_strategy(verb: Verb, strategy: str) -> None:
    """Raise StrategyError for a strategy that a verb which only reads does not have."""
    check_strategy(strategy)
    if strategy == "data_parallel":
        raise StrategyError(
            f'strategy="data_parallel" is for fit, and {verb} has no gradients to add up. Leave the strategy out, '
            f'or use "threads" or "processes": each device then has members of its own.'
        )
