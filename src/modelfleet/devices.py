"""Devices by name: "cpu", "cuda:0", or "cpu:0", "cpu:1", … to try several devices on one machine."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelfleet.errors import InputError

KINDS = ("cpu", "cuda", "mps", "xpu", "ray")

_DEVICE = re.compile(r"(?P<kind>[^:]+)(:(?P<index>0|[1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Without an index it is the framework's current device of that kind."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse_devices(devices: str | Sequence[str]) -> tuple[Device, ...] | None:
    """The devices that are named, as in `"cuda:0"`, `"cpu:0,cpu:1"` or `["cuda:0", "cuda:1"]`.

    None for `"auto"`: the framework chooses.
    """
    texts = _texts(devices)
    if texts == ["auto"]:
        return None
    if not texts:
        raise InputError('no device was given. Name one, as in "cpu" or "cuda:0", or say "auto".')
    found: list[Device] = []
    for text in texts:
        device = _parse(text)
        for other in found:
            if device == other:
                raise InputError(f"device {text!r} is named twice. Name each device once.")
            if device.kind == other.kind and None in (device.index, other.index):
                raise InputError(
                    f"devices '{other}' and '{device}' may be the same. Name them as '{device.kind}:0', …"
                )
        found.append(device)
    return tuple(found)


def _texts(devices: str | Sequence[str]) -> list[str]:
    if isinstance(devices, str):
        return [text.strip() for text in devices.split(",") if text.strip()]
    if isinstance(devices, list | tuple) and all(isinstance(text, str) for text in devices):
        return [text.strip() for text in devices]
    raise InputError(f'devices={devices!r} names no devices. Give "auto", a name as "cuda:0", or a list of names.')


def _parse(text: str) -> Device:
    if text == "auto":
        raise InputError('"auto" stands alone: say "auto", or name the devices.')
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise InputError(f"device {text!r} is not a kind and an index. Write it as in 'cuda:0'.")
    if match["kind"] not in KINDS:
        raise InputError(f"unknown kind of device in {text!r}. Known: {', '.join(KINDS)}.")
    return Device(match["kind"], None if match["index"] is None else int(match["index"]))


def threads_of(devices: Sequence[Device]) -> int:
    """The threads that each of several logical CPU devices has."""
    import os

    logical = sum(device.kind == "cpu" for device in devices)
    return max(1, len(os.sched_getaffinity(0)) // max(1, logical))
