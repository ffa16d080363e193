"""Asking a fleet's members for an answer in time.

A thread asks them and holds the fleet's gate. The caller gets the answer at the deadline. The thread stays until
the last late member has ended its current batch, so that no other verb uses a model meanwhile.
"""

import queue
import threading
from contextlib import ExitStack

from modelfleet.ensembles.parts import Answer, Merging
from modelfleet.ensembles.quorum import Asked, Collected, Quorum, ask, collect, dismiss
from modelfleet.ensembles.reports import LocalOrder, ReportOrder
from modelfleet.errors import BusyError, StrategyError
from modelfleet.fleet import Fleet
from modelfleet.frameworks.contexts import computing
from modelfleet.lanes import Groups, LaneBuilder, LaneSpec
from modelfleet.lanes.shared_objects import find_shared_object
from modelfleet.runs.job import Job
from modelfleet.runs.opening import LaneOpener
from modelfleet.sharing.answering import described
from modelfleet.sharing.each_lane import MAX_THREADS, refuse_threads
from modelfleet.types import State, Strategy
from modelfleet.workers import CannotSendError
from modelfleet.workers.inline import InlinePlace

InTime = tuple[Answer, dict[str, str]]
"""The answer, and the members that are missing with the reasons."""


def answer_in_time(
    fleet: Fleet, job: Job, way: Merging, strategy: Strategy, quorum: Quorum, builder: LaneBuilder
) -> InTime:
    """Return the answer of the members that answer in time.

    Args:
        fleet: The fleet.
        job: The arguments of the call.
        way: How to combine the members.
        strategy: How the members run.
        quorum: How many must answer, and by when.
        builder: Builds lanes, and keeps their programs for the next call.

    Raises:
        BusyError: Called within another verb of the fleet.
        DeadlineError: Too few members had answered at the deadline.
        InputError: Too few members have answered, because others failed.
    """
    if fleet._gate.held_here:
        raise BusyError(
            "predict with a quorum or a deadline was called within another verb of the same fleet, by a callback "
            "or a loader. Call it when that is over, or leave out quorum and deadline."
        )
    box: queue.SimpleQueue[InTime | BaseException] = queue.SimpleQueue()
    given_up = threading.Event()

    def run() -> None:
        try:
            _ask(fleet, job, way, strategy, quorum, builder, box, given_up)
        except BaseException as error:  # raised in the caller's thread; if it has its answer, nobody reads this
            box.put(error)

    threading.Thread(target=run, name="ensemble", daemon=True).start()
    try:
        found = box.get()
    finally:
        given_up.set()
    if isinstance(found, BaseException):
        raise found
    return found


def _ask(
    fleet: Fleet,
    job: Job,
    way: Merging,
    strategy: Strategy,
    quorum: Quorum,
    builder: LaneBuilder,
    box: "queue.SimpleQueue[InTime | BaseException]",
    given_up: threading.Event,
) -> None:
    remote = strategy == "processes"
    answering, collected = fleet._answering, Collected(way, job.names)
    asked: list[Asked] = []
    with ExitStack() as until_all_end:
        specs, states, groups = until_all_end.enter_context(answering.unopened("predict", job, strategy))
        until_all_end.callback(lambda: dismiss(asked, wait=not remote))
        if remote:
            workers = answering.workers(job)
            try:
                for place, order in until_all_end.enter_context(workers.orders("predict", job, specs, states)):
                    names = [name for name, *_ in order.members]
                    asked.append(ask(place, ReportOrder(way, order), names, described(order)))
            except CannotSendError as error:
                raise StrategyError(
                    f'strategy="processes" is not possible: {error} Or use "interleaved" or "threads".'
                ) from error
        else:
            until_all_end.enter_context(computing())
            for order in _local_orders(specs, states, groups, job, builder, threads=strategy == "threads"):
                names = [name for spec in order.lanes for name in spec.members]
                asked.append(ask(InlinePlace("", ""), ReportOrder(way, order), names, "members"))
        try:
            collect(asked, collected, quorum, given_up)
            box.put((collected.answer(quorum), collected.missing()))
        except BaseException as error:  # at once: late members are waited for at the end of this context
            box.put(error)


def _local_orders(
    specs: list[LaneSpec],
    states: dict[str, State],
    groups: Groups,
    job: Job,
    builder: LaneBuilder,
    *,
    threads: bool,
) -> list[LocalOrder]:
    """Return the orders for threads of this process: one for each device, or with `threads` for each lane."""
    by_thread: dict[object, list[LaneSpec]] = {}
    for number, spec in enumerate(groups.on_first_device(specs)):
        by_thread.setdefault(number % MAX_THREADS if threads else spec.device, []).append(spec)
    opener = LaneOpener(builder, groups, job, "predict")
    if opener.feeding.uses_loaders("data"):
        raise StrategyError(
            "a quorum or a deadline needs arrays: members are read one by one, and the data are a loader. Give "
            "arrays, or leave out quorum and deadline."
        )
    lanes = []
    if len(by_thread) > 1:
        lanes = [builder.build(groups, spec) for own in by_thread.values() for spec in own]
        shared = find_shared_object(lanes)
        if threads:
            refuse_threads(False, shared)
        elif shared is not None:
            by_thread = {"": [spec for own in by_thread.values() for spec in own]}
    found = []
    for own in by_thread.values():
        names = [name for spec in own for name in spec.members]
        keys = {spec.key for spec in own}
        existing = [lane for lane in lanes if lane.spec.key in keys]
        found.append(
            LocalOrder(LaneOpener(builder, groups, job.only(names), "predict", existing=existing), own, states)
        )
    return found
