"""Memory of devices: how much of it a plan may use."""

import os
import re

from modelfleet.devices import host_memory
from modelfleet.errors import InputError
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.types import NativeDevice

USABLE = 0.9  # of the free memory
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def available(framework: Adapter, device: NativeDevice, name: str) -> int | None:
    """Return the bytes that may be used on a device: `MODELFLEET_MEMORY`, or most of what is free now.

    Args:
        framework: The adapter of the framework that uses the device.
        device: The framework's own device.
        name: The device's name.

    Returns:
        The bytes. None if they are not known.
    """
    requested = requested_limit()
    if requested is not None:
        return requested
    memory = framework.memory(device)
    if memory is None and name.startswith("cpu"):
        memory = host_memory()
    return None if memory is None else int(memory.free * USABLE)


def requested_limit() -> int | None:
    """Return the bytes of `MODELFLEET_MEMORY`, such as "6GB". None if it is not set."""
    requested = os.environ.get("MODELFLEET_MEMORY")
    if not requested:
        return None
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)i?b?\s*", requested.lower())
    if match is None:
        raise InputError(f"MODELFLEET_MEMORY is {requested!r}; expected a size such as 6GB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2]])
