"""Rows of users' data: taken from requests, put together into batches, and the answers cut apart again."""

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.errors import InputError
from modelfleet.replicas.requests import Batch, Request, Slice
from modelfleet.trees import leaves, map_tree, paths, structure


def rows_of(x: Any, user: Hashable) -> tuple[Any, int]:
    """A user's data as a tree of NumPy arrays, and how many rows they have."""
    data = map_tree(lambda leaf: _array(leaf, user), x, _is_rows)
    found = [(path, leaf) for path, leaf in paths(data)]
    if not found:
        raise InputError(f"user {user!r} gave no arrays: {x!r}. Give an array (row, …), or a tree of them.")
    counts = {len(leaf) for _, leaf in found}
    if len(counts) > 1:
        listed = ", ".join(f"{path or 'x'} {leaf.shape}" for path, leaf in found)
        raise InputError(
            f"the arrays of user {user!r} have different numbers of rows: {listed}. Give as many of each."
        )
    return data, counts.pop()


def _is_rows(leaf: Any) -> bool:
    # A list of numbers, or of lists of them, is an array that was not made yet.
    return isinstance(leaf, list) and not any(hasattr(item, "shape") for item in leaves(leaf))


def _array(leaf: Any, user: Hashable) -> np.ndarray:
    try:
        array = frameworks.as_numpy(leaf)
    except InputError as error:
        raise InputError(f"the data of user {user!r}: {error}") from error
    except Exception as error:  # of ragged lists, and whatever else says that it is an array
        raise InputError(f"the data of user {user!r} are no array: {error}. Give rows of one shape.") from error
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


def batch_rows(batch: Any, inputs: Callable[[Any], Any], user: Hashable) -> tuple[Any, int]:
    """The inputs of a batch that a stream gave, as a tree of NumPy arrays, and how many rows they have."""
    if isinstance(batch, list) and not _is_rows(batch):
        batch = tuple(batch)  # [x, y] is (x, y), as a DataLoader means it
    data, rows = rows_of(inputs(batch), user)
    return map_tree(np.array, data), rows  # copies: a loader may write its next batch where this one is


def taken(piece: Slice, data: Any) -> Any:
    """The rows of a slice; `data` are its request's."""
    return map_tree(lambda leaf: leaf[piece.start : piece.stop], data)


def by_form(batch: Batch) -> list[tuple[Slice, ...]]:
    """The slices of a batch, those together whose rows have one form and can be one array."""
    if len(batch.slices) == 1:
        return [batch.slices]
    groups: dict[Any, list[Slice]] = {}
    for piece in batch.slices:
        groups.setdefault(form(piece.request), []).append(piece)
    return [tuple(group) for group in groups.values()]


def form(request: Request) -> Any:
    """What tells whether rows of two requests can be one array."""
    if request.form is None:
        shapes = tuple((leaf.dtype, leaf.shape[1:]) for leaf in leaves(request.data))
        request.form = structure(request.data), shapes
    return request.form


def _copied(leaf: np.ndarray) -> np.ndarray:
    # An array of objects, deep: they may hold arrays whose memory is written again.
    return copy.deepcopy(leaf) if leaf.dtype == object else np.array(leaf)


def parted(parts: Sequence[tuple[int, int, Any]], batch: Batch) -> list[tuple[Slice, Any]]:
    """The outputs for rows of a batch, (start, stop, outputs), by slices of these rows.

    They are copied: each user has memory of their own.
    """
    found: list[tuple[Slice, Any]] = []
    pieces = iter(batch.slices)
    piece, first = next(pieces), 0  # a slice, and the position of its first row in the batch
    for begin, end, outputs in parts:
        at = begin
        while at < end:
            while first + piece.rows <= at:
                first += piece.rows
                piece = next(pieces)
            stop = min(end, first + piece.rows)
            whole = at == first and stop == first + piece.rows
            rows = piece if whole else Slice(piece.request, piece.start + at - first, piece.start + stop - first)
            a, b = at - begin, stop - begin
            found.append((rows, map_tree(lambda leaf, a=a, b=b: _copied(leaf[a:b]), outputs)))
            at = stop
    return found
