"""From the devices that people name to the places where workers can be had."""

import sys
from collections.abc import Sequence
from typing import Any

from modelfleet.devices import Device, parse_devices, threads_of
from modelfleet.errors import InputError
from modelfleet.workers._base import Place
from modelfleet.workers.inline import InlinePlace
from modelfleet.workers.process import ProcessPlace


def find(devices: str | Sequence[str], framework: Any) -> list[Place]:
    """A place for every device that is meant: this process for one, a process each for several, or a cluster."""
    wanted = parse_devices(devices)
    cluster = on_cluster(wanted)
    if cluster is not None:
        return cluster
    chosen = framework.choose(wanted)
    if len(chosen) == 1:
        return [InlinePlace(str(chosen[0]), str(chosen[0]))]
    return of_machine(chosen)


def on_cluster(wanted: tuple[Device, ...] | None) -> list[Place] | None:
    """The places of a Ray cluster, if its devices are meant; None if those of this machine are."""
    if wanted is None:
        cluster = sys.modules.get("modelfleet.workers.ray")
        if cluster is None or not cluster.connected():
            return None
    elif not any(device.kind == "ray" for device in wanted):
        return None
    elif any(device.kind != "ray" for device in wanted):
        raise InputError(
            f"devices {', '.join(map(str, wanted))} are partly of this machine and partly of a cluster. Name "
            f"those of one of them; this machine can be a node of the cluster, too."
        )
    from modelfleet.workers import ray

    return list(ray.places(wanted))


def of_machine(devices: Sequence[Device]) -> list[Place]:
    """A process for each device of this machine."""
    threads = threads_of(devices)
    return [ProcessPlace(str(device), str(device), environment(device, threads)) for device in devices]


def environment(device: Device, threads: int) -> dict[str, str]:
    """What is set in a worker process for a device before anything is imported."""
    env = {"MODELFLEET_DEVICE": str(device)}
    if device.kind == "cpu":
        count = str(threads)
        env |= dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), count
        )
    return env
