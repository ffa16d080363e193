"""Devices by name: "cpu", "cuda:0", or "cpu:0", "cpu:1", … to try several devices on one machine.

"ray" means all devices of a Ray cluster, "ray:0" one of them. Frameworks do not see these names.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from modelfleet.errors import InputError

KINDS = ("cpu", "cuda", "mps", "xpu", "ray")
"""Kinds that can always be named. Others can be if a framework has such devices here (`find_kinds_by`)."""

_kind_finders: list[Callable[[], Iterable[str]]] = []

_DEVICE = re.compile(r"(?P<kind>[^:]+)(:(?P<index>0|[1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Without an index, the framework's current device of that kind."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device or of the host: in total, and free now."""

    total: int
    free: int


def find_kinds_by(finder: Callable[[], Iterable[str]]) -> None:
    """Have a function return the kinds of accelerators that there are, when a name is none of `KINDS`."""
    _kind_finders.append(finder)


def parse_devices(devices: str | Sequence[str]) -> tuple[Device, ...] | None:
    """Return the named devices, as in `"cuda:0"`, `"cpu:0,cpu:1"` or `["cuda:0", "cuda:1"]`.

    Returns:
        The devices, or None for `"auto"`: the framework chooses.

    Raises:
        InputError: If a name is not a device's, or a device is named twice.
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
        raise InputError('"auto" can\'t be combined with device names. Give "auto", or name the devices.')
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise InputError(f"device {text!r} is not a kind and an index. Write it as in 'cuda:0'.")
    if match["kind"] not in KINDS:
        found = {kind: None for finder in _kind_finders for kind in finder()}
        if match["kind"] not in found:
            known = ", ".join(dict.fromkeys((*KINDS, *found)))
            raise InputError(f"unknown kind of device in {text!r}. Known: {known}.")
    return Device(match["kind"], None if match["index"] is None else int(match["index"]))


def chosen(wanted: tuple[Device, ...] | None, here: Sequence[Device], framework: str) -> tuple[Device, ...]:
    """Return the devices to use with a framework that sees the accelerators `here`.

    Args:
        wanted: The devices to use; None for all accelerators of the first one's kind, or the CPU if there are
            none. Logical CPUs always exist, as many as are named.
        here: The accelerators that the framework sees.
        framework: The framework's name, for errors.

    Raises:
        InputError: If a wanted device does not exist.
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
                f"device '{device}' does not exist: {framework} sees {_listed(here)}. "
                f"Name one of these, or say 'auto'."
            )
    return wanted


def _listed(here: Sequence[Device]) -> str:
    return ", ".join(map(str, [Device("cpu"), *here]))


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(devices: Iterable[Device]) -> int:
    """Return the number of threads for each logical CPU among these devices. They share this process's cores."""
    logical = sum(device.kind == "cpu" for device in devices)
    return max(1, cores() // max(1, logical))


def host_memory() -> Memory | None:
    """Return the memory that this process may use; None if the system does not say.

    In a container, the container's limit counts if it is smaller than the machine's memory.
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
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    if {"SC_PHYS_PAGES", "SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page)
    return None


def _container_memory(folder: Path = Path("/sys/fs/cgroup")) -> Memory | None:
    with suppress(OSError, ValueError):  # "max" means no limit, and is not a number
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        taken = int((folder / "memory.current").read_text(encoding="ascii"))
        return Memory(limit, max(0, limit - taken + _reclaimable(folder)))
    return None


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files: they count as used, but the kernel drops them when memory is needed."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
