"""Reading a saved folder. Its contents are checked before anything is made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from modelfleet.errors import InputError, StoreError
from modelfleet.store.checksums import BLOCK, Checks, checksum_of
from modelfleet.store.header import GoneError, Header, difference, file_size, read_header, unreadable
from modelfleet.store.manifest import MANIFEST, MAX_BYTES, UnusableError, decode
from modelfleet.types import Json, Tensor

T = TypeVar("T")

_MAX_ATTEMPTS = 10  # for a folder that other saves keep replacing


class Files(Protocol):
    """Writes a framework's tensors to one safetensors file, and reads them back.

    A module with these three functions will do, such as `frameworks/torch/files.py`.
    """

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors. Raise OSError if the disk refuses."""

    def read(self, path: Path) -> dict[str, Tensor]:
        """Return all tensors. Raise `StoreError` if the file can't be read."""
        ...

    def read_rows(self, path: Path, start: int, stop: int) -> list[dict[str, Tensor]]:
        """Return `tensor[row]` of every tensor for each row in a range, without reading the rest."""
        ...


def read_folder(folder: Path, read: Callable[["Saved"], T], *, kind: str, verify: bool = True) -> T:
    """Call `read` on a saved folder, and return its result once everything that was read has been checked.

    If another save replaces the folder's files meanwhile, `read` is called again with the new ones.

    Args:
        folder: The folder that was saved to.
        read: Called with the folder's contents.
        kind: What the folder must hold ("fleet", "checkpoint").
        verify: Compare checksums. A folder of format version 1 has none.

    Raises:
        StoreError: If the folder is missing, damaged, or of another kind.
    """
    for attempt in range(_MAX_ATTEMPTS):
        saved = Saved(Path(folder), read_manifest(folder, kind=kind, verify=verify), verify=verify)
        try:
            with saved.checks:
                return read(saved)
        except GoneError:
            now = find_manifest(Path(folder), verify=verify)
            if attempt == _MAX_ATTEMPTS - 1 or now is None or now["files"] == saved.manifest["files"]:
                raise
    raise AssertionError("unreachable")


class Saved:
    """Contents of a saved folder: its manifest, and its tensors, which are read when needed."""

    def __init__(self, folder: Path, manifest: dict[str, Json], *, verify: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.checks = Checks()
        self._verify = verify
        self._headers: dict[str, Header] = {}

    def tensors(self, name: str, reader: Files) -> dict[str, Tensor]:
        """Return all tensors of a data file, by name."""
        path, header = self._opened(name)
        with _explaining(path):
            self._check_rows(name, path, header, 0, header.rows)
            return reader.read(path)

    def row(self, name: str, row: int, reader: Files) -> dict[str, Tensor]:
        """Return `tensor[row]` of all tensors of a data file, without reading the rest."""
        return next(self.rows(name, [row], reader))

    def rows(self, name: str, rows: Sequence[int], reader: Files) -> Iterator[dict[str, Tensor]]:
        """Yield what `row` returns for each of some rows. Small consecutive rows are read together."""
        path, header = self._opened(name)
        for row in rows:
            for tensor, entry in header.tensors.items():
                shape = entry["shape"]
                if not shape or not 0 <= row < shape[0]:
                    raise InputError(f"tensor {tensor!r} of {path} has no row {row}: its shape is {tuple(shape)}.")
        size = sum(stop - start for start, stop in header.row(0)) if header.rows else BLOCK
        for start, stop in _runs(rows, max(1, BLOCK // max(1, size))):
            with _explaining(path):
                self._check_rows(name, path, header, start, stop)
                found = reader.read_rows(path, start, stop)
            yield from found

    def _check_rows(self, name: str, path: Path, header: Header, start: int, stop: int) -> None:
        entry = self.manifest["files"][name]
        if not self._verify or "rows" not in entry:
            return
        if len(entry["rows"]) != header.rows:
            raise StoreError(
                f"{self.folder / MANIFEST} can't be used: it has checksums of {len(entry['rows'])} rows for "
                f"{path.name}, which has {header.rows}. Load another copy."
            )
        self.checks.add_rows(path, header, entry["rows"], start, stop)

    def _opened(self, name: str) -> tuple[Path, Header]:
        """Return the path and header of a data file, checked against the manifest."""
        if name not in self.manifest["files"]:
            held = ", ".join(self.manifest["files"]) or "none"
            raise StoreError(f"{self.folder} holds no data file {name!r}. Its data files: {held}.")
        entry = self.manifest["files"][name]
        path = self.folder / entry["file"]
        if name not in self._headers:
            with _explaining(path):
                self._headers[name] = self._read_header(path, entry)
        return path, self._headers[name]

    def _read_header(self, path: Path, entry: Mapping[str, Json]) -> Header:
        size = file_size(path)
        if size != entry["bytes"]:
            raise StoreError(f"{path} has {size:,} bytes, expected {entry['bytes']:,}. Load another copy.")
        header = read_header(path)
        wrong = difference(header.tensors, entry["tensors"])
        if wrong is not None:
            raise StoreError(f"{path} does not fit its manifest: {wrong}. Load another copy.")
        if self._verify and "header" in entry and checksum_of(header.text) != entry["header"]:
            raise StoreError(f"{path} is damaged: its header has a wrong checksum. Load another copy.")
        if self._verify and "checksum" in entry:
            self.checks.add(path, "the file", [(0, size)], entry["checksum"])
        return header


def _runs(rows: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the row after the last of each run of consecutive rows."""
    start = stop = -1
    for row in rows:
        if row != stop or stop - start == longest:
            if stop > start:
                yield start, stop
            start = row
        stop = row + 1
    if stop > start:
        yield start, stop


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raise a `StoreError` that says why, if a file can't be read within this context."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except StoreError as error:
        if path.exists():
            raise
        raise GoneError(path) from error


def read_manifest(folder: Path, *, kind: str | None, verify: bool = True) -> dict[str, Json]:
    """Return the manifest of a folder, which includes its "kind" and its "files".

    Raises:
        StoreError: If there is no usable manifest, or the folder is of another kind. None allows any kind.
    """
    folder = Path(folder)
    try:
        if not folder.exists():
            raise StoreError(f"there is no folder {folder}. Check the path.")
        if not folder.is_dir():
            raise StoreError(f"{folder} is a file. Give the folder that was saved to.")
    except OSError as error:  # for example no permission
        raise unreadable(folder, error) from error
    manifest = find_manifest(folder, verify=verify)
    if manifest is None:
        raise StoreError(f"{folder} was not saved by modelfleet: it holds no {MANIFEST}. Check the path.")
    if kind is not None and manifest["kind"] != kind:
        raise StoreError(f"{folder} holds a {manifest['kind']}, not a {kind}.")
    return manifest


def find_manifest(folder: Path, *, verify: bool = True) -> dict[str, Json] | None:
    """Return the checked manifest of a folder of any kind; None if there is none."""
    path = folder / MANIFEST
    try:
        size = file_size(path)
        if size > MAX_BYTES + 100:
            raise StoreError(
                f"{path} can't be used: it has {size:,} bytes, at most {MAX_BYTES:,} are expected. "
                f"Load another copy."
            )
        return decode(path.read_bytes(), verify=verify)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except UnusableError as error:
        raise StoreError(f"{path} can't be used: {error}") from error
