"""Reading a saved folder: what it holds is checked before anything is made of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from modelfleet.errors import InputError, StoreError, unknown
from modelfleet.store.checksums import Checks, checksum_of
from modelfleet.store.header import GoneError, Header, difference, file_size, read_header, unreadable
from modelfleet.store.manifest import LONGEST, MANIFEST, UnusableError, decode

T = TypeVar("T")

_ATTEMPTS = 10  # at a folder that is saved to again and again meanwhile


class Files(Protocol):
    """How a framework puts its tensors into one safetensors file, and gets them back.

    A module of three functions will do, as `frameworks/torch/files.py` is.
    """

    def write(self, path: Path, tensors: Mapping[str, Any]) -> None:
        """Write the tensors; OSError where the disk refuses."""

    def read(self, path: Path) -> dict[str, Any]:
        """All tensors; StoreError for a file that can't be read."""
        ...

    def read_row(self, path: Path, row: int, names: Sequence[str] | None = None) -> dict[str, Any]:
        """`tensor[row]` of every tensor, or of those in `names`, without reading the rest."""
        ...


def read_folder(folder: Path, read: Callable[["Saved"], T], *, kind: str, verify: bool = True) -> T:
    """Give what `read` makes of a saved folder, once every part of it that was read is known to be undamaged.

    If another save replaces the folder's files meanwhile, `read` is called again, with the new ones.
    kind: what the folder must hold ("fleet", "checkpoint").
    verify: whether to compare checksums. A folder of an earlier version has none.
    """
    for attempt in range(_ATTEMPTS):
        saved = Saved(Path(folder), read_manifest(folder, kind=kind, verify=verify), verify=verify)
        try:
            with saved.checks:
                return read(saved)
        except GoneError:
            now = find_manifest(Path(folder), verify=verify)
            if attempt == _ATTEMPTS - 1 or now is None or now["files"] == saved.manifest["files"]:
                raise
    raise AssertionError("unreachable")


class Saved:
    """A saved folder that is being read: its manifest, and its tensors."""

    def __init__(self, folder: Path, manifest: dict[str, Any], *, verify: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.checks = Checks()
        self._verify = verify
        self._headers: dict[str, Header] = {}

    def tensors(self, name: str, reader: Files) -> dict[str, Any]:
        """All tensors of a data file, by name."""
        path, header = self._opened(name)
        return self._guarded(path, lambda: self._all(path, name, header, reader))

    def row(self, name: str, row: int, reader: Files, names: Sequence[str] | None = None) -> dict[str, Any]:
        """`tensor[row]` of the tensors of a data file, or of those in `names`, without reading the rest."""
        path, header = self._opened(name)
        for tensor in header.tensors if names is None else names:
            if tensor not in header.tensors:
                raise unknown("tensor", tensor, header.tensors)
            shape = header.tensors[tensor]["shape"]
            if not shape or not 0 <= row < shape[0]:
                raise InputError(f"tensor {tensor!r} of {path} has no row {row}: its shape is {tuple(shape)}.")
        return self._guarded(path, lambda: self._row(path, name, header, row, reader, names))

    def _all(self, path: Path, name: str, header: Header, reader: Files) -> dict[str, Any]:
        entry = self.manifest["files"][name]
        if self._verify and "rows" in entry:
            for row in range(header.rows):
                self._check_row(path, entry, header, row)
        return reader.read(path)

    def _row(
        self, path: Path, name: str, header: Header, row: int, reader: Files, names: Sequence[str] | None
    ) -> dict[str, Any]:
        entry = self.manifest["files"][name]
        if self._verify and "rows" in entry:
            self._check_row(path, entry, header, row)
        return reader.read_row(path, row, names)

    def _check_row(self, path: Path, entry: Mapping[str, Any], header: Header, row: int) -> None:
        if len(entry["rows"]) != header.rows:
            raise StoreError(
                f"{self.folder / MANIFEST} can't be used: it has checksums of {len(entry['rows'])} rows for "
                f"{path.name}, which has {header.rows}. Load another copy."
            )
        self.checks.add(path, f"row {row}", header.row(row), entry["rows"][row])

    def _opened(self, name: str) -> tuple[Path, Header]:
        """The path and header of a data file, once it is known to be the one that the manifest describes."""
        if name not in self.manifest["files"]:
            held = ", ".join(self.manifest["files"]) or "none"
            raise StoreError(f"{self.folder} holds no data file {name!r}. Its data files: {held}.")
        entry = self.manifest["files"][name]
        path = self.folder / entry["file"]
        if name not in self._headers:
            self._headers[name] = self._guarded(path, lambda: self._header(path, entry))
        return path, self._headers[name]

    def _header(self, path: Path, entry: Mapping[str, Any]) -> Header:
        size = file_size(path)
        if size != entry["bytes"]:
            raise StoreError(f"{path} has {size:,} bytes, expected {entry['bytes']:,}. Load another copy.")
        header = read_header(path)
        wrong = difference(header.tensors, entry["tensors"])
        if wrong is not None:
            raise StoreError(f"{path} does not fit its manifest: {wrong}. Load another copy.")
        if self._verify and "header" in entry and checksum_of(header.text) != entry["header"]:
            raise StoreError(f"{path} is damaged: its header has another checksum. Load another copy.")
        if self._verify and "checksum" in entry:
            self.checks.add(path, "the file", [(0, size)], entry["checksum"])
        return header

    def _guarded(self, path: Path, read: Callable[[], T]) -> T:
        """What `read` gives, with an explanation if the file can't be read."""
        try:
            return read()
        except OSError as error:
            raise unreadable(path, error) from error
        except StoreError as error:
            if path.exists():
                raise
            raise GoneError(path) from error


def read_manifest(folder: Path, *, kind: str | None, verify: bool = True) -> dict[str, Any]:
    """What the folder says about itself: the manifest it was saved with, its "kind", and its "files".

    Raises if it is of another kind; None takes any.
    """
    folder = Path(folder)
    try:
        if not folder.exists():
            raise StoreError(f"there is no folder {folder}. Check the path.")
        if not folder.is_dir():
            raise StoreError(f"{folder} is a file. Give the folder that was saved to.")
    except OSError as error:  # no permission to look, say
        raise unreadable(folder, error) from error
    manifest = find_manifest(folder, verify=verify)
    if manifest is None:
        raise StoreError(f"{folder} was not saved by modelfleet: it holds no {MANIFEST}. Check the path.")
    if kind is not None and manifest["kind"] != kind:
        raise StoreError(f"{folder} holds a {manifest['kind']}, not a {kind}.")
    return manifest


def find_manifest(folder: Path, *, verify: bool = True) -> dict[str, Any] | None:
    """The checked manifest of a folder, of whatever kind; None if there is none."""
    path = folder / MANIFEST
    try:
        size = file_size(path)
        if size > LONGEST + 100:
            raise StoreError(
                f"{path} can't be used: it has {size:,} bytes, at most {LONGEST:,} are expected. "
                f"Load another copy."
            )
        return decode(path.read_bytes(), verify=verify)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except UnusableError as error:
        raise StoreError(f"{path} can't be used: {error}") from error
