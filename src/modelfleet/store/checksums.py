"""Checksums of files and of ranges of them, which detect damage.

A checksum is the first 128 bits of SHA-256. Most processors have instructions for it, which make it several times
as fast as BLAKE2; and hashing releases Python's lock. Anything longer than a block is hashed block by block in
several threads. Its checksum is the checksum of the blocks' digests.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from modelfleet.errors import StoreError
from modelfleet.store.header import Header, Range, unreadable

BLOCK = 1 << 24  # bytes
_READ_SIZE = 1 << 20  # bytes read at once
_THREADS = min(4, os.cpu_count() or 1)
_DIGITS = 32  # hexadecimal digits of a checksum


def checksum_of(data: bytes) -> str:
    """Return the checksum of bytes in memory."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def blocks_of(ranges: Iterable[Range]) -> list[list[Range]]:
    """Return the ranges to hash at once: all together if they are short, else one block at a time."""
    everything = list(ranges)
    if sum(stop - start for start, stop in everything) <= BLOCK:
        return [everything]
    return [[(low, min(low + BLOCK, stop))] for start, stop in everything for low in range(start, stop, BLOCK)]


def checksum(path: Path, ranges: Iterable[Range]) -> str:
    """Return the checksum of ranges of a file, one after the other."""
    blocks = blocks_of(ranges)
    if len(blocks) == 1:
        return _joined([_digest(path, blocks[0])])
    with ThreadPoolExecutor(_THREADS) as pool:
        return _joined(list(pool.map(lambda block: _digest(path, block), blocks)))


def row_checksums(path: Path, header: Header, rows: range) -> list[str]:
    """Return a checksum for each row in a range without gaps: one for this row of all tensors of a file."""
    if not rows:
        return []
    if _row_bytes(header) > BLOCK:
        return [checksum(path, header.row(row)) for row in rows]
    # In one pass over the file, since there may be many rows of a few bytes each.
    sums = [hashlib.sha256() for _ in rows]
    with path.open("rb", buffering=0) as file:
        for start, stop in header.ranges.values():
            length = (stop - start) // header.rows
            together = max(1, _READ_SIZE // max(1, length))
            file.seek(start + rows.start * length)
            for first in range(0, len(rows), together):
                last = min(len(rows), first + together)
                data = memoryview(_read(file, (last - first) * length))
                for row in range(first, last):
                    sums[row].update(data[(row - first) * length : (row - first + 1) * length])
    return [digest.hexdigest()[:_DIGITS] for digest in sums]


class Checks:
    """Checks of ranges of files against their checksums: short ones at once, long ones in background threads.

    Leaving the `with` block waits for all of them, and raises `StoreError` for the first that fails.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[tuple[Path, str, str, list[Future[bytes]]]] = []

    def add(self, path: Path, what: str, ranges: Sequence[Range], expected: str) -> None:
        """Check that these ranges of a file have the expected checksum; `what` names them in the error."""
        blocks = blocks_of(ranges)
        if sum(stop - start for start, stop in ranges) <= _READ_SIZE:
            _compare(path, what, _joined([_digest(path, block) for block in blocks]), expected)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS)
        digests = [self._pool.submit(_digest, path, block) for block in blocks]
        self._pending.append((path, what, expected, digests))

    def add_rows(self, path: Path, header: Header, expected: Sequence[str], start: int, stop: int) -> None:
        """Check some rows of a file, given the expected checksums of all rows."""
        rows = range(start, stop)
        if _row_bytes(header) > _READ_SIZE:
            for row in rows:
                self.add(path, f"row {row}", header.row(row), expected[row])
            return
        for row, found in zip(rows, row_checksums(path, header, rows), strict=True):
            _compare(path, f"row {row}", found, expected[row])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Damage explains any other exception better, except for those such as KeyboardInterrupt.
            if error is None or isinstance(error, Exception):
                for path, what, expected, digests in self._pending:
                    try:
                        found = _joined([digest.result() for digest in digests])
                    except OSError as problem:
                        raise unreadable(path, problem) from problem
                    _compare(path, what, found, expected)
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)


def _row_bytes(header: Header) -> int:
    return sum(stop - start for start, stop in header.row(0)) if header.rows else 0


def _compare(path: Path, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise StoreError(
            f"{path} is damaged: the checksum of {what} is {found}, expected {expected}. Load another copy."
        )


def _joined(digests: Sequence[bytes]) -> str:
    return (digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest())[:_DIGITS]


def _digest(path: Path, ranges: Iterable[Range]) -> bytes:
    """Return the full digest of ranges of a file."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            for low in range(start, stop, _READ_SIZE):
                found.update(_read(file, min(_READ_SIZE, stop - low)))
    return found.digest()


def _read(file: IO[bytes], length: int) -> bytes:
    data = file.read(length)
    while len(data) < length:  # an unbuffered read may return less than requested
        more = file.read(length - len(data))
        if not more:
            raise StoreError(f"{file.name} is shorter than expected. Load another copy.")
        data += more
    return data
