"""Ensembles: a fleet as one model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from modelfleet.answering import check_reading_strategy
from modelfleet.each import Each, per_member
from modelfleet.ensembles.asking import answer_in_time
from modelfleet.ensembles.elsewhere import exchange_elsewhere, merge_elsewhere
from modelfleet.ensembles.here import exchange_here, merge_here
from modelfleet.ensembles.moments import Mean
from modelfleet.ensembles.parts import Answer, Merging
from modelfleet.ensembles.quorum import Quorum
from modelfleet.ensembles.scoring import score
from modelfleet.ensembles.votes import Vote
from modelfleet.ensembles.whole import Whole
from modelfleet.errors import InputError
from modelfleet.fleet import Fleet
from modelfleet.lanes import LaneBuilder
from modelfleet.runs.job import Job
from modelfleet.types import Data, MetricLike, Model, Strategy, Tree
from modelfleet.unknown_names import explain_arguments, unknown

COMBINE = ("mean", "vote", "median")
Combine = Literal["mean", "vote", "median"] | Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class EnsembleAnswer:
    """Answer of an ensemble that was asked for a quorum or by a deadline.

    Attributes:
        output: The combined output of the members that answered.
        std: What `std=True` asked for; None otherwise.
        answered: The members that answered, in their order.
        missing: The other members by name, with the reason why each is missing.
    """

    output: Tree
    std: Tree
    answered: tuple[str, ...]
    missing: dict[str, str]


class Ensemble:
    """A fleet as one model: its members' outputs are combined.

    Each device combines its own members, batch by batch, and only what is combined moves. So memory does not grow
    with the number of members. A median or a function needs all members' values of a row: each device then gets
    those of its share of a batch's rows.

    Args:
        fleet: The fleet, or models to make one of.
        combine: "mean"; "median"; "vote", for models that return a score for every class in the last axis: the
            class that most members give the highest score, and the lowest of several such classes. Or a function
            of an array `(member, row, …)` that returns `(row, …)`. It is called for some rows at a time, with the
            members in their order, and for each array of outputs that have several.
        weights: For "mean" and "vote", how much each member counts: a sequence in member order, or a mapping by
            name. All count the same by default.

    Attributes:
        fleet: The fleet. Train it as always: the ensemble has no state of its own.

    Raises:
        InputError: `combine` is unknown, or the weights do not fit the members.

    Example:
        >>> ensemble = mf.Ensemble(fleet)
        >>> mean, deviation = ensemble.predict(x, std=True)
    """

    def __init__(
        self,
        fleet: Fleet | Mapping[str, Model] | Sequence[Model],
        combine: Combine = "mean",
        *,
        weights: Mapping[str, float] | Sequence[float] | Each | None = None,
    ) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else Fleet(fleet)
        if not callable(combine) and combine not in COMBINE:
            raise unknown("combine", combine, COMBINE)
        self._combine = combine
        self._weights = None if weights is None else self._checked(weights)
        self._builder = LaneBuilder()  # keeps the programs of calls with a quorum

    def __repr__(self) -> str:
        name = self._combine if isinstance(self._combine, str) else getattr(self._combine, "__name__", "function")
        return f"<Ensemble, {name} of {self.fleet!r}>"

    @overload
    def predict(
        self,
        x: Data,
        *,
        std: bool = False,
        batch_size: int | None = None,
        members: Sequence[str] | None = None,
        strategy: Strategy = "auto",
        quorum: None = None,
        deadline: None = None,
    ) -> Tree: ...

    @overload
    def predict(
        self,
        x: Data,
        *,
        std: bool = False,
        batch_size: int | None = None,
        members: Sequence[str] | None = None,
        strategy: Strategy = "auto",
        quorum: float,
        deadline: float | None = None,
    ) -> EnsembleAnswer: ...

    @overload
    def predict(
        self,
        x: Data,
        *,
        std: bool = False,
        batch_size: int | None = None,
        members: Sequence[str] | None = None,
        strategy: Strategy = "auto",
        quorum: float | None = None,
        deadline: float,
    ) -> EnsembleAnswer: ...

    @explain_arguments
    def predict(
        self,
        x: Data,
        *,
        std: bool = False,
        batch_size: int | None = None,
        members: Sequence[str] | None = None,
        strategy: Strategy = "auto",
        quorum: float | None = None,
        deadline: float | None = None,
    ) -> Tree | EnsembleAnswer:
        """Return the members' combined output.

        Args:
            x: As for `Fleet.predict`. With `each(...)`, every member gets its own form of the same rows.
            std: Return the standard deviation over the members, too, as a second value. For "vote", it is the
                share of the votes that the label got.
            batch_size: As for `Fleet.predict`, one value for all members.
            members: The members to combine. All by default.
            strategy: As for `Fleet.predict`. The numbers are the same within rounding.
            quorum: How many members must answer: a number, or a fraction such as 0.8. A member fails if it
                raises, if its worker dies, or if its outputs are not finite. With a deadline alone, all must
                answer. With neither, an error of a member is raised, and NaN makes the mean NaN.
            deadline: Seconds after which members that have not answered are left out. Members that take turns on
                one device behind a late one are late, too: use "threads" or "processes" to run them side by side.

        Returns:
            The output: as one member's, in NumPy arrays. With `std`, a pair. With a quorum or a deadline, an
            `EnsembleAnswer`, which says who is missing.

        Raises:
            InputError: The data do not fit the models, the outputs do not fit each other, or too few members have
                answered because others failed.
            DeadlineError: Too few members had answered at the deadline.
            StrategyError: The strategy is not possible.
        """
        job = self._job(x, batch_size, members, strategy)
        way = self._way(job.names, std)
        if quorum is None and deadline is None:
            answer = self._answer(job, way, strategy)
            return (answer.output, answer.spread) if std else answer.output
        if isinstance(way, Whole):
            raise InputError(
                f"a quorum or a deadline was given with combine={self._combine!r}, which needs all values of "
                f'a row at once. Use combine="mean" or "vote", or wait for all members.'
            )
        limits = Quorum.of(quorum, deadline, len(job.names))
        answer, missing = answer_in_time(self.fleet, job, way, strategy, limits, self._builder)
        answered = tuple(name for name in job.names if name not in missing)
        return EnsembleAnswer(answer.output, answer.spread if std else None, answered, missing)

    @explain_arguments
    def evaluate(
        self,
        data: tuple[Data, Data],
        *,
        metrics: Sequence[MetricLike] | None = None,
        batch_size: int | None = None,
        members: Sequence[str] | None = None,
        strategy: Strategy = "auto",
    ) -> dict[str, float]:
        """Return the loss and the metrics of the combined output.

        For "vote", metrics see the share of the votes for every class, and there is no loss. There is none either
        if the members have different losses.

        Args:
            data: Arrays `(x, y)`.
            metrics: As for `Fleet.compile`; by default those that the fleet was compiled with. A function gets all
                rows at once.
            batch_size: As for `predict`.
            members: As for `predict`.
            strategy: As for `predict`.

        Raises:
            InputError: There are no metrics and no loss, or the data do not fit.
        """
        if not isinstance(data, tuple) or len(data) != 2:
            raise InputError(
                f"evaluate got a {type(data).__name__}; expected arrays (x, y). Give both in a tuple."
            )
        x, y = data
        job = self._job(x, batch_size, members, strategy)
        votes = self._combine == "vote"
        way = Vote(True, self._weights_of(job.names)) if votes else self._way(job.names, False)
        answer = self._answer(job, way, strategy)
        chosen = [self.fleet._members[name] for name in job.names]
        return score(chosen, self.fleet._recipes, answer.output, y, metrics, votes=votes)

    # --- small parts ---------------------------------------------------------------------------------------------

    def _answer(self, job: Job, way: Merging | Whole, strategy: Strategy) -> Answer:
        answering, members = self.fleet._answering, self.fleet._members
        if strategy == "processes":
            return answering.in_workers(
                "predict",
                job,
                lambda workers, specs, states: (
                    exchange_elsewhere(workers, job, way, members, specs, states)
                    if isinstance(way, Whole)
                    else merge_elsewhere(workers, job, way, specs, states)
                ),
                on_cluster=True,
            )
        threads = strategy == "threads"
        with answering.opened("predict", job, strategy) as (opened, in_step):
            if isinstance(way, Whole):
                return exchange_here(opened, way, in_step=in_step, threads=threads)
            return merge_here(opened, way, in_step=in_step, threads=threads)

    def _job(self, x: Data, batch_size: int | None, members: Sequence[str] | None, strategy: Strategy) -> Job:
        check_reading_strategy("predict", strategy)
        if isinstance(batch_size, Each):
            raise InputError(
                "batch_size is each(...); an ensemble combines the same rows of all members batch by batch. Give "
                "one number."
            )
        return self.fleet._answering.job(x, batch_size, members)

    def _way(self, names: tuple[str, ...], std: bool) -> Merging | Whole:
        """Return how to combine some members."""
        if self._combine == "mean":
            return Mean(std, self._weights_of(names))
        if self._combine == "vote":
            return Vote(False, self._weights_of(names))
        return Whole(self._combine if callable(self._combine) else None, std, names)

    def _weights_of(self, names: tuple[str, ...]) -> dict[str, float] | None:
        if self._weights is None:
            return None
        for name in names:
            if name not in self._weights:
                raise InputError(
                    f"weights has none for member {name!r}, which joined later. Make a new Ensemble that has it."
                )
        own = {name: self._weights[name] for name in names}
        if not sum(own.values()) > 0:
            raise InputError("the weights of these members add up to 0. Give one of them a weight above 0.")
        return own

    def _checked(self, weights: Mapping[str, float] | Sequence[float] | Each) -> dict[str, float]:
        if self._combine not in ("mean", "vote"):
            raise InputError(
                f'weights were given with combine={self._combine!r}; they are for "mean" and "vote". Leave them '
                f"out."
            )
        names = self.fleet.names
        values = per_member(weights if isinstance(weights, Each) else Each(weights), names, "weights")
        for name, value in zip(names, values, strict=True):
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not number or not 0 <= value < np.inf:
                raise InputError(f"the weight of member {name!r} is {value!r}; expected a number, 0 or more.")
        return {name: float(value) for name, value in zip(names, values, strict=True)}
