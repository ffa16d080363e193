"""Combining members whose lanes run in worker processes or on a Ray cluster: only reduced parts come here."""

from collections.abc import Mapping, Sequence

from modelfleet.ensembles.exchange import join_shares
from modelfleet.ensembles.parts import Answer, Merging
from modelfleet.ensembles.reduction import Reduction, join_answers
from modelfleet.ensembles.whole import Whole
from modelfleet.ensembles.worker import ExchangeOrder, MergeOrder, exchange_in_worker, merge_in_worker
from modelfleet.errors import StrategyError
from modelfleet.lanes import LaneSpec
from modelfleet.members import Member
from modelfleet.remote.answering import AnswerOrder
from modelfleet.runs.job import Job
from modelfleet.sharing.answering import AnsweringWorkers
from modelfleet.sharing.data_parallel import new_address
from modelfleet.types import State
from modelfleet.workers import Place
from modelfleet.workers.rendezvous import Rendezvous


def merge_elsewhere(
    workers: AnsweringWorkers, job: Job, way: Merging, specs: Sequence[LaneSpec], states: Mapping[str, State]
) -> Answer:
    """Return the answer of all members. Every worker reduces its own, and then these parts are merged here."""

    def orders(lanes: list[AnswerOrder], places: list[Place]) -> list[MergeOrder]:
        return [MergeOrder(own, way) for own in lanes]

    reduction = Reduction(way)
    for parts in workers.ask("predict", job, specs, states, merge_in_worker, orders):
        reduction.add_all(parts)
    return reduction.answer()


def exchange_elsewhere(
    workers: AnsweringWorkers,
    job: Job,
    way: Whole,
    members: Mapping[str, Member],
    specs: Sequence[LaneSpec],
    states: Mapping[str, State],
) -> Answer:
    """Return the answer of all members, whose values the workers exchange by rows.

    Raises:
        StrategyError: No member's framework can connect processes.
    """
    frameworks = [members[name].framework for name in job.names]
    framework = next((own for own in frameworks if hasattr(own, "ProcessGroup")), None)
    if framework is None:
        raise StrategyError(
            'strategy="processes" is not possible: a median or a function needs all values of a row, and only '
            'torch can exchange them between processes. Use "threads", or combine="mean" or "vote".'
        )
    name = framework.NAME
    meeting: list[str | Rendezvous] = []

    def orders(lanes: list[AnswerOrder], places: list[Place]) -> list[ExchangeOrder]:
        meeting.append(new_address(places[0]))
        return [ExchangeOrder(own, way, name, meeting[0], rank, len(lanes)) for rank, own in enumerate(lanes)]

    try:
        answers = workers.ask("predict", job, specs, states, exchange_in_worker, orders, together=True)
    finally:
        for address in meeting:
            if isinstance(address, Rendezvous):
                address.close()
    return join_answers(join_shares(answers))
