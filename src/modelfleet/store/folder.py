"""A folder of tensors that holds the old or the new whole copy at every moment, whatever is killed or full.

A save writes everything into `<token>.partial/` inside the folder, moves the data files out of it under names
that no earlier save has used, and then replaces manifest.json. Only the manifest says which data files
count, so that this one replacement is the whole change. What no manifest lists is then deleted; what a killed
save left behind is deleted by the next.
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
from typing import Any

from modelfleet.errors import InputError, StoreError
from modelfleet.store.checksums import checksum, checksum_of, row_checksums
from modelfleet.store.header import read_header
from modelfleet.store.manifest import DATA_FILE, FILE_NAME, FORMAT, MANIFEST, RESERVED, VERSION, encode, plain
from modelfleet.store.reading import Files, find_manifest, read_manifest

try:
    import fcntl
except ImportError:  # Windows: saves are not kept apart there
    fcntl = None

_PARTIAL = ".partial"
_OURS = re.compile(rf"{DATA_FILE.pattern}|[0-9a-f]{{16}}{re.escape(_PARTIAL)}")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_folder(
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    manifest: Mapping[str, Any],
    *,
    kind: str,
    writer: Files | Mapping[str, Files],
    by_row: bool = False,
) -> None:
    """Save tensors and a manifest as the folder's new copy; where that fails, the old copy stays as it was.

    files: a name (lower case) for each data file, with its tensors by name.
    manifest: anything JSON can hold, NaN, infinities and NumPy's numbers too.
    kind: what the folder holds ("fleet", "checkpoint"); a folder of another kind is never overwritten.
    writer: for all data files, or one for each by its name.
    by_row: whether the data files will be read row by row: every row then has a checksum of its own.
    """
    folder = Path(folder)
    _check_names(files, manifest)
    content = plain(manifest)
    try:
        _make(folder)
        with _held(folder):
            _check_ours(folder, kind)
            token = secrets.token_hex(8)
            try:
                _write(folder, token, files, {"kind": kind, **content}, writer, by_row)
            except BaseException:
                _sweep(folder, token)
                raise
            _sweep(folder)
    except OSError as error:
        raise StoreError(_refusal(folder, error)) from error


def is_unused(folder: Path) -> bool:
    """Whether a folder holds nothing yet, or only what its first save left when it was killed."""
    names = [entry.name for entry in folder.iterdir()]
    begun = {name.removesuffix(_PARTIAL) for name in names if name.endswith(_PARTIAL)}
    return all(_OURS.fullmatch(name) and any(token in name for token in begun) for name in names)


def tidy(folder: Path) -> None:
    """Delete what killed saves left in a folder, unless a save is going on."""
    with suppress(OSError, StoreError), _held(folder):
        _sweep(folder)


def _check_names(files: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise InputError(f"a data file can't be named {name!r}. Use a-z, 0-9, '-' and '_'.")
    taken = sorted(RESERVED & manifest.keys())
    if taken:
        raise InputError(f"the manifest's key {taken[0]!r} is the store's own. Use another.")


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file. Save to a folder.")
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
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
        # A process forked meanwhile shares the lock, and closing our handle would not take it from that one.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _check_ours(folder: Path, kind: str) -> None:
    """Refuse to mix a save into what is not an older copy of it."""
    try:
        if (folder / MANIFEST).exists():
            # Without its checksum: a damaged copy of the same kind may be replaced by a whole one.
            read_manifest(folder, kind=kind, verify=False)
            return
    except StoreError as error:
        raise StoreError(f"{error} Nothing was written: save elsewhere, or delete this folder.") from error
    strangers = sorted(entry.name for entry in folder.iterdir() if not _OURS.fullmatch(entry.name))
    if strangers:
        raise StoreError(
            f"{folder} is not empty and was not saved by modelfleet: it holds {strangers[0]!r}. "
            f"Nothing was written: save to a new folder."
        )


def _write(
    folder: Path,
    token: str,
    files: Mapping[str, Mapping[str, Any]],
    content: dict[str, Any],
    writer: Files | Mapping[str, Files],
    by_row: bool,
) -> None:
    partial = folder / f"{token}{_PARTIAL}"
    partial.mkdir()
    listed: dict[str, dict[str, Any]] = {}
    for name, tensors in files.items():
        path = partial / f"{name}.{token}.safetensors"
        (writer[name] if isinstance(writer, Mapping) else writer).write(path, tensors)
        with ThreadPoolExecutor(1) as pool:  # the disk and the checksums take their time at once
            synced = pool.submit(_sync, path)
            listed[name] = _entry(path, by_row)
            synced.result()
        assert listed[name]["tensors"].keys() == tensors.keys(), "the writer did not write what it was given"
    manifest = partial / MANIFEST
    manifest.write_bytes(encode({"format": FORMAT, "version": VERSION, **content, "files": listed}))
    _sync(manifest)
    mode = manifest.stat().st_mode  # whoever may read it may read the data files, which their writers keep private
    for entry in listed.values():
        (partial / entry["file"]).chmod(mode)
        os.replace(partial / entry["file"], folder / entry["file"])
    _sync_folder(folder)
    os.replace(manifest, folder / MANIFEST)
    _sync_folder(folder)


def _entry(path: Path, by_row: bool) -> dict[str, Any]:
    """What the manifest says of a data file."""
    header = read_header(path)
    size = path.stat().st_size
    entry: dict[str, Any] = {"file": path.name, "bytes": size, "tensors": header.tensors}
    if by_row and header.rows:
        return {**entry, "header": checksum_of(header.text), "rows": row_checksums(path, header)}
    return {**entry, "checksum": checksum(path, [(0, size)])}


def _sweep(folder: Path, token: str = "") -> None:
    """Delete what saves (or the save of one token) left and the manifest on the disk does not list."""
    # The disk is asked, not the caller: Ctrl-C may have come right after the new manifest was put in place.
    # Deleting is tidiness and may fail (a file still open on Windows): the next save tries again.
    with suppress(OSError, StoreError):
        manifest = find_manifest(folder)
        listed = set() if manifest is None else {entry["file"] for entry in manifest["files"].values()}
        for path in list(folder.iterdir()):
            if token not in path.name or not _OURS.fullmatch(path.name) or path.name in listed:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def _refusal(folder: Path, error: OSError) -> str:
    advice = "Free some space, or save to another disk" if error.errno in _NO_SPACE else "Save to another folder"
    return (
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
