"""`modelfleet doctor`: what this machine has for modelfleet, and what is missing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from modelfleet import __version__, frameworks, nvidia
from modelfleet.devices import Device, Memory, cores, host_memory
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.frameworks.doctor_rows import Row
from modelfleet.types import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

COMPILERS = ("c++", "g++", "clang++", "cl")
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 10**9  # bytes


@dataclass(frozen=True)
class Package:
    """Names a package that a part of modelfleet needs, and the pip command that installs it."""

    name: str
    purpose: str
    pip: str


PACKAGES = (
    Package("numpy", "everything", "pip install modelfleet"),
    *(
        Package(name, purpose, f"pip install 'modelfleet[{extra}]'")
        for extra, entry in reversed(frameworks.ADAPTERS.items())
        for name, purpose in entry.packages.items()
    ),
    Package("ray", 'devices="ray": several machines', "pip install 'modelfleet[ray]'"),
    Package("safetensors", "save, load, checkpoints", "pip install 'modelfleet[torch]'"),
    Package("scikit-learn", "modelfleet demo", "pip install 'modelfleet[demo]'"),
    Package("matplotlib", "history.plot()", "pip install 'modelfleet[demo]'"),
    Package("pandas", "history.frame(), mf.by", "pip install pandas"),
    Package("polars", "mf.by", "pip install polars"),
)


@dataclass(frozen=True)
class FoundDevice:
    """Names a device, its memory if a framework knows it, and the frameworks that see it."""

    device: str
    memory: Memory | None
    frameworks: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Holds what the doctor has found."""

    modelfleet: str
    python: str
    packages: tuple[Row, ...]
    devices: tuple[FoundDevice, ...]
    accelerators: tuple[Row, ...]
    machine: tuple[Row, ...]

    def to_dict(self) -> dict[str, Json]:
        """Return the report as values that JSON can hold, with memory in bytes."""
        return asdict(self)


def examine() -> Report:
    """Examine the packages, the devices and the machine. Imports every framework that is installed."""
    # Otherwise TensorFlow prints every library that it does not find.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    adapters, problems = load_adapters()
    found = devices(adapters)
    return Report(
        __version__,
        platform.python_version(),
        packages(adapters, problems),
        found,
        accelerators(adapters, found),
        machine(adapters),
    )


def describe(report: Report) -> "RenderableType":
    """Return a report as one table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"modelfleet {report.modelfleet} on Python {report.python}", title_justify="left")
    for column in ("what", "here", "for", "what to do"):
        table.add_column(column, overflow="fold")
    found = [_device_row(found) for found in report.devices]
    for rows in (report.packages, found, report.accelerators, report.machine):
        for row in rows:
            # As Text, since rich would take the brackets of a pip command for markup.
            table.add_row(*map(Text, (row.what, row.here or "–", row.purpose, row.advice)))
        table.add_section()
    return table


def _device_row(found: FoundDevice) -> Row:
    known = found.memory
    memory = "memory not known" if known is None else f"{_size(known.free)} free of {_size(known.total)}"
    return Row(found.device, memory, f"seen by {', '.join(found.frameworks)}" if found.frameworks else "")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def installed(package: str) -> str | None:
    """Return the version of a package without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load_adapters() -> tuple[dict[str, Adapter], dict[str, str]]:
    """Return the adapters of the installed frameworks, and why the others can't be imported."""
    adapters: dict[str, Adapter] = {}
    problems: dict[str, str] = {}
    for name in reversed(frameworks.ADAPTERS):  # so that Keras comes last, since it imports one of the others
        if installed(name) is not None:
            found, problem = _attempt(lambda name=name: frameworks.adapter(name))
            if found is None:
                problems[name] = f"does not import: {problem}"
            else:
                adapters[name] = found
    return adapters, problems


def _attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return what a framework returns, or what went wrong. A broken framework must not hide the rest."""
    try:
        return call(), ""
    except Exception as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:200]


def packages(adapters: Mapping[str, Adapter], problems: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the packages with their versions and purposes, and how to install those that are missing."""
    rows = []
    for package in PACKAGES:
        found = installed(package.name)
        advice = package.pip if found is None else problems.get(package.name, "")
        note = getattr(adapters.get(package.name), "version_note", None)
        here = found if note is None else f"{found}, {note()}"
        rows.append(Row(package.name, here, package.purpose, advice))
    return tuple(rows)


def devices(adapters: Mapping[str, Adapter]) -> tuple[FoundDevice, ...]:
    """Return every device that a fleet can use: the CPU, and those that the frameworks see."""
    memories: dict[Device, Memory | None] = {}
    seen_by: dict[Device, list[str]] = {}
    for name, adapter in adapters.items():
        for device in _attempt(adapter.accelerators)[0] or ():
            seen_by.setdefault(device, []).append(name)
            # The first framework that knows the memory: they agree, but not all of them know it.
            if memories.get(device) is None:
                memories[device] = _attempt(lambda adapter=adapter, d=device: adapter.memory(adapter.native(d)))[0]
    accelerators = [FoundDevice(str(device), memories[device], tuple(names)) for device, names in seen_by.items()]
    return FoundDevice("cpu", host_memory(), tuple(adapters)), *accelerators


def accelerators(adapters: Mapping[str, Adapter], found: Sequence[FoundDevice]) -> tuple[Row, ...]:
    """Return what decides how quick the accelerators are, and who uses their memory; or that there are none."""
    kinds = {own.device.partition(":")[0] for own in found}
    if kinds == {"cpu"}:
        return (Row("accelerators", None, "fast training", "no framework sees one here: models run on the CPU"),)
    rows: list[Row] = []
    for adapter in adapters.values():
        if hasattr(adapter, "accelerator_rows"):
            rows += _attempt(adapter.accelerator_rows)[0] or ()
    if "cuda" in kinds:
        runs = nvidia.multi_process_service()
        advice = "" if runs else f"{nvidia.START_MPS}; without it, processes take turns on a GPU"
        rows.append(Row("MPS daemon", "runs" if runs else None, "several processes at once on one GPU", advice))
        rows += [_process_row(process) for process in nvidia.processes()]
    return tuple(rows)


def _process_row(process: nvidia.GpuProcess) -> Row:
    used = "memory not known" if process.bytes is None else _size(process.bytes)
    return Row(process.gpu, f"{used}: {process.name}, process {process.pid}", "memory by process")


def machine(adapters: Mapping[str, Adapter]) -> tuple[Row, ...]:
    """Return the cores, shared memory, the cluster, the compiler and the folder of compiled programs."""
    compiler = _compiler()
    rows = [
        Row("cpu:0, cpu:1, …", f"{cores()} cores", "logical devices: they share these cores"),
        *_shared_memory(),
        *([_cluster()] if installed("ray") is not None else []),
        Row(
            "C++ compiler",
            compiler,
            "faster steps on the CPU",
            "" if compiler else "install g++ or clang, or set CXX; without it everything works, but slower",
        ),
        Row("MODELFLEET_COMPILE", os.environ.get("MODELFLEET_COMPILE", "auto"), "auto, now or never"),
    ]
    for adapter in adapters.values():
        if hasattr(adapter, "cache_folder"):
            folder, problem = _attempt(adapter.cache_folder)
            here = None if folder is None else str(folder)
            rows.append(Row("cache", here, "compiled programs, kept between runs", problem))
    return tuple(rows)


def _shared_memory() -> list[Row]:
    """Return a row if the system has a folder for shared memory. Other systems have no such limit."""
    try:
        size = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return []
    little = size.free < ENOUGH_SHARED_MEMORY
    advice = f"under {_size(ENOUGH_SHARED_MEMORY)}: give it more (in Docker --shm-size=4g)" if little else ""
    here = f"{_size(size.free)} free of {_size(size.total)}"
    return [
        Row(f"shared memory, {SHARED_MEMORY}", here, "a DataLoader's processes pass batches through it", advice)
    ]


def _cluster() -> Row:
    """Return a row on the Ray cluster that this process is connected to, if any. Does not import ray."""
    ray, address = sys.modules.get("ray"), os.environ.get("RAY_ADDRESS")
    if ray is not None and ray.is_initialized():
        return Row("Ray cluster", "connected", 'devices="ray"')
    if address:
        return Row("Ray cluster", f"RAY_ADDRESS={address}", 'devices="ray" runs there')
    return Row("Ray cluster", None, 'devices="ray"', 'mf.connect("ray://host:10001"), or set RAY_ADDRESS')


def _compiler() -> str | None:
    wanted = os.environ.get("CXX")
    return next((path for name in ([wanted] if wanted else COMPILERS) if (path := shutil.which(name))), None)
