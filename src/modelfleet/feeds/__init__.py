"""Feeds: the streams of batches that lanes are fed with, made from whatever data a user has."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from modelfleet.each import Each, per_member, refuse_list
from modelfleet.errors import InputError
from modelfleet.feeds._base import Arrays, Batch, Feed, is_number_list, settle
from modelfleet.feeds.arrays import ArrayFeed
from modelfleet.feeds.loaders import LoaderFeed
from modelfleet.feeds.reading import SharedLoader

__all__ = ["ArrayFeed", "Arrays", "Batch", "Feed", "LoaderFeed", "SharedLoader", "is_loader", "make_feed"]

DEFAULT_BATCH_SIZE = 32


def make_feed(
    data: Any,
    *,
    names: Sequence[str],
    seeds: Sequence[int] | np.ndarray,
    batch_size: int | Each | None,
    shuffle: bool,
    device: Any,
    arrays: Arrays,
    epochs_done: np.ndarray | None = None,
    what: str = "data",
    going_on: int | None = None,
) -> Feed:
    """The feed of the members `names` for `data`: one value for all of them, or `each(...)`.

    An array, a tuple or a mapping is arrays. So is a list of numbers or of arrays; a list of tuples, mappings
    or lists of arrays is one of batches. Any other iterable, and a function that returns one, is a loader.
    `epochs_done` `(member,)` is what each member's own shuffles count on from. With `going_on`, epochs of arrays
    have so many steps, and each goes on where the last one stopped.
    """
    values = per_member(data, names, what)
    own = isinstance(data, Each)
    wheres = [f"{what} of member {name!r}" for name in names] if own else [what] * len(names)
    loads = {id(value): is_loader(value, arrays, where) for value, where in zip(values, wheres, strict=True)}
    kinds = [loads[id(value)] for value in values]

    if not any(kinds):
        settled: dict[int, tuple[Any, int]] = {}
        for value, where in zip(values, wheres, strict=True):
            if id(value) not in settled:
                settled[id(value)] = settle(value, arrays, where)
        return ArrayFeed(
            [settled[id(value)] for value in values],
            wheres=wheres,
            seeds=np.asarray(seeds, dtype=np.int64),
            batch_sizes=_batch_sizes(batch_size, names),
            shuffle=shuffle,
            device=device,
            arrays=arrays,
            epochs_done=np.zeros(len(names), dtype=np.int64) if epochs_done is None else epochs_done.copy(),
            going_on=going_on,
        )
    if not all(kinds):
        raise InputError(
            f"{wheres[kinds.index(True)]} is a loader, but {wheres[kinds.index(False)]} is arrays. "
            f"Give all members the same kind of data."
        )
    if batch_size is not None:
        raise InputError(
            f"{what} is a loader, which decides the size of its batches itself. "
            f"Leave batch_size out, or set it in the loader."
        )
    if not own:
        values = values[0] if isinstance(values[0], SharedLoader) else SharedLoader(values[0], what)
    return LoaderFeed(values, wheres=wheres, device=device, arrays=arrays)


def is_loader(data: Any, arrays: Arrays, where: str) -> bool:
    """Whether `data` yields batches, as against being arrays. Raises where it is neither."""
    if isinstance(data, SharedLoader):
        return True
    if arrays.is_array(data) or isinstance(data, tuple | Mapping):
        return False
    if isinstance(data, list):
        return bool(data) and not is_number_list(data) and all(isinstance(x, list | tuple | Mapping) for x in data)
    if isinstance(data, Iterator):
        raise InputError(
            f"{where} is of type {type(data).__name__}, which can be read only once. "
            f"Every epoch reads its data anew: instead of an iterator, pass a function that returns one."
        )
    if callable(data) or (hasattr(data, "__iter__") and not isinstance(data, str | bytes)):
        return True
    raise InputError(
        f"{where} is of type {type(data).__name__}. Give arrays such as (x, y), a loader of batches "
        f"(a torch Dataset goes into a DataLoader), or a function that returns an iterator of batches."
    )


def _batch_sizes(batch_size: int | Each | None, names: Sequence[str]) -> np.ndarray:
    """`(member,)`: the rows that each member takes a step."""
    refuse_list(batch_size, "batch_size", names)
    sizes = per_member(DEFAULT_BATCH_SIZE if batch_size is None else batch_size, names, "batch_size")
    for name, size in zip(names, sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            whose = f"batch_size of member {name!r}" if isinstance(batch_size, Each) else "batch_size"
            raise InputError(f"{whose} is {size!r}. Give a whole number of rows, 1 or more.")
    return np.asarray(sizes, dtype=np.int64)
