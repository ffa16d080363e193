"""Joining batches: trees of NumPy arrays `(row, …)` become one tree, without loss."""

from collections.abc import Sequence

import numpy as np

from modelfleet.trees import IsLeaf, map_trees
from modelfleet.types import Tree


def joined(parts: Sequence[Tree], is_leaf: IsLeaf | None = None) -> Tree:
    """Return trees of arrays joined along their rows.

    Args:
        parts: Trees of one structure.
        is_leaf: Returns True for lists that are leaves, which are joined as lists.

    Raises:
        ValueError: If the trees differ in structure, or joining would change a number.
    """
    return parts[0] if len(parts) == 1 else map_trees(_concatenated, parts, is_leaf)


def alike(parts: Sequence[Tree]) -> bool:
    """Return True if trees of arrays have the same structure, dtypes and shapes of rows."""
    same: list[bool] = []
    try:
        map_trees(lambda found: same.append(len({(leaf.dtype, leaf.shape[1:]) for leaf in found}) == 1), parts)
    except ValueError:
        return False
    return all(same)


def _concatenated(parts: list[Tree]) -> Tree:
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return np.concatenate(parts)
    named = " and ".join(sorted(map(str, dtypes)))
    kinds = {dtype.kind for dtype in dtypes}
    if len(kinds) > 1 and kinds & set("SUTV") and "O" not in kinds:  # NumPy would turn the numbers into text
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
