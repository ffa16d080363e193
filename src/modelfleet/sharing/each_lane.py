"""Evaluating and predicting: some work for each lane, in a thread for each device."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from modelfleet.feeds import Feed
from modelfleet.lanes.lane import Lane
from modelfleet.lanes.shared_objects import find_shared_object
from modelfleet.lanes.work import Work, finish_in_step
from modelfleet.runs.opening import OpenLane
from modelfleet.sharing.thread_counts import divided_cores

T = TypeVar("T")


def for_each_lane(
    opened: Sequence[OpenLane], work: Callable[[Lane, Feed], Work[T]], *, in_step: bool = False
) -> list[T]:
    """Return the result of some work for every lane, in their order.

    Args:
        opened: The lanes with their feeds.
        work: A method of `Lane` that works batch by batch.
        in_step: True if the lanes read one loader. They then work in this thread, batch by batch.
    """
    by_device: dict[str, list[int]] = {}
    for number, one in enumerate(opened):
        by_device.setdefault(one.lane.device, []).append(number)
    if in_step:
        return finish_in_step([work(one.lane, one.feed) for one in opened])
    if len(by_device) == 1 or find_shared_object([one.lane for one in opened]) is not None:
        return [finish_in_step([work(one.lane, one.feed)])[0] for one in opened]
    results: dict[int, T] = {}

    def run(numbers: list[int]) -> None:
        for number in numbers:
            lane, feed = opened[number].lane, opened[number].feed
            with lane.engine.stream():
                results[number] = finish_in_step([work(lane, feed)])[0]

    with (
        divided_cores(one.lane for one in opened) as start_thread,
        ThreadPoolExecutor(len(by_device), "modelfleet-device", start_thread) as pool,
    ):
        for future in [pool.submit(run, numbers) for numbers in by_device.values()]:
            future.result()
    return [results[number] for number in range(len(opened))]
