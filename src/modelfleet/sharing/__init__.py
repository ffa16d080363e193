"""Sharing: how the lanes of a fit share their devices.

A sharing is a function of runs and options that runs the lanes to their end and yields what happens
(`modelfleet.runs.events.Sharing`). To add one, write such a function, add it to `sharings`, and its name to
`SharingName` and `Strategy` in `modelfleet.types`. If the planner should try it, name it in `Planner._plan_fit`;
if it takes groups whole, in `LiveLanes._asked_for`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from modelfleet.devices import Device
from modelfleet.remote.messages import OrderWriter
from modelfleet.runs.events import Sharing
from modelfleet.runs.interleaved import interleaved
from modelfleet.runs.job import Job
from modelfleet.sharing.data_parallel import RankedPlace
from modelfleet.sharing.processes import on_one_device, on_places
from modelfleet.sharing.threads import threads
from modelfleet.types import SharingName
from modelfleet.workers import Place
from modelfleet.workers.places import machine_places

Sharings = dict[SharingName, Callable[[Job], Sharing]]


def sharings(
    writer: Callable[[Job], OrderWriter], devices: Sequence[Device], cluster: Sequence[Place]
) -> Sharings:
    """Return all ways to share devices, as functions of the job.

    Args:
        writer: Makes the writer of the orders for workers.
        devices: The devices of this machine.
        cluster: The places of a Ray cluster, if the fleet is on one.
    """

    def in_workers(job: Job) -> Sharing:
        if not cluster and len(devices) == 1:
            return partial(on_one_device, writer(job))
        return partial(on_places, writer(job), cluster or machine_places(devices))

    def on_all_devices(job: Job) -> Sharing:
        return partial(on_places, writer(job), [RankedPlace(tuple(cluster or machine_places(devices)))])

    return {
        "interleaved": lambda job: interleaved,
        "threads": lambda job: threads,
        "processes": in_workers,
        "data_parallel": on_all_devices,
    }
