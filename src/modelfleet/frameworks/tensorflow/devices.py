"""Devices that TensorFlow can use."""

from contextlib import suppress

import tensorflow as tf

from modelfleet.devices import Device, Memory, chosen


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """Return the devices to use: those wanted, if they exist; for None, all accelerators or else the CPU."""
    return chosen(wanted, accelerators(), "TensorFlow")


def accelerators() -> list[Device]:
    """Return every accelerator that TensorFlow can use in this process."""
    found = tf.config.list_physical_devices("GPU")
    for device in found:
        # TensorFlow would take all of a GPU's memory at its first use, which other programs may need. After the
        # first use this can't be changed.
        with suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(device, True)
    return [Device("cuda", number) for number in range(len(found))]


def native(device: Device) -> str:
    """Return TensorFlow's name of a device. Logical CPUs that TensorFlow does not have are its first CPU."""
    if device.kind == "cpu":
        here = len(tf.config.list_logical_devices("CPU"))
        return f"CPU:{device.index if device.index is not None and device.index < here else 0}"
    return f"GPU:{device.index or 0}"


def memory(device: str) -> Memory | None:
    """Return None: TensorFlow reports how much memory it uses, but not how much an accelerator has."""


def hardware(device: str) -> str | None:
    """Return the name of an accelerator's model; None for the CPU."""
    kind, _, index = device.partition(":")
    if kind == "CPU":
        return None
    found = tf.config.list_physical_devices(kind)[int(index)]
    return str(tf.config.experimental.get_device_details(found).get("device_name", kind))
