"""Devices by name: "cpu", "cuda:0", or "cpu:0", "cpu:1", … to try several devices on one machine.

"ray" is every device of a Ray cluster, "ray:0" one of them: frameworks see none of these, but what runs on them.
"""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of a device or of the host: all, and those that are free now."""

    total: int
    free: int

    @property
    def used(self) -> int:
        """The bytes that are taken."""
        return self.total - self.free


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


def chosen(wanted: tuple[Device, ...] | None, here: Sequence[Device], framework: str) -> tuple[Device, ...]:
    """The devices to use of a framework that sees the accelerators `here`: those wanted, if they are here.

    For None all accelerators of the first one's kind, or else the CPU. Logical CPUs always are here, as many as
    are named.
    """
    if wanted is None:
        return tuple(device for device in here if device.kind == here[0].kind) or (Device("cpu"),)
    for device in wanted:
        if device.kind == "ray":
            raise InputError(
                f"device '{device}' is one of a Ray cluster, not one that {framework} sees in this process. "
                f"Name one of {_listed(here)}, or say 'auto'."
            )
        if device.kind != "cpu" and Device(device.kind, device.index or 0) not in here:
            raise InputError(
                f"device '{device}' is not here: {framework} sees {_listed(here)}. "
                f"Name one of these, or say 'auto'."
            )
    return wanted


def _listed(here: Sequence[Device]) -> str:
    return ", ".join(map(str, [Device("cpu"), *here]))


def cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(devices: Iterable[Device]) -> int:
    """The threads that each of these devices' logical CPUs has, at least one: they share this process's cores."""
    logical = sum(device.kind == "cpu" for device in devices)
    return max(1, cores() // max(1, logical))


def host_memory() -> Memory | None:
    """The memory that this process may use, and what of it is available; None if the system does not tell.

    Within a container its limit counts, if it is the smaller.
    """
    machine, container = _machine_memory(), _container_memory()
    if machine is None or container is None:
        return machine or container
    return Memory(min(machine.total, container.total), min(machine.free, container.free))


def _machine_memory() -> Memory | None:
    with suppress(OSError, ValueError, KeyError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return Memory(sizes["MemTotal"], sizes["MemAvailable"])
    names: Any = getattr(os, "sysconf_names", {})
    if {"SC_PHYS_PAGES", "SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page)
    return None


def _container_memory(folder: Path = Path("/sys/fs/cgroup")) -> Memory | None:
    with suppress(OSError, ValueError):  # "max", where there is no limit, is no number
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        taken = int((folder / "memory.current").read_text(encoding="ascii"))
        return Memory(limit, max(0, limit - taken + _reclaimable(folder)))
    return None


def _reclaimable(folder: Path) -> int:
    """What a container's use has of files read long ago: the kernel drops them when memory is asked for."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
