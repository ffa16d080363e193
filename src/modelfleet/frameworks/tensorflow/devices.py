"""The devices that TensorFlow sees."""

from contextlib import suppress

import tensorflow as tf

from modelfleet.devices import Device, Memory, chosen


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those wanted, if they are here; for None all accelerators, or else the CPU."""
    return chosen(wanted, accelerators(), "TensorFlow")


def accelerators() -> list[Device]:
    """Every accelerator that TensorFlow can use in this process."""
    found = tf.config.list_physical_devices("GPU")
    for device in found:
        # TensorFlow would take all of a GPU's memory at its first use, and others may need it. Once it is in use
        # this can't be changed any more.
        with suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(device, True)
    return [Device("cuda", number) for number in range(len(found))]


def native(device: Device) -> str:
    """The device by TensorFlow's name; logical CPUs beyond those that TensorFlow was told of are its first."""
    if device.kind == "cpu":
        here = len(tf.config.list_logical_devices("CPU"))
        return f"CPU:{device.index if device.index is not None and device.index < here else 0}"
    return f"GPU:{device.index or 0}"


def memory(device: str) -> Memory | None:
    """Not known: TensorFlow tells what it uses of an accelerator, but not what there is."""
