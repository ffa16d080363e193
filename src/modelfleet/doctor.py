"""What this machine has for modelfleet, and what is missing for what."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelfleet import __version__, frameworks
from modelfleet.devices import Device, Memory, cores, host_memory

if TYPE_CHECKING:
    from rich.console import RenderableType

COMPILERS = ("c++", "g++", "clang++", "cl")
SHARED = Path("/dev/shm")
ENOUGH_SHARED = 10**9
ORDER = ("torch", "jax", "tensorflow", "keras")
"""The frameworks as they are tried: Keras last, for it imports one of the others."""


@dataclass(frozen=True)
class Part:
    """A package that something of modelfleet needs, and the pip line that brings it."""

    package: str
    purpose: str
    pip: str


PARTS = (
    Part("numpy", "everything", "pip install modelfleet"),
    Part("torch", "fleets and replicas of torch models", "pip install 'modelfleet[torch]'"),
    Part("jax", "fleets and replicas of JAX models", "pip install 'modelfleet[jax]'"),
    Part("flax", "JAX models: Flax NNX modules", "pip install 'modelfleet[jax]'"),
    Part("optax", "optimizers of JAX models", "pip install 'modelfleet[jax]'"),
    Part("keras", "fleets and replicas of Keras models", "pip install 'modelfleet[keras]'"),
    Part("tensorflow", "Keras on TensorFlow, SavedModels", "pip install 'modelfleet[tensorflow]'"),
    Part("ray", 'devices="ray": several machines', "pip install 'modelfleet[ray]'"),
    Part("safetensors", "save, load, checkpoints", "pip install 'modelfleet[torch]'"),
    Part("scikit-learn", "modelfleet demo", "pip install 'modelfleet[demo]'"),
    Part("matplotlib", "history.plot()", "pip install 'modelfleet[demo]'"),
    Part("pandas", "history.frame(), mf.by", "pip install pandas"),
    Part("polars", "mf.by", "pip install polars"),
)


@dataclass(frozen=True)
class Row:
    """One thing: what it is, what of it is here, what it is for, and what to do if it is not as it should be."""

    what: str
    here: str | None
    purpose: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Seen:
    """A device, its memory if somebody tells it, and the frameworks that see it."""

    device: str
    memory: Memory | None
    frameworks: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All that the doctor found."""

    modelfleet: str
    python: str
    packages: tuple[Row, ...]
    devices: tuple[Seen, ...]
    machine: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON's terms; memory in bytes."""
        return asdict(self)


def examine() -> Report:
    """Look at the packages, import every framework that is installed to see its devices, and at the machine."""
    # TensorFlow would tell of every library that it does not find.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    adapters, troubles = load()
    return Report(
        __version__, platform.python_version(), packages(adapters, troubles), devices(adapters), machine(adapters)
    )


def describe(report: Report) -> "RenderableType":
    """A report as one table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"modelfleet {report.modelfleet} on Python {report.python}", title_justify="left")
    for column in ("what", "here", "for", "what to do"):
        table.add_column(column, overflow="fold")
    for rows in (report.packages, [_device_row(seen) for seen in report.devices], report.machine):
        for row in rows:
            # Text, since rich would take the brackets of a pip line for its own.
            table.add_row(*map(Text, (row.what, row.here or "–", row.purpose, row.advice)))
        table.add_section()
    return table


def _device_row(seen: Seen) -> Row:
    known = seen.memory
    memory = "memory not known" if known is None else f"{_size(known.free)} free of {_size(known.total)}"
    return Row(seen.device, memory, f"seen by {', '.join(seen.frameworks)}" if seen.frameworks else "")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def installed(package: str) -> str | None:
    """The version of a package, found without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load() -> tuple[dict[str, Any], dict[str, str]]:
    """The adapters of the frameworks that are installed, and for those that can't be imported, why."""
    adapters: dict[str, Any] = {}
    troubles: dict[str, str] = {}
    for name in ORDER:
        if installed(name) is not None:
            found, trouble = _tried(lambda name=name: frameworks.adapter(name))
            if trouble:
                troubles[name] = f"does not import: {trouble}"
            else:
                adapters[name] = found
    return adapters, troubles


def _tried(ask: Callable[[], Any]) -> tuple[Any, str]:
    """What a framework answers, and what went wrong: a broken one must not keep the rest from being told."""
    try:
        return ask(), ""
    except Exception as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:200]


def packages(adapters: Mapping[str, Any], troubles: Mapping[str, str]) -> tuple[Row, ...]:
    """The packages: their versions, what they are for, and how to get those that are missing."""
    rows = []
    for part in PARTS:
        found = installed(part.package)
        row = Row(part.package, found, part.purpose, part.pip if found is None else troubles.get(part.package, ""))
        if part.package == "keras" and "keras" in adapters:
            from modelfleet.frameworks.keras.diagnosis import backend

            row = replace(row, here=f"{found}, backend {backend()}")
        rows.append(row)
    return tuple(rows)


def devices(adapters: Mapping[str, Any]) -> tuple[Seen, ...]:
    """Every device that a fleet can be given: the CPU, and what the frameworks see."""
    memories: dict[Device, Memory | None] = {}
    seers: dict[Device, list[str]] = {}
    for name, adapter in adapters.items():
        for device in _tried(adapter.accelerators)[0] or ():
            seers.setdefault(device, []).append(name)
            # Whoever tells it first: frameworks count alike, but not all tell.
            if memories.get(device) is None:
                memories[device] = _tried(lambda adapter=adapter, d=device: adapter.memory(adapter.native(d)))[0]
    accelerators = [Seen(str(device), memories[device], tuple(names)) for device, names in seers.items()]
    return Seen("cpu", host_memory(), tuple(adapters)), *accelerators


def machine(adapters: Mapping[str, Any]) -> tuple[Row, ...]:
    """The cores, shared memory, the cluster, the compiler and the folder of compiled programs."""
    compiler = _compiler()
    rows = [
        Row("cpu:0, cpu:1, …", f"{cores()} cores", "logical devices: they share these cores"),
        *_shared_memory(),
        *([_cluster()] if installed("ray") is not None else []),
        Row(
            "C++ compiler",
            compiler,
            "faster steps on the CPU",
            "" if compiler else "install g++ or clang, or set CXX; all works without it, slower",
        ),
        Row("MODELFLEET_COMPILE", os.environ.get("MODELFLEET_COMPILE", "auto"), "auto, now or never"),
    ]
    if "torch" in adapters:
        from modelfleet.frameworks.torch.diagnosis import cache_folder

        folder, trouble = _tried(cache_folder)
        rows.append(Row("cache", folder and str(folder), "compiled programs, kept between runs", trouble))
    return tuple(rows)


def _shared_memory() -> list[Row]:
    """A row where the system has such a folder; elsewhere there is no limit to know of."""
    try:
        size = shutil.disk_usage(SHARED)
    except OSError:
        return []
    little = size.free < ENOUGH_SHARED
    advice = f"under {_size(ENOUGH_SHARED)}: give it more (in Docker --shm-size=4g)" if little else ""
    here = f"{_size(size.free)} free of {_size(size.total)}"
    return [Row(f"shared memory, {SHARED}", here, "a DataLoader's processes pass batches through it", advice)]


def _cluster() -> Row:
    """Whether this process is joined to a Ray cluster, or told of one; ray is not imported for it."""
    ray, address = sys.modules.get("ray"), os.environ.get("RAY_ADDRESS")
    if ray is not None and ray.is_initialized():
        return Row("Ray cluster", "connected", 'devices="ray"')
    if address:
        return Row("Ray cluster", f"RAY_ADDRESS={address}", 'devices="ray" runs there')
    return Row("Ray cluster", None, 'devices="ray"', 'mf.connect("ray://host:10001"), or set RAY_ADDRESS')


def _compiler() -> str | None:
    wanted = os.environ.get("CXX")
    return next((path for name in ([wanted] if wanted else COMPILERS) if (path := shutil.which(name))), None)
