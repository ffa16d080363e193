"""Header of a safetensors file: which tensors it holds, and where. Read without any framework."""

import json
import stat
from dataclasses import dataclass
from pathlib import Path

from modelfleet.errors import StoreError
from modelfleet.types import Json

# The bound that the safetensors format itself sets: a few damaged bytes must not make us allocate gigabytes.
MAX_HEADER_BYTES = 100_000_000

Range = tuple[int, int]
"""First byte of something in a file, and the first byte after it."""


class GoneError(StoreError):
    """Raised if a data file is missing: it is lost, or another save has replaced it."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is missing. Load another copy; or load again, if the folder was saved to meanwhile."
        )


@dataclass(frozen=True)
class Header:
    """Tensors of a safetensors file, and where they are."""

    tensors: dict[str, dict[str, Json]]
    """Dtype and shape of every tensor: `{"weight": {"dtype": "F32", "shape": [3, 10, 64]}}`."""
    ranges: dict[str, Range]
    """Bytes of each tensor, in the order of the file."""
    text: bytes
    """Bytes of the header in the file, including its length."""

    @property
    def rows(self) -> int:
        """Number of rows of every tensor; 0 if the tensors differ, or one has no rows."""
        counts = {tensor["shape"][0] if tensor["shape"] else 0 for tensor in self.tensors.values()}
        return counts.pop() if len(counts) == 1 else 0

    def row(self, row: int) -> list[Range]:
        """Return the bytes of one row of every tensor. The row must exist."""
        rows, found = self.rows, []
        for start, stop in self.ranges.values():
            length = (stop - start) // rows
            found.append((start + row * length, start + (row + 1) * length))
        return found


def file_size(path: Path) -> int:
    """Return the size of an ordinary file. Raise OSError for any other: opening a pipe would wait forever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "it is not a file" if not stat.S_ISDIR(found.st_mode) else "it is a folder", str(path))
    return found.st_size


def read_header(path: Path) -> Header:
    """Read and check a file's header. Raise `StoreError` if it is not a safetensors file."""
    size = file_size(path)
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(path, f"its header claims {length:,} bytes, the file has {size:,}")
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: {"dtype": entry["dtype"], "shape": entry["shape"]} for name, entry in entries.items()}
        ranges = {name: _range(entry["data_offsets"], 8 + length, size) for name, entry in entries.items()}
        for entry in tensors.values():
            check_tensor(entry)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(path, "its header is not that of a safetensors file") from error
    ranges = dict(sorted(ranges.items(), key=lambda item: item[1]))
    return Header(tensors, ranges, first + text)


def check_tensor(entry: Json) -> None:
    """Raise ValueError unless the entry is the dtype and shape of a tensor."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape"} or not isinstance(entry["dtype"], str):
        raise ValueError("it has no dtype and shape")
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"its shape is {shape!r}")


def difference(found: dict[str, dict[str, Json]], expected: dict[str, dict[str, Json]]) -> str | None:
    """Describe the first difference between the tensors of two headers; return None if they agree."""
    for name, entry in expected.items():
        if name not in found:
            return f"tensor {name!r} is missing"
        if found[name] != entry:
            return f"tensor {name!r} is {_show(found[name])}, expected {_show(entry)}"
    extra = [name for name in found if name not in expected]
    return f"tensor {extra[0]!r} was not expected" if extra else None


def unreadable(path: Path, error: OSError) -> StoreError:
    """Return the error for a file that the system does not let us read."""
    if isinstance(error, FileNotFoundError):
        return GoneError(path)
    return StoreError(f"{path} can't be read: {error.strerror or error}. Load another copy.")


def _range(offsets: Json, start: int, size: int) -> Range:
    first, last = offsets
    if type(first) is not int or type(last) is not int or not 0 <= first <= last <= size - start:
        raise ValueError(f"a tensor can't be at {offsets!r}")
    return start + first, start + last


def _show(entry: dict[str, Json]) -> str:
    return f"{entry['dtype']} {entry['shape']}"


def _corrupt(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is corrupt: {why}. Load another copy.")
