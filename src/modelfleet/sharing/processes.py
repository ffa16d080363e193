"""Lanes in workers: in processes of this machine, or on a Ray cluster.

On one device a few workers get some lanes each. With several devices each device has a worker, which gets the
device's lanes one at a time, and then lanes that wait for another device. When a worker dies, another continues
its lanes one by one, from their last whole epoch. A lane on which workers die again fails.
"""

import os
from collections.abc import Iterator, Sequence

from modelfleet.devices import parse_devices
from modelfleet.remote.lanes import RemoteLanes, work_of
from modelfleet.remote.messages import OrderWriter
from modelfleet.runs.events import Event, RunOptions
from modelfleet.runs.lane_run import LaneRun
from modelfleet.sharing.dispatcher import Dispatcher, WorkerSeat
from modelfleet.workers import Place
from modelfleet.workers.pickling import pickle_value
from modelfleet.workers.places import shared_place
from modelfleet.workers.process import ProcessPlace


def on_one_device(writer: OrderWriter, runs: Sequence[LaneRun], options: RunOptions) -> Iterator[Event]:
    """Run the lanes of one device in a few worker processes. If a worker dies, another continues its lanes.

    Lanes of a later wave start when the earlier waves are done.
    """
    cores = os.cpu_count() or 1
    for wave in sorted({run.lane.spec.wave for run in runs}):
        own = [run for run in runs if run.lane.spec.wave == wave and run.working]
        if own and not options.stopped():
            assignments = _divide(own, cores)
            (device,) = parse_devices(own[0].lane.device) or ()
            place = shared_place(device, max(1, cores // len(assignments)))
            seats = [WorkerSeat(place, place.device or None) for _ in assignments]
            yield from Dispatcher(writer, seats, assignments, options).run()


def on_places(
    writer: OrderWriter, places: Sequence[Place], runs: Sequence[LaneRun], options: RunOptions
) -> Iterator[Event]:
    """Run lanes at several places. If a worker dies, another continues its lanes."""
    homes = {place.name: number for number, place in enumerate(places)}
    working = [run for run in runs if run.working]
    if options.together or options.watched or options.in_step:
        by_home: dict[int, list[LaneRun]] = {}
        for run in working:
            by_home.setdefault(homes.get(run.lane.device, 0), []).append(run)
        assignments = [RemoteLanes(own, home) for home, own in by_home.items()]
    else:
        assignments = [RemoteLanes([run], homes.get(run.lane.device, 0)) for run in working]
    for own in assignments:
        if isinstance(places[0], ProcessPlace):  # what can't be sent is refused before any member has trained
            pickle_value(writer.order(own.runs), own.description)
    if assignments:
        seats = [WorkerSeat(place, place.device) for place in places]
        yield from Dispatcher(writer, seats, assignments, options).run()


def _divide(runs: Sequence[LaneRun], count: int) -> list[RemoteLanes]:
    """Divide lanes among at most `count` workers: the longest first, each to the worker with the least work."""
    shares: list[list[LaneRun]] = [[] for _ in range(max(1, min(count, len(runs))))]
    loads = [0.0 for _ in shares]
    for run in sorted(runs, key=work_of, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(run)
        loads[least] += work_of(run)
    return [RemoteLanes(own, number) for number, own in enumerate(shares)]
