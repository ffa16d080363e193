"""Devices for models that know of none: the CPU, as often as it is named."""

from modelfleet.devices import Device, Memory, chosen


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those wanted, if they are CPUs; for None the CPU."""
    return chosen(wanted, (), "a plain function")


def native(device: Device) -> Device:
    """The device as it is."""
    return device


def memory(device: Device) -> Memory | None:
    """That of the host, which whoever asks knows better."""
