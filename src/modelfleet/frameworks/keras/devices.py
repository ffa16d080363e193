"""The devices that TensorFlow sees; on JAX and on torch, Keras models go by those frameworks' own `devices`."""

import tensorflow as tf

from modelfleet.devices import Device
from modelfleet.errors import InputError


def choose(devices: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those asked for, if they are here; for None the first accelerator, or else the CPU."""
    here = [Device("cuda", index) for index in range(len(tf.config.list_physical_devices("GPU")))]
    if devices is None:
        return tuple(here[:1]) or (Device("cpu"),)
    for device in devices:
        wanted = device if device.index is not None else Device(device.kind, 0)
        if device.kind != "cpu" and wanted not in here:
            seen = ", ".join(map(str, [Device("cpu"), *here]))
            raise InputError(
                f"device '{device}' is not here: TensorFlow sees {seen}. Name one of these, or say 'auto'."
            )
    return devices


def native(device: Device) -> str:
    """The device as TensorFlow knows it; logical CPUs beyond those that it was told to make are its first."""
    kind = "CPU" if device.kind == "cpu" else "GPU"
    index = device.index or 0
    if kind == "CPU" and index >= len(tf.config.list_logical_devices("CPU")):
        index = 0
    return f"/{kind}:{index}"
