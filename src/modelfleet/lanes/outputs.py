"""Outputs of `predict`: a member's rows of all batches, joined into one array."""

from collections.abc import Sequence

import numpy as np

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.joining import joined
from modelfleet.trees import map_tree, paths
from modelfleet.types import Tree

_ROW_BY_ROW = (
    "predict joins the outputs of batches row by row. Have the model return only what has one row for each input, "
    "or call fleet[name] yourself."
)


def slot_rows(outputs: Tree, index: slice | np.ndarray, name: str, count: int, size: int) -> Tree:
    """Return the real rows of some slots in the outputs of a batch: arrays `(slot, row, …)`.

    Args:
        outputs: NumPy arrays `(slot, row, …)` of all slots.
        index: The slots, with equally many real rows.
        name: The name of the first slot's member.
        count: The number of real rows, which come before the padding.
        size: The number of rows in the batch, with padding.

    Raises:
        InputError: Some output does not have one row for each input.
    """
    for path, leaf in paths(outputs):
        if leaf.ndim < 2:
            raise InputError(
                f"member {name!r}: a part of the output is a single number for a batch of {size} rows. "
                f"{_ROW_BY_ROW}"
            )
        if leaf.shape[1] not in (size, count):
            raise InputError(
                f"member {name!r}: {_output(path)} has the shape {leaf.shape[1:]} for a batch of {size} rows. "
                f"{_ROW_BY_ROW}"
            )
    return map_tree(lambda leaf: leaf[index, :count], outputs)


def join_batches(name: str, parts: Sequence[Tree]) -> Tree:
    """Return a member's outputs for all batches as one tree of arrays.

    Raises:
        InputError: The outputs of two batches have different shapes or structures.
    """
    shapes = [{path: tuple(leaf.shape[1:]) for path, leaf in paths(part)} for part in parts]
    for other in shapes:
        for path, first in shapes[0].items():
            shape = other.get(path, first)
            if shape != first:
                raise InputError(
                    f"member {name!r}: a row of {_output(path)} is {first} in one batch and {shape} in another, "
                    f"which can't be one array. Pad the inputs to one length, or predict one length at a time."
                )
    try:
        return joined(parts)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"member {name!r}: its outputs for {len(parts)} batches can't be joined: {without_period(error)}. "
            f"Let the model return the same tree of arrays for every batch."
        ) from error


def _output(path: str) -> str:
    return f"{path} of the output" if path else "the output"
