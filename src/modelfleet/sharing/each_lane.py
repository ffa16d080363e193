"""Evaluating and predicting: some work for each lane, in a thread for each device, or for each lane."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from modelfleet.errors import StrategyError
from modelfleet.feeds import Feed
from modelfleet.frameworks.contexts import without_callers_contexts
from modelfleet.lanes.lane import Lane
from modelfleet.lanes.shared_objects import find_shared_object
from modelfleet.lanes.work import Work, finish_in_step
from modelfleet.runs.opening import OpenLane
from modelfleet.sharing.thread_counts import divided_cores

T = TypeVar("T")
MAX_THREADS = 8  # on a machine with fewer cores


def for_each_lane(
    opened: Sequence[OpenLane],
    work: Callable[[Lane, Feed], Work[T]],
    *,
    in_step: bool = False,
    threads: bool = False,
) -> list[T]:
    """Return the result of some work for every lane, in their order.

    Args:
        opened: The lanes with their feeds.
        work: A method of `Lane` that works batch by batch.
        in_step: True if the lanes read one loader. They then work in this thread, batch by batch.
        threads: True for a thread for each lane, even if they are on one device.

    Raises:
        StrategyError: With `threads`, lanes read one loader, or two members hold the same module.
    """
    by_thread: dict[object, list[int]] = {}
    for number, one in enumerate(opened):
        by_thread.setdefault(number if threads else one.lane.device, []).append(number)
    shared = None if len(by_thread) == 1 else find_shared_object([one.lane for one in opened])
    if threads:
        refuse_threads(in_step, shared)
    if in_step:
        return finish_in_step([work(one.lane, one.feed) for one in opened])
    if len(by_thread) == 1 or shared is not None:
        return [finish_in_step([work(one.lane, one.feed)])[0] for one in opened]
    results: dict[int, T] = {}

    def run(numbers: list[int]) -> None:
        for number in numbers:
            lane, feed = opened[number].lane, opened[number].feed
            with without_callers_contexts(), lane.engine.stream():
                results[number] = finish_in_step([work(lane, feed)])[0]

    count = min(len(by_thread), max(MAX_THREADS, os.cpu_count() or 1)) if threads else len(by_thread)
    with (
        divided_cores(one.lane for one in opened) as start_thread,
        ThreadPoolExecutor(count, "modelfleet-device", start_thread) as pool,
    ):
        for future in [pool.submit(run, numbers) for numbers in by_thread.values()]:
            future.result()
    return [results[number] for number in range(len(opened))]


def refuse_threads(in_step: bool, shared: tuple[str, str, str] | None) -> None:
    """Raise StrategyError if lanes can't run in threads: they read one loader in step, or share an object."""
    if in_step:
        raise StrategyError(
            'strategy="threads" is not possible: all members read one loader, batch by batch. Give each member a '
            'loader of its own, or arrays; or use "auto".'
        )
    if shared is not None:
        first, second, module = shared
        raise StrategyError(
            f'strategy="threads" is not possible: members {first!r} and {second!r} hold the same module '
            f"{module!r}, and one would set its mode while the other runs it. Give each a copy (copy.deepcopy), "
            f'or use "interleaved".'
        )
