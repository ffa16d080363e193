"""The header of a safetensors file: which tensors it holds, read without any framework."""

import json
from pathlib import Path
from typing import Any

from modelfleet.errors import StoreError

# The bound that the safetensors format itself sets: a few damaged bytes must not make us allocate gigabytes.
LONGEST_HEADER = 100_000_000


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The dtype and shape of every tensor in a file: `{"weight": {"dtype": "F32", "shape": [3, 10, 64]}}`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise _corrupt(path, f"its header claims {length:,} bytes, the file has {size:,}")
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        return {name: {"dtype": entry["dtype"], "shape": entry["shape"]} for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(path, "its header is not that of a safetensors file") from error


def difference(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> str | None:
    """The first thing in which two headers differ, in words; None if they agree."""
    for name, entry in expected.items():
        if name not in found:
            return f"tensor {name!r} is missing"
        if found[name] != entry:
            return f"tensor {name!r} is {_show(found[name])}, expected {_show(entry)}"
    strangers = [name for name in found if name not in expected]
    return f"tensor {strangers[0]!r} was not expected" if strangers else None


def _show(entry: dict[str, Any]) -> str:
    return f"{entry['dtype']} {entry['shape']}"


def _corrupt(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is corrupt: {why}. Load another copy.")
