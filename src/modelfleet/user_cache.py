"""The folder of the user in which measured times are kept."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from modelfleet.types import Json


def user_cache() -> Path | None:
    """Return the folder: `MODELFLEET_CACHE`, or one in the user's cache. None if nothing is to be kept."""
    named = os.environ.get("MODELFLEET_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "modelfleet"


def read_numbers(path: Path) -> dict[str, float]:
    """Return the numbers of a JSON file by name; none if it can't be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        read: Json = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in read.items()}
    return {}


def write_numbers(path: Path, numbers: dict[str, float]) -> None:
    """Write numbers to a JSON file at once, so that a reader sees all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".partial", delete=False, encoding="utf-8"
    ) as file:
        json.dump(numbers, file)
    os.replace(file.name, path)
