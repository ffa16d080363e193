"""Taking turns: how lanes share their devices."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from modelfleet.devices import Device
from modelfleet.sharing.interleaved import interleaved
from modelfleet.sharing.shifts import Sharing
from modelfleet.sharing.threads import threads
from modelfleet.workers import Place
from modelfleet.workers.places import machine_places


def sharings(
    orders: Callable[[Any], Any], devices: Sequence[Device], cluster: Sequence[Place]
) -> dict[str, Callable[[Any], Sharing]]:
    """The ways to share devices, for a job: of this machine, or the places of a cluster."""
    from modelfleet.sharing.processes import everywhere, processes
    from modelfleet.sharing.team import TeamPlace

    def in_workers(job: Any) -> Sharing:
        if not cluster and len(devices) == 1:
            return partial(processes, orders(job))
        return partial(everywhere, orders(job), cluster or machine_places(devices))

    def in_a_team(job: Any) -> Sharing:
        return partial(everywhere, orders(job), [TeamPlace(tuple(cluster or machine_places(devices)))])

    return {
        "interleaved": lambda _: interleaved,
        "threads": lambda _: threads,
        "processes": in_workers,
        "data_parallel": in_a_team,
    }
