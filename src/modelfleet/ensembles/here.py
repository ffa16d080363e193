"""Combining members whose lanes are in this process, on one device or on several."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from modelfleet.ensembles.exchange import Alone, Seat, Table, combine_in_step, join_shares
from modelfleet.ensembles.parts import Answer, Merging
from modelfleet.ensembles.reduction import Reduction, join_answers
from modelfleet.ensembles.whole import Whole
from modelfleet.frameworks.contexts import without_callers_contexts
from modelfleet.lanes.shared_objects import find_shared_object
from modelfleet.runs.opening import OpenLane
from modelfleet.sharing.each_lane import MAX_THREADS, for_each_lane, refuse_threads
from modelfleet.sharing.thread_counts import divided_cores


def merge_here(opened: Sequence[OpenLane], way: Merging, *, in_step: bool, threads: bool) -> Answer:
    """Return the answer of all members. Every device reduces its own, and then these parts are merged.

    Args:
        opened: The lanes with their feeds.
        way: How to combine the members.
        in_step: True if the lanes read one loader.
        threads: True for a thread for each lane, even if they are on one device.
    """
    by_device = {one.lane.device: Reduction(way) for one in opened}
    for_each_lane(
        opened,
        lambda lane, feed: by_device[lane.device].reducing(lane, feed),
        in_step=in_step,
        threads=threads,
    )
    first, *others = by_device.values()
    for other in others:
        first.add_all(other.parts)
    return first.answer()


def exchange_here(opened: Sequence[OpenLane], way: Whole, *, in_step: bool, threads: bool) -> Answer:
    """Return the answer of all members, whose values are exchanged by rows. Arguments as for `merge_here`."""
    by_thread: dict[object, list[OpenLane]] = {}
    for number, one in enumerate(opened):
        by_thread.setdefault(number % MAX_THREADS if threads else one.lane.device, []).append(one)
    shared = find_shared_object([one.lane for one in opened]) if len(by_thread) > 1 else None
    if threads:
        refuse_threads(in_step, shared)
    if in_step or shared is not None or len(by_thread) == 1:
        answers = join_shares([combine_in_step(opened, way, Alone())])
    else:
        answers = join_shares(_in_threads(list(by_thread.values()), way))
    for one in opened:
        one.lane.refuse_failures(one.feed)
    return join_answers(answers)


def _in_threads(shares: Sequence[Sequence[OpenLane]], way: Whole) -> list[list[Answer | None]]:
    table = Table(len(shares))

    def run(rank: int) -> list[Answer | None]:
        try:
            with without_callers_contexts():
                return combine_in_step(shares[rank], way, Seat(table, rank), own_stream=True)
        except BaseException:
            table.leave()
            raise

    lanes = [one.lane for own in shares for one in own]
    # All threads must run at once, as each waits for the others.
    with (
        divided_cores(lanes) as start_thread,
        ThreadPoolExecutor(len(shares), "modelfleet-device", start_thread) as pool,
    ):
        futures = [pool.submit(run, rank) for rank in range(len(shares))]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # One that failed has woken the others, whose errors say nothing.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
