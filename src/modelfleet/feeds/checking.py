"""Checks of a user's data, before anything is placed on a device."""

from typing import TypeAlias

import numpy as np

from modelfleet.errors import InputError, refuse_masked
from modelfleet.feeds._base import ArrayOperations
from modelfleet.trees import paths, rebuild
from modelfleet.types import Data, Tensor, Tree

RowSpec: TypeAlias = tuple[tuple[str, tuple[int, ...], str], ...]
"""Path, shape of a row and dtype of every leaf."""
FORMS = {2: "(x, y)", 3: "(x, y, sample_weight)"}


def as_arrays(tree: Data, arrays: ArrayOperations, label: str) -> tuple[Tree, int]:
    """Return `tree` with an array at every leaf, and its number of rows.

    Lists of numbers become arrays, and tables lose their labels. [x, y] is (x, y), as a DataLoader means it.

    Args:
        tree: A user's arrays.
        arrays: The operations of the framework that will compute with them.
        label: A name for the data in errors, such as "data of member 'm07'".

    Raises:
        InputError: If a leaf is not an array, or the arrays do not have the same number of rows.
    """
    if isinstance(tree, list) and not is_number_list(tree):
        tree = tuple(tree)
    found = paths(tree, is_number_list)
    if not found:
        raise InputError(f"{label} holds no arrays. Give arrays with one row per example, such as (x, y).")
    values = [_as_array(leaf, arrays, f"{label}: {path or 'the array'}") for path, leaf in found]
    rows = arrays.size(values[0])
    for (path, _), value in zip(found, values, strict=True):
        if arrays.size(value) != rows:
            raise InputError(
                f"{label}: {path} has {arrays.size(value)} rows, but {found[0][0]} has {rows}. "
                f"Every array needs one row per example."
            )
    if rows == 0:
        raise InputError(f"{label} has no rows. Give at least one, or leave the member out.")
    return rebuild(tree, values, is_number_list), rows


def form_of(data: Data) -> str:
    """Return the parts of a batch in words: (x, y), or with sample weights (x, y, sample_weight)."""
    return FORMS.get(len(data), f"{len(data)} parts") if isinstance(data, tuple | list) else "x"


def row_spec(tree: Tree) -> RowSpec:
    """Return the path, the shape of a row and the dtype of every leaf of a tree of tensors."""
    return tuple((path, tuple(leaf.shape[1:]), str(leaf.dtype)) for path, leaf in paths(tree))


def describe_difference(found: RowSpec, expected: RowSpec) -> str:
    """Describe the first difference between two unequal specs."""
    for (path, shape, dtype), (other_path, other_shape, other_dtype) in zip(found, expected, strict=False):
        if path != other_path:
            break
        if shape != other_shape:
            return f"a row of {path or 'the array'} is {shape}, expected {other_shape}"
        if dtype != other_dtype:
            return f"{path or 'the array'} is {dtype}, expected {other_dtype}"
    here, there = (", ".join(path or "one array" for path, *_ in spec) for spec in (found, expected))
    return f"it holds {here}, expected {there}"


def is_number_list(value: object) -> bool:
    """Return True for a list of numbers or strings, nested or not, judging by its first item."""
    if not isinstance(value, list):
        return False
    first: object = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, bool | int | float | complex | str | bytes | np.generic)


def _as_array(leaf: Data, arrays: ArrayOperations, label: str) -> Tensor:
    if isinstance(leaf, list):
        try:
            leaf = np.asarray(leaf)
        except ValueError as error:
            raise InputError(
                f"{label} is a list whose rows differ in length. Pad them to one length, and give an array."
            ) from error
    elif hasattr(leaf, "to_numpy"):  # pandas and polars
        leaf = leaf.to_numpy()
    try:
        refuse_masked(leaf)
    except InputError as error:
        raise InputError(f"{label}: {error}") from error
    if not arrays.is_array(leaf):
        raise InputError(f"{label} is of type {type(leaf).__name__}. Give an array with one row per example.")
    takes_strings = getattr(arrays, "STRINGS", False)
    if (
        isinstance(leaf, np.ndarray)
        and leaf.dtype.kind not in "biufc"
        and not (takes_strings and _are_strings(leaf))
    ):
        raise InputError(
            f"{label} has dtype {leaf.dtype}, which no device computes with. Encode it as numbers, "
            f"with rows of one length."
        )
    if len(leaf.shape) == 0:
        raise InputError(
            f"{label} is a single number. Give an array with one row per example. A list of rows is taken as a "
            f"list of batches: stack the rows into arrays, or put them into a loader."
        )
    return leaf


def _are_strings(array: np.ndarray) -> bool:
    return array.dtype.kind in "US" or (
        array.dtype.kind == "O" and all(isinstance(item, str | bytes) for item in array.flat)
    )
