"""What this machine has for modelfleet, and what is missing for what."""

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from modelfleet import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

COMPILERS = ("c++", "g++", "clang++", "cl")


@dataclass(frozen=True)
class Part:
    """A package that something of modelfleet needs, and the pip line that brings it."""

    package: str
    purpose: str
    pip: str


PARTS = (
    Part("torch", "fleets of torch models", "pip install 'modelfleet[torch]'"),
    Part("safetensors", "save, load, checkpoints", "pip install 'modelfleet[torch]'"),
    Part("scikit-learn", "modelfleet demo", "pip install 'modelfleet[demo]'"),
    Part("matplotlib", "history.plot()", "pip install 'modelfleet[demo]'"),
    Part("pandas", "history.frame(), mf.by", "pip install pandas"),
    Part("polars", "mf.by", "pip install polars"),
    Part("jax", "no use of it yet", "pip install 'modelfleet[jax]'"),
    Part("keras", "no use of it yet", "pip install 'modelfleet[keras]'"),
    Part("tensorflow", "no use of it yet", "pip install 'modelfleet[tensorflow]'"),
    Part("ray", "no use of it yet", "pip install 'modelfleet[ray]'"),
)


def describe() -> "RenderableType":
    """All of it as one table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"modelfleet {__version__} on Python {platform.python_version()}", title_justify="left")
    for column in ("what", "here", "for", "to get it"):
        table.add_column(column, overflow="fold")
    for part in PARTS:
        found = installed(part.package)
        needed = found is None and part.purpose != "no use of it yet"
        # Text, since rich would take the brackets of a pip line for its own.
        table.add_row(part.package, found or "–", part.purpose, Text(part.pip if needed else ""))
    table.add_section()
    for row in machine():
        table.add_row(*map(Text, row))
    return table


def installed(package: str) -> str | None:
    """The version of a package, found without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> list[tuple[str, str, str, str]]:
    """Devices, the compiler and the folder of compiled programs: (what, here, for, to get it)."""
    compiler = _compiler()
    rows = [
        ("CPU cores", str(os.cpu_count()), "", ""),
        (
            "C++ compiler",
            compiler or "–",
            "faster steps on the CPU",
            "" if compiler else "install g++ or clang, or set CXX; all works without it, slower",
        ),
        ("MODELFLEET_COMPILE", os.environ.get("MODELFLEET_COMPILE", "auto"), "auto, now or never", ""),
    ]
    if installed("torch") is not None:
        from modelfleet.frameworks.torch.diagnosis import cache_folder, devices

        rows.insert(0, ("devices", ", ".join(devices()), "where fleets run", ""))
        rows.append(("cache", str(cache_folder()), "compiled programs, kept between runs", ""))
    return rows


def _compiler() -> str | None:
    wanted = os.environ.get("CXX")
    return next((path for name in ([wanted] if wanted else COMPILERS) if (path := shutil.which(name))), None)
