"""Prediction for some members of a lane, each on its own rows or all on the same, in as few calls as possible.

The numbers of members and of rows are padded to powers of two. So under load, when every call has other
members and other numbers of rows, only a few sizes are ever traced.
"""

from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Engine
from modelfleet.trees import leaves, map_tree, map_trees, structure
from modelfleet.types import NativeDevice, Tree


def predict_rows(engine: Engine, arrays: ModuleType, positions: Sequence[int], rows: Sequence[Tree]) -> list[Tree]:
    """Return the outputs of some members, each on its own rows.

    Args:
        engine: The engine of the members' lane.
        arrays: The module `arrays` of the members' adapter.
        positions: The members' positions in the lane.
        rows: For each member, a tree of NumPy arrays `(row, …)` with one row or more. If all members have one and
            the same tree, its rows are put on the device once.

    Returns:
        For each member a tree of NumPy arrays as its model gives it, `(row, …)` where the output has a row for
        each input. They equal the outputs of the member alone on these rows.
    """
    forms: dict[Hashable, list[int]] = {}
    for number, tree in enumerate(rows):
        form = structure(tree), tuple((leaf.dtype.str, leaf.shape[1:]) for leaf in leaves(tree))
        forms.setdefault(form, []).append(number)
    found: dict[int, Tree] = {}
    for numbers in forms.values():
        counts = np.array([len(leaves(rows[number])[0]) for number in numbers])
        size = bucket(int(counts.max()))
        if (counts == size).all() or _independent(engine, arrays, [rows[number] for number in numbers], size):
            groups = [(numbers, size)]
        else:  # rows that influence each other must not be padded
            sizes = np.unique(counts).tolist()
            groups = [([n for n, c in zip(numbers, counts, strict=True) if c == size], size) for size in sizes]
        for own, size in groups:
            outputs = _predict(engine, arrays, [positions[n] for n in own], [rows[n] for n in own], size)
            found.update(zip(own, outputs, strict=True))
    return [found[number] for number in range(len(rows))]


def bucket(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _predict(
    engine: Engine, arrays: ModuleType, positions: Sequence[int], rows: Sequence[Tree], size: int
) -> list[Tree]:
    """Return the outputs of members on rows of one form, padded to `size`."""
    more = bucket(len(rows)) - len(rows)
    counts = np.array([*(len(leaves(tree)[0]) for tree in rows), *[0] * more])
    shared = len(rows) > 1 and all(tree is rows[0] for tree in rows)
    data = _stacked(arrays, rows[:1] if shared else [*rows, *[rows[0]] * more], size, engine.device)
    batch = Batch(_first(data) if shared else data, shared, counts)
    outputs = engine.predict(batch, [*positions, *[positions[0]] * more])

    def own(leaf: np.ndarray, number: int) -> np.ndarray:
        by_row = leaf.ndim > 1 and leaf.shape[1] == size
        return leaf[number, : counts[number]] if by_row else leaf[number]

    return [map_tree(lambda leaf, number=number: own(leaf, number), outputs) for number in range(len(rows))]


def _independent(engine: Engine, arrays: ModuleType, rows: Sequence[Tree], size: int) -> bool:
    longest = max(rows, key=lambda tree: len(leaves(tree)[0]))
    return engine.rows_are_independent(_first(_stacked(arrays, [longest], size, engine.device)))


def _first(data: Tree) -> Tree:
    return map_tree(lambda leaf: leaf[0], data)


def _stacked(arrays: ModuleType, rows: Sequence[Tree], size: int, device: NativeDevice) -> Tree:
    """Return rows of several members as tensors `(member, size, …)`. Padding repeats a member's first row."""

    def padded(leaf: np.ndarray) -> np.ndarray:
        return leaf if len(leaf) == size else np.concatenate([leaf, np.repeat(leaf[:1], size - len(leaf), 0)])

    return map_trees(lambda found: arrays.place(np.stack([padded(leaf) for leaf in found]), device), rows)


def refuse_unequal_rows(rows: Mapping[str, Tree]) -> None:
    """Raise InputError if a member has no rows, or its arrays have different numbers of rows."""
    for name, tree in rows.items():
        lengths = {len(leaf) for leaf in leaves(tree)}
        if len(lengths) != 1 or 0 in lengths:
            raise InputError(
                f"member {name!r}: its arrays have {sorted(lengths)} rows; expected the same number for all, "
                f"and one at least. Give each member the rows that it is to predict, or leave the member out."
            )
