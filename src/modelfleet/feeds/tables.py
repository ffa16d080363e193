"""`by`: cut a table into one data set per member."""

import sys
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from modelfleet.each import Each
from modelfleet.errors import InputError
from modelfleet.unknown_names import unknown

Columns = Hashable | Iterable[Hashable]


def by(table: Any, *, key: str, x: Columns, y: Columns) -> Each:
    """Cut a pandas or polars table into one data set `(x, y)` per member.

        data = mf.by(sales, key="store", x=["price", "weekday"], y="sold")
        fleet = mf.Fleet.build(make_net, list(data.values))
        fleet.fit(data)

    Args:
        table: A pandas or polars DataFrame.
        key: The column whose values are the members' names.
        x: A column, for an array `(row,)`, or a list of columns, for `(row, column)`.
        y: As x.

    Returns:
        An `each` by member name, in the order in which the names first appear. Rows keep their order.

    Raises:
        InputError: If a column does not exist or is not numeric, or a key or value is missing.
    """
    kind = _kind(table)
    known = Counter(table.columns)
    inputs, targets = _listed(x), _listed(y)
    if isinstance(key, list | set | dict) or (isinstance(key, tuple) and key not in known):
        raise InputError(
            f"key is {key!r}; expected the name of one column. To cut by several, join them into one column first."
        )
    for column in (key, *inputs, *targets):
        if not isinstance(column, Hashable):
            raise InputError(f"x or y names {column!r}; expected a column, or a flat list of columns.")
        if column not in known:
            raise unknown("column", column, map(str, known))
        if known[column] > 1:
            raise InputError(f"the table has {known[column]} columns named {column!r}. Rename all but one.")
    if not inputs or not targets:
        raise InputError(f"{'y' if inputs else 'x'} names no columns. Name at least one.")
    if len(table) == 0:
        raise InputError("the table has no rows.")
    cut = _cut_pandas if kind == "pandas" else _cut_polars
    keys, order, lengths = cut(table, key)
    names = [str(value) for value in keys]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"column {key!r} has several values that print as {twice!r}, so they can't be told apart as names. "
            f"Convert them to one type."
        )
    values = {column: _values(table[column], column, table[key], key) for column in (*inputs, *targets)}
    xs, ys = (_joined(values, columns)[order] for columns in (x, y))
    stops = np.cumsum(lengths).tolist()
    starts = [0, *stops[:-1]]
    return Each({n: (xs[low:high], ys[low:high]) for n, low, high in zip(names, starts, stops, strict=True)})


def _kind(table: Any) -> str:
    for kind in ("pandas", "polars"):
        module = sys.modules.get(kind)  # if there is a table, its package is imported
        if module is not None and isinstance(table, module.DataFrame):
            return kind
    raise InputError(f"the table is of type {type(table).__name__}. Give a pandas or polars DataFrame.")


def _listed(columns: Columns) -> list[Hashable]:
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        return [columns]
    return list(columns)


def _joined(values: dict[Hashable, np.ndarray], columns: Columns) -> np.ndarray:
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        return values[columns]
    return np.column_stack([values[column] for column in columns])


def _values(series: Any, column: Hashable, keys: Any, key: str) -> np.ndarray:
    """Return the numbers of one column. Raise `InputError` if one is missing."""
    missing = (series.isna() if hasattr(series, "isna") else series.is_null()).to_numpy()
    values = series.to_numpy()
    if values.dtype.kind in "fc":
        missing = missing | np.isnan(values)
    if missing.any():
        row = int(np.argmax(missing))
        value = keys.iloc[row] if hasattr(keys, "iloc") else keys[row]
        raise InputError(
            f"column {column!r} has a missing value in row {row}, where {key!r} is {str(value)!r}. "
            f"Fill it, or drop the row."
        )
    if values.dtype.kind not in "biufc":
        raise InputError(f"column {column!r} has dtype {series.dtype}. Encode it as numbers.")
    return values


def _cut_pandas(table: Any, key: str) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Return the keys in order of first appearance, the row numbers key by key, and each key's number of rows."""
    import pandas

    codes, keys = pandas.factorize(table[key])
    if (codes < 0).any():
        raise _no_key(key, int(np.argmax(codes < 0)))
    return list(keys), np.argsort(codes, kind="stable"), np.bincount(codes)


def _cut_polars(table: Any, key: str) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Do the same as `_cut_pandas`."""
    import polars

    keys = table[key]
    if keys.dtype.is_float():
        keys = keys.fill_nan(None)
    missing = keys.is_null().to_numpy()
    if missing.any():
        raise _no_key(key, int(np.argmax(missing)))
    rows = polars.DataFrame({"key": table[key], "row": np.arange(len(table))})
    groups = rows.group_by("key", maintain_order=True).agg("row")
    return groups["key"].to_list(), groups["row"].explode().to_numpy(), groups["row"].list.len().to_numpy()


def _no_key(key: str, row: int) -> InputError:
    return InputError(
        f"column {key!r} has no value in row {row}, so the row belongs to no member. Fill or drop it."
    )
