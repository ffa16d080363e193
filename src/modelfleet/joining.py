"""Rows of several batches as one: trees of NumPy arrays `(row, …)` joined by their names, without loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from modelfleet.trees import IsLeaf, map_trees


def joined(parts: Sequence[Any], is_leaf: IsLeaf | None = None) -> Any:
    """Trees of arrays as one. Raises `ValueError` if they differ in structure, or can't be joined without loss.

    is_leaf: says which lists are leaves; they are joined as lists.
    """
    return parts[0] if len(parts) == 1 else map_trees(_concatenated, parts, is_leaf)


def alike(parts: Sequence[Any]) -> bool:
    """Return True if trees of arrays have one structure, and of each array one dtype and one shape per row."""
    same: list[bool] = []
    try:
        map_trees(lambda found: same.append(len({(leaf.dtype, leaf.shape[1:]) for leaf in found}) == 1), parts)
    except ValueError:
        return False
    return all(same)


def _concatenated(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return np.concatenate(parts)
    named = " and ".join(sorted(map(str, dtypes)))
    kinds = {dtype.kind for dtype in dtypes}
    if len(kinds) > 1 and kinds & set("SUTV") and "O" not in kinds:  # NumPy would make text of numbers
        raise ValueError(f"they are {named}")
    found = np.concatenate(parts)
    if found.dtype.kind != "O":
        start = 0
        for part in parts:
            own, start = found[start : start + len(part)], start + len(part)
            own = own.real if part.dtype.kind != "c" else own
            if not _same(own.astype(part.dtype), part):
                raise ValueError(f"they are {named}, and as {found.dtype} some would be other numbers")
    return found


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return bool(((left == right) | ((left != left) & (right != right))).all())
