"""Rows of users' data: checked, put together into batches, and the answers cut apart again."""

import copy
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.conversions import as_numpy
from modelfleet.replicas.requests import Layout, Request, RowBatch, RowSpan
from modelfleet.trees import leaves, map_tree, paths, structure
from modelfleet.types import Tree

Part = tuple[int, int, Tree]
"""Outputs for the rows `start` to `stop` - 1 of a batch: (start, stop, outputs)."""


def rows_of(x: Tree, user: Hashable) -> tuple[Tree, int]:
    """Return a user's data as a tree of NumPy arrays, and the number of rows.

    Raises:
        InputError: If `x` has no arrays, or arrays of different lengths, or something else in it.
    """
    data = map_tree(lambda leaf: _array(leaf, user), x, _is_list_of_rows)
    found = list(paths(data))
    if not found:
        raise InputError(f"user {user!r} gave no arrays: {x!r}. Give an array (row, …), or a tree of them.")
    counts = {len(leaf) for _, leaf in found}
    if len(counts) > 1:
        listed = ", ".join(f"{path or 'x'} {leaf.shape}" for path, leaf in found)
        raise InputError(
            f"the arrays of user {user!r} have different numbers of rows: {listed}. Give the same number of each."
        )
    return data, counts.pop()


def _is_list_of_rows(leaf: Tree) -> bool:
    # A list of numbers, or of lists of them, stands for an array.
    return isinstance(leaf, list) and not any(hasattr(item, "shape") for item in leaves(leaf))


def _array(leaf: Tree, user: Hashable) -> np.ndarray:
    try:
        array = as_numpy(leaf)
    except InputError as error:
        raise InputError(f"the data of user {user!r}: {error}") from error
    except Exception as error:  # of ragged lists, and of anything that claims to be an array
        raise InputError(
            f"the data of user {user!r} can't be made an array: {error}. Give rows of one shape."
        ) from error
    if array.ndim == 0 and (callable(leaf) or hasattr(leaf, "__iter__")) and not isinstance(leaf, str | bytes):
        raise InputError(
            f"user {user!r} gave a {type(leaf).__name__}, which has to be read batch by batch; expected arrays "
            f"with the rows first, (row, …). Submit its batches one by one, or give it to mf.map or mf.imap as "
            f"this user's data."
        )
    if array.dtype == object and array.ndim and all(isinstance(one, str) for one in array.flat):
        return array.astype(str)
    if array.dtype == object or array.ndim == 0:
        raise InputError(
            f"user {user!r} gave a {type(leaf).__name__} of {array.dtype} and shape {array.shape}; expected "
            f"numbers with the rows first, (row, …). For one row x, give x[None]."
        )
    return array


def rows_of_batch(batch: Tree, inputs: Callable[[Tree], Tree], user: Hashable) -> tuple[Tree, int]:
    """Return the inputs of a stream's batch as a tree of NumPy arrays, and the number of rows."""
    if isinstance(batch, list) and not _is_list_of_rows(batch):
        batch = tuple(batch)  # [x, y] means (x, y), as from a DataLoader
    data, rows = rows_of(inputs(batch), user)
    return map_tree(np.array, data), rows  # copied, as a loader may write its next batch to the same memory


def rows_of_span(span: RowSpan, data: Tree) -> Tree:
    """Return the rows of a span, given its request's data."""
    return map_tree(lambda leaf: leaf[span.start : span.stop], data)


def group_by_layout(batch: RowBatch) -> list[tuple[RowSpan, ...]]:
    """Return the spans of a batch in groups whose rows can be one array."""
    if len(batch.spans) == 1:
        return [batch.spans]
    groups: dict[Layout, list[RowSpan]] = {}
    for span in batch.spans:
        groups.setdefault(layout_of(span.request), []).append(span)
    return [tuple(group) for group in groups.values()]


def layout_of(request: Request) -> Layout:
    """Return the layout of a request's rows. Rows of equal layouts can be one array."""
    if request.layout is None:
        shapes = tuple((leaf.dtype, leaf.shape[1:]) for leaf in leaves(request.data))
        request.layout = structure(request.data), shapes
    return request.layout


def split_outputs(parts: Sequence[Part], batch: RowBatch) -> list[tuple[RowSpan, Tree]]:
    """Cut the outputs for rows of a batch apart, by the spans of these rows.

    They are copied, so that each user has memory of their own.
    """
    found: list[tuple[RowSpan, Tree]] = []
    spans = iter(batch.spans)
    span, first = next(spans), 0  # a span, and the position of its first row in the batch
    for begin, end, outputs in parts:
        position = begin
        while position < end:
            while first + span.rows <= position:
                first += span.rows
                span = next(spans)
            stop = min(end, first + span.rows)
            offset = span.start - first  # from positions in the batch to rows of the request
            whole = position == first and stop == first + span.rows
            rows = span if whole else RowSpan(span.request, position + offset, stop + offset)
            a, b = position - begin, stop - begin
            found.append((rows, map_tree(lambda leaf, a=a, b=b: _copy(leaf[a:b]), outputs)))
            position = stop
    return found


def _copy(leaf: np.ndarray) -> np.ndarray:
    # Objects are copied deeply: they may hold arrays whose memory is overwritten.
    return copy.deepcopy(leaf) if leaf.dtype == object else np.array(leaf)
