"""Writing a folder of tensors that holds a complete copy at every moment, even if the save is killed.

A save writes everything to `<token>.partial/` inside the folder, moves the data files out under names that no
earlier save has used, and then replaces manifest.json. Only the manifest says which data files count, so this one
replacement is the whole change. Data files that the manifest does not list are then deleted. The next save deletes
what a killed save left behind.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from modelfleet.errors import InputError, StoreError
from modelfleet.store.checksums import checksum, checksum_of, row_checksums
from modelfleet.store.header import read_header
from modelfleet.store.manifest import DATA_FILE, FILE_NAME, FORMAT, MANIFEST, RESERVED, VERSION, encode, plain
from modelfleet.store.reading import Files, find_manifest, read_manifest
from modelfleet.types import Json, Tensor

try:
    import fcntl
except ImportError:  # Windows, where two saves into one folder are not kept apart
    fcntl = None

_PARTIAL = ".partial"
_OUR_FILE = re.compile(rf"{DATA_FILE.pattern}|[0-9a-f]{{16}}{re.escape(_PARTIAL)}")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_folder(
    folder: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    manifest: Mapping[str, object],
    *,
    kind: str,
    writer: Files | Mapping[str, Files],
    by_row: bool = False,
) -> None:
    """Save tensors and a manifest as the folder's new copy. If that fails, the old copy stays as it was.

    Args:
        folder: The folder to save to. It must be new, empty, or hold an earlier save of the same kind.
        files: For each data file a name in lower case, and its tensors by name.
        manifest: Anything JSON can hold, including NaN, infinities and NumPy's numbers.
        kind: What the folder holds ("fleet", "checkpoint"). A folder of another kind is never overwritten.
        writer: Writes all data files, or one writer for each by name.
        by_row: Give every row a checksum, for data files that are read row by row.

    Raises:
        StoreError: If the folder can't be written or holds something else.
        InputError: If a name can't be used.
    """
    folder = Path(folder)
    _check_names(files, manifest)
    content = plain(manifest)
    try:
        _make(folder)
        with _locked(folder):
            _check_replaceable(folder, kind)
            token = secrets.token_hex(8)
            try:
                _write(folder, token, files, {"kind": kind, **content}, writer, by_row)
            except BaseException:
                _delete_unlisted(folder, token)
                raise
            _delete_unlisted(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def is_unused(folder: Path) -> bool:
    """Return True if a folder is empty, or holds only the remains of a first save that was killed."""
    names = [entry.name for entry in folder.iterdir()]
    begun = {name.removesuffix(_PARTIAL) for name in names if name.endswith(_PARTIAL)}
    return all(_OUR_FILE.fullmatch(name) and any(token in name for token in begun) for name in names)


def tidy(folder: Path) -> None:
    """Delete what killed saves have left in a folder, unless a save is running."""
    with suppress(OSError, StoreError), _locked(folder):
        _delete_unlisted(folder)


def _check_names(files: Mapping[str, object], manifest: Mapping[str, object]) -> None:
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise InputError(f"a data file can't be named {name!r}. Use a-z, 0-9, '-' and '_'.")
    taken = sorted(RESERVED & manifest.keys())
    if taken:
        raise InputError(f"the manifest's key {taken[0]!r} is reserved. Use another.")


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file. Save to a folder.")
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other saves out of the folder: each would delete what the other has not yet listed."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another save into {folder} is going on. Save to another folder.") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        # A process that was forked meanwhile shares the lock, and would keep it if we only closed our handle.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _check_replaceable(folder: Path, kind: str) -> None:
    """Raise `StoreError` if the folder holds anything but an older copy of the same kind."""
    try:
        if (folder / MANIFEST).exists():
            # Without its checksum: a damaged copy of the same kind may be replaced by a good one.
            read_manifest(folder, kind=kind, verify=False)
            return
    except StoreError as error:
        raise StoreError(f"{error} Nothing was written: save elsewhere, or delete this folder.") from error
    others = sorted(entry.name for entry in folder.iterdir() if not _OUR_FILE.fullmatch(entry.name))
    if others:
        raise StoreError(
            f"{folder} is not empty and was not saved by modelfleet: it holds {others[0]!r}. "
            f"Nothing was written: save to a new folder."
        )


def _write(
    folder: Path,
    token: str,
    files: Mapping[str, Mapping[str, Tensor]],
    content: dict[str, Json],
    writer: Files | Mapping[str, Files],
    by_row: bool,
) -> None:
    partial = folder / f"{token}{_PARTIAL}"
    partial.mkdir()
    listed: dict[str, dict[str, Json]] = {}
    for name, tensors in files.items():
        path = partial / f"{name}.{token}.safetensors"
        (writer[name] if isinstance(writer, Mapping) else writer).write(path, tensors)
        with ThreadPoolExecutor(1) as pool:  # the disk works while the checksums are computed
            synced = pool.submit(_sync, path)
            listed[name] = _entry(path, by_row)
            synced.result()
        assert listed[name]["tensors"].keys() == tensors.keys(), "the writer did not write what it was given"
    manifest = partial / MANIFEST
    manifest.write_bytes(encode({"format": FORMAT, "version": VERSION, **content, "files": listed}))
    _sync(manifest)
    mode = manifest.stat().st_mode  # for the data files too, which safetensors makes private
    for entry in listed.values():
        (partial / entry["file"]).chmod(mode)
        os.replace(partial / entry["file"], folder / entry["file"])
    _sync_folder(folder)
    os.replace(manifest, folder / MANIFEST)
    _sync_folder(folder)


def _entry(path: Path, by_row: bool) -> dict[str, Json]:
    """Return the manifest's entry for a data file."""
    header = read_header(path)
    size = path.stat().st_size
    entry: dict[str, Json] = {"file": path.name, "bytes": size, "tensors": header.tensors}
    if by_row and header.rows:
        return {
            **entry,
            "header": checksum_of(header.text),
            "rows": row_checksums(path, header, range(header.rows)),
        }
    return {**entry, "checksum": checksum(path, [(0, size)])}


def _delete_unlisted(folder: Path, token: str = "") -> None:
    """Delete files of saves (or of the save with one token) that the manifest on the disk does not list."""
    # Read from the disk, not passed by the caller: Ctrl-C may have come right after the manifest was replaced.
    # Deleting may fail, for example for an open file on Windows. The next save tries again.
    with suppress(OSError, StoreError):
        manifest = find_manifest(folder)
        listed = set() if manifest is None else {entry["file"] for entry in manifest["files"].values()}
        for path in list(folder.iterdir()):
            if token not in path.name or not _OUR_FILE.fullmatch(path.name) or path.name in listed:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def _unwritable(folder: Path, error: OSError) -> StoreError:
    advice = "Free some space, or save to another disk" if error.errno in _NO_SPACE else "Save to another folder"
    return StoreError(
        f"{folder} could not be written: {error.strerror or error}. "
        f"What was saved there before is untouched. {advice}."
    )


def _sync(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders can't be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
