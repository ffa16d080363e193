"""Feeds: the streams of batches that lanes are fed with, made from whatever data a user has."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from modelfleet.each import Each, per_member, refuse_list
from modelfleet.errors import InputError
from modelfleet.feeds._base import ArrayOperations, Batch, Feed
from modelfleet.feeds.arrays import ArrayFeed
from modelfleet.feeds.checking import is_number_list
from modelfleet.feeds.loaders import LoaderFeed
from modelfleet.feeds.reading import SharedLoader
from modelfleet.feeds.stored import StoredArrays
from modelfleet.types import Data, NativeDevice

__all__ = ["ArrayFeed", "ArrayOperations", "Batch", "Feed", "LoaderFeed", "SharedLoader", "StoredArrays"]
__all__ += ["is_loader", "make_feed"]

DEFAULT_BATCH_SIZE = 32


def make_feed(
    data: Data,
    *,
    names: Sequence[str],
    seeds: Sequence[int] | np.ndarray,
    batch_size: int | Each | None,
    shuffle: bool,
    device: NativeDevice,
    arrays: ArrayOperations,
    epochs_done: np.ndarray | None = None,
    what: str = "data",
    steps_per_epoch: np.ndarray | None = None,
    stored: StoredArrays | None = None,
) -> Feed:
    """Return the feed for some members.

    An array, a tuple or a mapping is arrays. So is a list of numbers or of arrays; a list of tuples, mappings
    or lists of arrays is one of batches. Any other iterable, and a function that returns one, is a loader.

    Args:
        data: One value for all members, or `each(...)`.
        names: The members.
        seeds: `(member,)`: the seed of each member's shuffles.
        batch_size: Rows per step, for arrays only; one value or `each(...)`.
        shuffle: Shuffle each member's rows, in a new order every epoch. For arrays only.
        device: The device that the batches go to.
        arrays: The array operations of the members' framework.
        epochs_done: `(member,)`: how many epochs of shuffles each member has used before.
        what: The name of the argument that the data were given for, for errors.
        steps_per_epoch: `(member,)`: end each epoch of arrays after this many steps. The next one starts with the
            next row.
        stored: What this verb has stored already; None if it makes no other feed.

    Raises:
        InputError: If the data are neither arrays nor a loader, or the arguments do not fit them.
    """
    values = per_member(data, names, what)
    own = isinstance(data, Each)
    labels = [f"{what} of member {name!r}" for name in names] if own else [what] * len(names)
    loads = {id(value): is_loader(value, arrays, label) for value, label in zip(values, labels, strict=True)}
    kinds = [loads[id(value)] for value in values]

    if not any(kinds):
        stored = stored or StoredArrays()
        return ArrayFeed(
            [stored.checked(value, arrays, label) for value, label in zip(values, labels, strict=True)],
            labels=labels,
            seeds=np.asarray(seeds, dtype=np.int64),
            batch_sizes=_batch_sizes(batch_size, names),
            shuffle=shuffle,
            device=device,
            arrays=arrays,
            stored=stored,
            epochs_done=np.zeros(len(names), dtype=np.int64) if epochs_done is None else epochs_done.copy(),
            steps_per_epoch=steps_per_epoch,
        )
    if not all(kinds):
        raise InputError(
            f"{labels[kinds.index(True)]} is a loader, but {labels[kinds.index(False)]} is arrays. "
            f"Give all members the same kind of data."
        )
    if batch_size is not None:
        raise InputError(
            f"{what} is a loader, which decides the size of its batches itself. "
            f"Leave batch_size out, or set it in the loader."
        )
    if not own:
        values = values[0] if isinstance(values[0], SharedLoader) else SharedLoader(values[0], what)
    return LoaderFeed(values, labels=labels, device=device, arrays=arrays)


def is_loader(data: Data, arrays: ArrayOperations, label: str) -> bool:
    """Return True if `data` yields batches, False if it is arrays.

    Raises:
        InputError: If it is neither. `label` names the data in the message.
    """
    if isinstance(data, SharedLoader):
        return True
    if arrays.is_array(data) or isinstance(data, tuple | Mapping):
        return False
    if isinstance(data, list):
        return bool(data) and not is_number_list(data) and all(isinstance(x, list | tuple | Mapping) for x in data)
    if isinstance(data, Iterator):
        raise InputError(
            f"{label} is of type {type(data).__name__}, which can be read only once. "
            f"Every epoch reads its data again: instead of an iterator, pass a function that returns one."
        )
    if callable(data) or (hasattr(data, "__iter__") and not isinstance(data, str | bytes)):
        return True
    raise InputError(
        f"{label} is of type {type(data).__name__}. Give arrays such as (x, y), a loader of batches "
        f"(a torch Dataset goes into a DataLoader), or a function that returns an iterator of batches."
    )


def _batch_sizes(batch_size: int | Each | None, names: Sequence[str]) -> np.ndarray:
    """Return `(member,)`: the rows that each member takes per step."""
    refuse_list(batch_size, "batch_size", names)
    sizes = per_member(DEFAULT_BATCH_SIZE if batch_size is None else batch_size, names, "batch_size")
    for name, size in zip(names, sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            whose = f"batch_size of member {name!r}" if isinstance(batch_size, Each) else "batch_size"
            raise InputError(f"{whose} is {size!r}. Give a whole number of rows, 1 or more.")
    return np.asarray(sizes, dtype=np.int64)
