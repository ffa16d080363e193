"""The devices that JAX sees."""

from collections.abc import Iterable

import jax

from modelfleet.devices import Device
from modelfleet.errors import InputError

_PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda", "METAL": "mps"}  # by JAX's names


def choose(devices: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those asked for, if they are here; for None the first accelerator, or else the CPU."""
    if devices is None:
        return tuple(accelerators()[:1]) or (Device("cpu"),)
    check(devices)
    return devices


def accelerators() -> list[Device]:
    """Every accelerator that JAX can use in this process."""
    found = [device for device in jax.devices() if device.platform in _PLATFORMS]
    return [Device(_PLATFORMS[device.platform], number) for number, device in enumerate(found)]


def check(devices: Iterable[Device]) -> None:
    """Refuse a device that is not here. Logical CPUs always are, as many as are named."""
    here = accelerators()
    for device in devices:
        wanted = device if device.index is not None else Device(device.kind, 0)
        if device.kind != "cpu" and wanted not in here:
            seen = ", ".join(map(str, [Device("cpu"), *here]))
            raise InputError(f"device '{device}' is not here: JAX sees {seen}. Name one of these, or say 'auto'.")


def free_memory(device: jax.Device) -> int | None:
    """The bytes that are free on an accelerator; None for the CPU, whose memory is the host's."""
    known = None if device.platform == "cpu" else device.memory_stats()
    if not known or "bytes_limit" not in known:
        return None
    return int(known["bytes_limit"] - known["bytes_in_use"])


def native(device: Device) -> jax.Device:
    """The device as JAX knows it; logical CPUs beyond those that JAX was told to make are its first."""
    if device.kind == "cpu":
        cpus = jax.devices("cpu")
        return cpus[device.index] if device.index is not None and device.index < len(cpus) else cpus[0]
    found = [one for one in jax.devices() if _PLATFORMS.get(one.platform) == device.kind]
    return found[device.index or 0]
