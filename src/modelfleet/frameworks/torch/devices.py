"""The devices that torch sees."""

from collections.abc import Iterable

import torch

from modelfleet.devices import Device
from modelfleet.errors import InputError


def choose(devices: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those asked for, if they are here; for None the first accelerator, or else the CPU."""
    if devices is None:
        return tuple(accelerators()[:1]) or (Device("cpu"),)
    check(devices)
    return devices


def accelerators() -> list[Device]:
    """Every accelerator that torch can use in this process."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    return [Device(found.type, index) for index in range(torch.accelerator.device_count())]


def check(devices: Iterable[Device]) -> None:
    """Refuse a device that is not here. Logical CPUs always are, as many as are named."""
    here = accelerators()
    for device in devices:
        wanted = device if device.index is not None else Device(device.kind, 0)
        if device.kind != "cpu" and wanted not in here:
            seen = ", ".join(map(str, [Device("cpu"), *here]))
            raise InputError(
                f"device '{device}' is not here: torch sees {seen}. Name one of these, or say 'auto'."
            )


def free_memory(device: torch.device) -> int | None:
    """The bytes that are free on an accelerator; None for the CPU, whose memory is the host's."""
    if device.type == "cpu" or not hasattr(torch.accelerator, "get_memory_info"):
        return None
    return int(torch.accelerator.get_memory_info(device)[0])


def native(device: Device) -> torch.device:
    """The device as torch knows it; every logical CPU is the one CPU."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device(str(device))


def threads() -> int:
    """How many threads a step has on the CPU, in this thread."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Have so many threads for the steps of this thread, and of threads that are new."""
    torch.set_num_threads(count)
