"""The devices that TensorFlow sees."""

from collections.abc import Iterable
from contextlib import suppress

import tensorflow as tf

from modelfleet.devices import Device
from modelfleet.errors import InputError


def choose(devices: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those asked for, if they are here; for None the first accelerator, or else the CPU."""
    if devices is None:
        return tuple(accelerators()[:1]) or (Device("cpu"),)
    check(devices)
    return devices


def accelerators() -> list[Device]:
    """Every accelerator that TensorFlow can use in this process."""
    found = tf.config.list_physical_devices("GPU")
    for device in found:
        # TensorFlow would take all of a GPU's memory at its first use, and others may need it. Once it is in use
        # this can't be changed any more.
        with suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(device, True)
    return [Device("cuda", number) for number in range(len(found))]


def check(devices: Iterable[Device]) -> None:
    """Refuse a device that is not here. Logical CPUs always are, as many as are named."""
    here = accelerators()
    for device in devices:
        wanted = device if device.index is not None else Device(device.kind, 0)
        if device.kind != "cpu" and wanted not in here:
            seen = ", ".join(map(str, [Device("cpu"), *here]))
            raise InputError(
                f"device '{device}' is not here: TensorFlow sees {seen}. Name one of these, or say 'auto'."
            )


def native(device: Device) -> str:
    """The device by TensorFlow's name; logical CPUs beyond those that TensorFlow was told of are its first."""
    if device.kind == "cpu":
        here = len(tf.config.list_logical_devices("CPU"))
        return f"CPU:{device.index if device.index is not None and device.index < here else 0}"
    return f"GPU:{device.index or 0}"


def free_memory(device: str) -> None:
    """Not known: TensorFlow tells what it uses of an accelerator, but not what there is."""
