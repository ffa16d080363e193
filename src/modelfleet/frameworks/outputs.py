"""Read a model's outputs for a batch as a tree of NumPy arrays `(row, …)`.

Dicts, lists, tuples and named tuples keep their type; dataclasses become dicts of their fields. A list with one
entry per row becomes an array of these entries. Nothing is dropped: an output without rows, such as a number for
the whole batch, is refused by name. A batch may hold rows of several users, and such an output would belong to
none of them.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

Path = tuple[Hashable, ...]
_INTEGERS = (int, np.integer)
_NUMBERS = (bool, int, float, complex, np.bool_, np.number)


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """Number of entries in each part of the outputs for another number of rows."""

    rows: int
    found: Mapping[tuple[bool, Path], int]
    """By (is a list or tuple, path)."""


class Outputs:
    """Reads the outputs of one model, and remembers which of them have one entry per row.

    Args:
        host: Returns a tensor as a NumPy array, a ragged tensor as a list of arrays, and None for anything else.
            Raises InputError for a tensor that has no rows.
        opened: Returns the content of a library's own output object, as a dict or as a single value.
    """

    def __init__(
        self,
        host: Callable[[object], np.ndarray | list[np.ndarray] | None],
        opened: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._host, self._opened = host, opened
        self._by_row: dict[Path, bool] = {}
        self._compared = False

    def of(self, rows: Tree, ask: Callable[[Tree], Tree]) -> Tree:
        """Return what `ask` returns for some rows, as a tree of arrays.

        The first call asks for another number of rows, too. Only that shows whether an output has as many
        entries as rows by chance: a network may return a list of its two layers for a batch of two rows.
        """
        count = len(leaves(rows)[0])
        other = None if self._compared else self._of_another_number(rows, count, ask)
        found = ask(rows)
        read = self._read(found, (), count, other)
        if not leaves(read):
            raise InputError(f"the model gave {found!r} for {count} rows; expected arrays, one answer per row.")
        self._compared = True
        return read

    def _of_another_number(self, rows: Tree, count: int, ask: Callable[[Tree], Tree]) -> _Lengths | None:
        other = count // 2 if count > 1 else 2  # a size for which programs are compiled anyway
        try:
            found = ask(map_tree(lambda leaf: leaf.repeat(2, 0) if count == 1 else leaf[:other], rows))
        except Exception:  # a model may refuse other numbers of rows, and raise anything
            return None
        return _Lengths(other, dict(self._lengths(found, ())))

    def _lengths(self, value: Tree, path: Path) -> Iterator[tuple[tuple[bool, Path], int]]:
        value = self._opened(value)
        if _is_record(value):
            for key, part in _fields(value).items():
                yield from self._lengths(part, (*path, key))
            return
        several = isinstance(value, list | tuple)
        with suppress(Exception):  # many values have no length
            yield (several, path), len(value)
        if several:
            for number, part in enumerate(value):
                yield from self._lengths(part, (*path, number))

    def _read(self, value: Tree, path: Path, count: int, other: _Lengths | None) -> Tree:
        value = self._opened(value)
        if value is None:
            return None
        array = self._array(value, path)
        if isinstance(array, np.ndarray):
            if not _has_rows(array, count) or self._is_by_row(array, path, count, other) is False:
                raise _refused(f"{array.shape}", path, count)
            return array
        if array is not None:
            return _entries(array, path, count)
        if _is_record(value):
            return _record(value, lambda key, part: self._read(part, (*path, key), count, other))
        if isinstance(value, list | tuple):
            by_row = self._is_by_row(value, path, count, other)
            if by_row is None:
                rows = all(_has_rows(self._array(part, path), count) for part in value)
                by_row = len(value) == count and not rows
            if by_row:
                return _entries([self._entry(entry, path) for entry in value], path, count)
            parts = [self._read(part, (*path, n), count, other) for n, part in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        raise _refused(_described(value), path, count)

    def _is_by_row(self, value: Sized, path: Path, count: int, other: _Lengths | None) -> bool | None:
        """Return True if an array or list has one entry per row, and None if that is unknown."""
        size = None if other is None else other.found.get((isinstance(value, list | tuple), path))
        if other is not None and path not in self._by_row and len(value) == count and size in (other.rows, count):
            self._by_row[path] = size == other.rows
        return self._by_row.get(path)

    def _array(self, value: object, path: Path) -> np.ndarray | list[np.ndarray] | None:
        try:
            return self._host(value)
        except InputError as error:
            raise InputError(f"the model gave {_named(path)}{error}") from error

    def _entry(self, value: Tree, path: Path) -> Tree:
        """Return the output for one row, with tensors as NumPy arrays."""
        value = self._opened(value)
        array = self._array(value, path)
        if array is not None:
            return array[()] if isinstance(array, np.ndarray) else array
        if _is_record(value):
            return _record(value, lambda _, part: self._entry(part, path))
        if isinstance(value, list | tuple):
            parts = [self._entry(part, path) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value


def _has_rows(array: object, count: int) -> bool:
    return isinstance(array, np.ndarray) and array.ndim > 0 and len(array) == count


def _is_record(value: object) -> bool:
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return named or isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _fields(value: Tree) -> dict[Hashable, Tree]:
    """Return the parts of a mapping, named tuple or dataclass by name."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # pyrefly: ignore
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _record(value: Tree, read: Callable[[Hashable, Tree], Tree]) -> Tree:
    """Return a record with its parts read; a dataclass becomes a dict."""
    fields = {key: read(key, part) for key, part in _fields(value).items()}
    return type(value)(*fields.values()) if isinstance(value, tuple) else fields


def _entries(values: Sequence[Tree], path: Path, count: int) -> np.ndarray:
    """Return the outputs of single rows as an array `(row,)`."""
    if len(values) != count:
        raise _refused(f"a list of {len(values)} entries", path, count)
    if all(isinstance(value, _NUMBERS) for value in values):
        numbers = np.array(values)
        if numbers.dtype.kind in "fc" and all(isinstance(value, _INTEGERS) for value in values):
            numbers = np.array(values, dtype=object)  # no integer dtype holds them, and floats would round
        return numbers
    found = np.empty(count, dtype=object)
    for number, value in enumerate(values):
        found[number] = value
    return found


def _refused(what: str, path: Path, count: int) -> InputError:
    return InputError(
        f"the model gave {_named(path)}{what} for {count} rows; expected one answer per row, ({count}, …). Give a "
        f"model whose outputs have the rows first, as its inputs do, and leave out what belongs to no row."
    )


def _described(value: object) -> str:
    shown = repr(value)
    return f"a {type(value).__name__}" if len(shown) > 40 else f"{shown} (a {type(value).__name__})"


def _named(path: Path) -> str:
    if not path:
        return ""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return f"{text.removeprefix('.')!r} as "
