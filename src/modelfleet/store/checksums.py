"""Checksums of files and of parts of them: how damage is noticed.

SHA-256, of which 128 bits are kept. Most processors have instructions for it, which make it several times as fast
as BLAKE2; and hashing lets other threads run. What is longer than a block is summed up block by block, by several
threads, and its checksum is that of its blocks' checksums.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from modelfleet.errors import StoreError
from modelfleet.store.header import Header, Range, unreadable

BLOCK = 1 << 24  # bytes
_PIECE = 1 << 20  # what is read at once
_THREADS = min(4, os.cpu_count() or 1)
_LENGTH = 32  # hexadecimal digits


def checksum_of(data: bytes) -> str:
    """The checksum of bytes in memory."""
    return hashlib.sha256(data).hexdigest()[:_LENGTH]


def blocks_of(ranges: Iterable[Range]) -> list[list[Range]]:
    """What is summed up at once: all of it if that is little, else block by block."""
    whole = list(ranges)
    if sum(stop - start for start, stop in whole) <= BLOCK:
        return [whole]
    return [
        [(low, min(low + BLOCK, stop))] for start, stop in whole for low in range(start, stop, BLOCK) if low < stop
    ]


def checksum(path: Path, ranges: Iterable[Range]) -> str:
    """The checksum of parts of a file, one after the other."""
    blocks = blocks_of(ranges)
    if len(blocks) == 1:
        return _joined([_digest(path, blocks[0])])
    with ThreadPoolExecutor(_THREADS) as pool:
        return _joined(list(pool.map(lambda block: _digest(path, block), blocks)))


def row_checksums(path: Path, header: Header) -> list[str]:
    """The checksum of every row of a file's tensors: of row 0 of all of them, of row 1, …"""
    rows = header.rows
    if not rows:
        return []
    if sum(stop - start for start, stop in header.row(0)) > BLOCK:
        return [checksum(path, header.row(row)) for row in range(rows)]
    # In one pass from front to back: there may be many rows, of a few bytes each.
    sums = [hashlib.sha256() for _ in range(rows)]
    with path.open("rb", buffering=0) as file:
        for start, stop in header.places.values():
            length = (stop - start) // rows
            together = max(1, _PIECE // max(1, length))
            file.seek(start)
            for first in range(0, rows, together):
                last = min(rows, first + together)
                data = memoryview(_read(file, (last - first) * length))
                for row in range(first, last):
                    sums[row].update(data[(row - first) * length : (row - first + 1) * length])
    return [each.hexdigest()[:_LENGTH] for each in sums]


class Checks:
    """Checks of parts of files against their checksums: small ones at once, large ones by threads meanwhile.

    Whoever leaves the `with` block has all of them done; the first that fails raises `StoreError`.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._due: list[tuple[Path, str, str, list[Future[bytes]]]] = []

    def add(self, path: Path, what: str, ranges: Sequence[Range], expected: str) -> None:
        """Check that these parts of a file have a checksum; `what` names them in the error."""
        blocks = blocks_of(ranges)
        if sum(stop - start for start, stop in ranges) <= _PIECE:
            _compare(path, what, _joined([_digest(path, block) for block in blocks]), expected)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS)
        digests = [self._pool.submit(_digest, path, block) for block in blocks]
        self._due.append((path, what, expected, digests))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Damage is the better explanation of whatever else went wrong, except of what was not our error.
            if error is None or isinstance(error, Exception):
                for path, what, expected, digests in self._due:
                    try:
                        found = _joined([digest.result() for digest in digests])
                    except OSError as trouble:
                        raise unreadable(path, trouble) from trouble
                    _compare(path, what, found, expected)
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)


def _compare(path: Path, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise StoreError(
            f"{path} is damaged: the checksum of {what} is {found}, expected {expected}. Load another copy."
        )


def _joined(digests: Sequence[bytes]) -> str:
    return (digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest())[:_LENGTH]


def _digest(path: Path, ranges: Iterable[Range]) -> bytes:
    """The full digest of parts of a file."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            for low in range(start, stop, _PIECE):
                found.update(_read(file, min(_PIECE, stop - low)))
    return found.digest()


def _read(file: Any, length: int) -> bytes:
    data = file.read(length)
    while len(data) < length:  # an unbuffered read may give less than it was asked for
        more = file.read(length - len(data))
        if not more:
            raise StoreError(f"{file.name} is shorter than expected. Load another copy.")
        data += more
    return data
