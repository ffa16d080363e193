"""What a model gave for a batch, as a tree of NumPy arrays `(row, …)`: nothing of it is dropped.

Dicts, lists, tuples and named tuples stay what they are; dataclasses come out as dicts of their fields. A list
with one entry per row becomes an array of these entries. What has no rows, such as a number for the whole batch,
is refused by its name: a batch may hold the rows of several users, and nobody could say whose it is.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.trees import leaves, map_tree

Path = tuple[Any, ...]
_WHOLE = (int, np.integer)
_NUMBERS = (bool, int, float, complex, np.bool_, np.number)


class Outputs:
    """Reads the outputs of one model, and remembers which of its arrays and lists have one entry per row.

    host: gives the NumPy array of a tensor, a list of arrays of a ragged one, and None of what is no tensor;
        raises `InputError` for one that can't be told row by row.
    opened: what an object of a library holds, as a dict or as the one value that is meant.
    """

    def __init__(
        self,
        host: Callable[[Any], np.ndarray | list[Any] | None],
        opened: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._host, self._opened = host, opened
        self._by_row: dict[Path, bool] = {}

    def read(self, found: Any, rows: Any, ask: Callable[[Any], Any]) -> Any:
        """The outputs that `ask` found for rows, as a tree of arrays.

        The first time it is asked once more, for another number of rows: only that tells whether as many entries
        as rows are chance, as of the two layers of a network that was asked for two rows.
        """
        count = len(leaves(rows)[0])
        other = count // 2 if count > 1 else 2  # a size that programs are compiled for, too

        @cache
        def again() -> Any:
            return ask(map_tree(lambda leaf: leaf.repeat(2, 0) if count == 1 else leaf[:other], rows))

        read = self._read(found, (), count, other, again)
        if not leaves(read):
            raise InputError(f"the model gave {found!r} for {count} rows; expected arrays, one answer per row.")
        return read

    def _read(self, value: Any, path: Path, count: int, other: int, again: Callable[[], Any]) -> Any:
        value = self._opened(value)
        if value is None:
            return None
        array = self._array(value, path)
        if isinstance(array, np.ndarray):
            if not _has_rows(array, count) or not self._is_by_row(array, path, other, again):
                raise _refused(f"{array.shape}", path, count)
            return array
        if array is not None:
            return _entries(array, path, count)
        if _is_record(value):
            return _record(value, lambda key, part: self._read(part, (*path, key), count, other, again))
        if isinstance(value, list | tuple):
            if self._has_entry_per_row(value, path, count, other, again):
                return _entries([self._entry(entry, path) for entry in value], path, count)
            parts = [self._read(part, (*path, n), count, other, again) for n, part in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        raise _refused(_described(value), path, count)

    def _array(self, value: Any, path: Path) -> np.ndarray | list[Any] | None:
        try:
            return self._host(value)
        except InputError as error:
            raise InputError(f"the model gave {_named(path)}{error}") from error

    def _entry(self, value: Any, path: Path) -> Any:
        """What a row was given, with NumPy's arrays for tensors."""
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

    def _has_entry_per_row(
        self, value: Sequence[Any], path: Path, count: int, other: int, again: Callable[[], Any]
    ) -> bool:
        if path in self._by_row or len(value) != count:
            return self._by_row.get(path, False)
        return self._is_by_row(value, path, other, again)

    def _is_by_row(self, value: Any, path: Path, other: int, again: Callable[[], Any]) -> bool:
        """Whether what has as many entries as there are rows has them for the rows."""
        if path not in self._by_row:
            try:
                there = self._at(again(), path)
                array = self._array(there, path)
                found = len(there if array is None else array)
            except Exception:  # a model may refuse other numbers of rows, and raise anything
                lists = isinstance(value, list | tuple)
                return not lists or not all(_has_rows(self._array(part, path), len(value)) for part in value)
            self._by_row[path] = found == other
        return self._by_row[path]

    def _at(self, found: Any, path: Path) -> Any:
        for key in path:
            found = self._opened(found)
            if not _is_record(found) and not isinstance(found, list | tuple):
                raise LookupError(f"there is no {key!r} in it")
            found = _fields(found)[key] if _is_record(found) else found[key]
        return self._opened(found)


def _has_rows(array: Any, count: int) -> bool:
    return isinstance(array, np.ndarray) and array.ndim > 0 and len(array) == count


def _is_record(value: Any) -> bool:
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return named or isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _fields(value: Any) -> dict[Any, Any]:
    """The parts of a mapping, named tuple or dataclass by name."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # pyrefly: ignore
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _record(value: Any, read: Callable[[Any, Any], Any]) -> Any:
    """The same with its parts read; a dataclass as a dict."""
    fields = {key: read(key, part) for key, part in _fields(value).items()}
    return type(value)(*fields.values()) if isinstance(value, tuple) else fields


def _entries(values: Sequence[Any], path: Path, count: int) -> np.ndarray:
    """An array `(row,)` of what each row was given."""
    if len(values) != count:
        raise _refused(f"a list of {len(values)} entries", path, count)
    if all(isinstance(value, _NUMBERS) for value in values):
        numbers = np.array(values)
        if numbers.dtype.kind in "fc" and all(isinstance(value, _WHOLE) for value in values):
            numbers = np.array(values, dtype=object)  # no integer dtype holds them all, and floats not exactly
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


def _described(value: Any) -> str:
    shown = repr(value)
    return f"a {type(value).__name__}" if len(shown) > 40 else f"{shown} (a {type(value).__name__})"


def _named(path: Path) -> str:
    if not path:
        return ""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return f"{text.removeprefix('.')!r} as "
