"""From the devices that users name to the places where workers run."""

import sys
from collections.abc import Sequence
from typing import Protocol

from modelfleet.devices import Device, parse_devices, threads_of
from modelfleet.errors import InputError
from modelfleet.workers.inline import InlinePlace
from modelfleet.workers.own_device import own_device
from modelfleet.workers.process import ProcessPlace
from modelfleet.workers.protocol import Place

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


class DeviceChooser(Protocol):
    """Chooses devices, as a framework's adapter does."""

    def choose(self, wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
        """Return the devices that are meant; None: all that the framework sees."""
        ...


def find_places(devices: str | Sequence[str], framework: DeviceChooser) -> list[Place]:
    """Return a place for each device: this process for one, a process for each of several, or a Ray cluster."""
    wanted = parse_devices(devices)
    if means_ray(wanted):
        return ray_places(wanted)
    chosen = framework.choose(wanted)
    if len(chosen) == 1:
        return [InlinePlace(str(chosen[0]), str(chosen[0]))]
    return machine_places(chosen)


def means_ray(wanted: tuple[Device, ...] | None) -> bool:
    """Return True if devices of a Ray cluster are meant, by name or because this process is connected to one."""
    if wanted is not None:
        return any(device.kind == "ray" for device in wanted)
    ray = sys.modules.get("modelfleet.workers.ray")
    return ray is not None and ray.connected()


def ray_places(wanted: tuple[Device, ...] | None) -> list[Place]:
    """Return the places of a Ray cluster: of the wanted devices, or of all.

    Raises:
        InputError: If some of the devices are this machine's.
    """
    named = wanted or ()
    if any(device.kind != "ray" for device in named):
        raise InputError(
            f"devices {', '.join(map(str, named))} are partly of this machine and partly of a cluster. Name only "
            f"devices of one of them; this machine can be a node of the cluster, too."
        )
    from modelfleet.workers import ray

    return list(ray.places(wanted))


def machine_places(devices: Sequence[Device]) -> list[Place]:
    """Return a place with a process of its own for each device of this machine. A worker sees no other GPU."""
    threads = threads_of(devices)
    return [
        ProcessPlace(str(device), str(own.device), worker_environment(device, threads) | own.env)
        for device in devices
        for own in [own_device(device)]
    ]


def shared_place(device: Device, threads: int) -> ProcessPlace:
    """Return a place for the workers that share a device of this machine.

    Its device is empty if that has the same name for them as here.
    """
    own = own_device(device)
    return ProcessPlace("", str(own.device) if own.env else "", {"OMP_NUM_THREADS": str(threads), **own.env})


def worker_environment(device: Device, threads: int) -> dict[str, str]:
    """Return the variables to set in a device's worker process before anything is imported."""
    env = {"MODELFLEET_DEVICE": str(device)}
    if device.kind == "cpu":
        env |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return env
