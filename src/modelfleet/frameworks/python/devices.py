"""Devices for models that have none: the CPU, as often as it is named."""

from modelfleet.devices import Device, Memory, chosen


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """Return the devices to use: those wanted, if they are CPUs; for None, the CPU."""
    return chosen(wanted, (), "a plain function")


def native(device: Device) -> Device:
    """Return the device itself."""
    return device


def memory(device: Device) -> Memory | None:
    """Return None: the memory is the host's."""
