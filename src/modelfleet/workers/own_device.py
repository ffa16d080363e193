"""The one device that a worker process sees.

A process that sees all GPUs may take memory on each by a careless call: a context takes hundreds of megabytes, JAX
takes most of what is free, and TensorFlow all of it. So a worker for a GPU is shown that GPU alone.
"""

import os
from dataclasses import dataclass, field

from modelfleet.devices import Device

# The first that is set decides. Each lists what a process sees, in this order: "cuda:0" is the first of the list.
_VARIABLES = {"cuda": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


@dataclass(frozen=True)
class OwnDevice:
    """A device as the worker names it, and the variables that hide the others from it."""

    device: Device
    env: dict[str, str] = field(default_factory=dict)


def own_device(device: Device) -> OwnDevice:
    """Return a device as a worker sees it to which no other device of its kind is shown.

    Where nothing can hide the others, the worker sees them all, and its device has the same name as here.
    """
    variables = _VARIABLES.get(device.kind, ())
    if not variables:
        return OwnDevice(device)
    index = device.index or 0
    variable = next((name for name in variables if name in os.environ), variables[-1])
    seen = os.environ.get(variable)
    entries = [str(index)] if seen is None else [entry.strip() for entry in seen.split(",")][index : index + 1]
    if not entries:  # changed after the framework has read it
        return OwnDevice(device)
    return OwnDevice(Device(device.kind, 0), {variable: entries[0]})
