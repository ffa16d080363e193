"""Worker's side of an ensemble: the worker that runs some lanes reduces them, and only the parts leave it."""

from collections.abc import Generator
from dataclasses import dataclass

from modelfleet import frameworks
from modelfleet.ensembles.exchange import Ranks, combine_in_step
from modelfleet.ensembles.parts import Answer, Merging, Part
from modelfleet.ensembles.reduction import Reduction
from modelfleet.ensembles.whole import Whole
from modelfleet.frameworks.contexts import computing, using_settings
from modelfleet.lanes.work import finish_in_step
from modelfleet.remote.answering import AnswerOrder, opened_lanes
from modelfleet.workers.rendezvous import Rendezvous

RENDEZVOUS_TIMEOUT = 300.0  # seconds that ranks wait for each other: one of them may be compiling


@dataclass(frozen=True)
class MergeOrder:
    """Everything that a worker needs to reduce some lanes."""

    lanes: AnswerOrder
    way: Merging


@dataclass(frozen=True)
class ExchangeOrder:
    """Everything that a worker needs to combine all members for its share of the rows."""

    lanes: AnswerOrder
    way: Whole
    framework: str
    """Framework whose process group connects the workers."""
    address: str | Rendezvous
    rank: int
    size: int


def merge_in_worker(order: MergeOrder) -> Generator[list[Part] | None, None, None]:
    """Yield None when the worker has started, and then the parts of all batches."""
    yield None
    with using_settings(order.lanes.settings), computing():
        reduction = Reduction(order.way)
        with opened_lanes(order.lanes) as (opened, in_step):
            works = [reduction.reducing(one.lane, one.feed) for one in opened]
            for together in [works] if in_step else [[work] for work in works]:
                finish_in_step(together)
        yield reduction.parts


def exchange_in_worker(order: ExchangeOrder) -> Generator[list[Answer | None] | None, None, None]:
    """Yield None when the worker has started, and then its share of the answer for every batch."""
    yield None
    address = order.address if isinstance(order.address, str) else order.address.address
    with using_settings(order.lanes.settings), computing():
        # What lanes predict is on the host, wherever they compute.
        group = frameworks.adapter(order.framework).ProcessGroup.join(
            address, order.rank, order.size, RENDEZVOUS_TIMEOUT, device="cpu"
        )
        try:
            with opened_lanes(order.lanes) as (opened, _):
                answers = combine_in_step(opened, order.way, Ranks(group))
        finally:
            group.close()
        yield answers
