"""What every feed speaks: batches, the feed itself, the arrays under it, and the checks of a user's data."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from modelfleet.errors import InputError, refuse_masked
from modelfleet.trees import leaves, map_trees, paths, rebuild


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step for every member of a lane, or of several steps of one size."""

    data: Any
    """A tree of tensors, each leaf `(member, row, …)`, or `(row, …)` if shared; before these axes is the step, if
    there are several."""
    shared: bool
    """Every member sees these very rows; the leaves have no member axis."""
    counts: np.ndarray
    """`(member,)`: how many of the rows are real for each member, before its padding. 0: it sits out."""
    steps: int | None = None
    """How many steps these are, if the leaves have a step axis."""
    others: "tuple[Batch, ...]" = ()
    """The rows of this step of other members, whose shapes are other than these."""

    @property
    def pieces(self) -> "tuple[Batch, ...]":
        """This batch and the others of its step."""
        return (self, *self.others)

    @cached_property
    def size(self) -> int:
        """The number of rows of every leaf."""
        return int(leaves(self.data)[0].shape[(not self.shared) + (self.steps is not None)])

    @cached_property
    def full(self) -> bool:
        """Whether no row of any member is padding."""
        return bool((self.counts == self.size).all())


class Feed(Protocol):
    """The stream of batches for a lane."""

    shared: bool
    """Whether all its batches are shared."""
    failures: dict[int, Exception]
    """The members whose data raised, by position. They sit out from then on."""

    @property
    def rows(self) -> np.ndarray | None:
        """`(member,)`: rows per epoch, where known."""
        ...

    @property
    def steps(self) -> np.ndarray | None:
        """`(member,)`: steps per epoch, where known."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """How rows become batches, as JSON can hold it, where that is known here."""
        return {}

    def epoch(self, number: int, *, start: int = 0, several: int = 1) -> Generator[Batch, None, None]:
        """The batches of one epoch, without the first `start` of them. Close it to stop before the end.

        Up to `several` steps come in one batch, where they are of one size and no row is padding.
        """
        ...

    def first(self) -> Batch:
        """A batch shaped like those that will come. Consumes nothing."""
        ...

    def rewind(self) -> None:
        """Forget what was read ahead of the coming epoch, for a run that goes on from a checkpoint."""
        ...

    def select(self, keep: Sequence[int]) -> "Feed":
        """A feed for the members at these positions, in this order. It takes this one's place."""
        ...


class Arrays(Protocol):
    """What a feed asks of a framework's arrays; `frameworks/*/arrays.py` are modules of this form."""

    def is_array(self, value: Any, /) -> bool:
        """Whether `place` can take it."""
        ...

    def size(self, leaf: Any, /) -> int:
        """The length of the first axis."""
        ...

    def place(self, leaf: Any, device: Any, /, *, copy: bool = False) -> Any:
        """The framework's tensor of any array, on a device; `None`: wherever it is now."""
        ...

    def index(self, positions: np.ndarray, device: Any, /) -> Any:
        """Row numbers for `take`, on a device."""
        ...

    def take(self, tensor: Any, index: Any, /) -> Any:
        """The rows of `tensor` at an index of one to three axes: `(*index axes, …)`."""
        ...

    def concatenate(self, tensors: Sequence[Any], /) -> Any:
        """One tensor, joined along the first axis."""
        ...

    def stack(self, tensors: Sequence[Any], /) -> Any:
        """One tensor, joined along a new first axis."""
        ...


def grouped(batches: Iterator[Batch], several: int, arrays: Arrays) -> Generator[Batch, None, None]:
    """The same steps, up to `several` in a batch."""
    held: list[Batch] = []
    raised: Exception | None = None
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # what was read before it is not lost
            batch, raised = None, error
        if held and (batch is None or not (batch.full and _alike(held[0], batch))):
            yield _joined(held, arrays)
            held = []
        if raised is not None:
            raise raised
        if batch is None:
            return
        if not batch.full:
            yield batch
            continue
        held.append(batch)
        if len(held) == several:
            yield _joined(held, arrays)
            held = []


def _alike(a: Batch, b: Batch) -> bool:
    return a.size == b.size and spec(a.data) == spec(b.data)


def _joined(batches: Sequence[Batch], arrays: Arrays) -> Batch:
    first = batches[0]
    if len(batches) == 1:
        return first
    data = map_trees(arrays.stack, [batch.data for batch in batches])
    return Batch(data, first.shared, first.counts, len(batches))


def settle(tree: Any, arrays: Arrays, where: str) -> tuple[Any, int]:
    """`tree` with an array at every leaf, and its number of rows. Raises where that can't be had.

    Lists of numbers become arrays, and tables lose their labels. [x, y] is (x, y), as a DataLoader means it.
    `where` says in errors whose data it is.
    """
    if isinstance(tree, list) and not is_number_list(tree):
        tree = tuple(tree)
    found = paths(tree, is_number_list)
    if not found:
        raise InputError(f"{where} holds no arrays. Give arrays with one row per example, such as (x, y).")
    values = [_array(leaf, arrays, f"{where}: {path or 'the array'}") for path, leaf in found]
    rows = arrays.size(values[0])
    for (path, _), value in zip(found, values, strict=True):
        if arrays.size(value) != rows:
            raise InputError(
                f"{where}: {path} has {arrays.size(value)} rows, but {found[0][0]} has {rows}. "
                f"Every array needs one row per example."
            )
    if rows == 0:
        raise InputError(f"{where} has no rows. Give at least one, or leave the member out.")
    return rebuild(tree, values, is_number_list), rows


def spec(tree: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """The path, the shape of a row and the dtype of every leaf of a tree of tensors."""
    return tuple((path, tuple(leaf.shape[1:]), str(leaf.dtype)) for path, leaf in paths(tree))


def difference(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """The first difference between two unequal specs, in words."""
    for (path, shape, dtype), (other_path, other_shape, other_dtype) in zip(mine, theirs, strict=False):
        if path != other_path:
            break
        if shape != other_shape:
            return f"a row of {path or 'the array'} is {shape}, expected {other_shape}"
        if dtype != other_dtype:
            return f"{path or 'the array'} is {dtype}, expected {other_dtype}"
    names, expected = ([path or "one array" for path, *_ in side] for side in (mine, theirs))
    return f"it holds {', '.join(names)}, expected {', '.join(expected)}"


def is_number_list(value: Any) -> bool:
    """Whether `value` is a list of numbers or strings, nested or not, as far as its first item tells."""
    if not isinstance(value, list):
        return False
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, bool | int | float | complex | str | bytes | np.generic)


def _are_strings(array: np.ndarray) -> bool:
    return array.dtype.kind in "US" or (
        array.dtype.kind == "O" and all(isinstance(item, str | bytes) for item in array.flat)
    )


def _array(leaf: Any, arrays: Arrays, label: str) -> Any:
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
    strings = isinstance(leaf, np.ndarray) and getattr(arrays, "STRINGS", False) and _are_strings(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufc" and not strings:
        raise InputError(
            f"{label} has dtype {leaf.dtype}, which no device computes with. Encode it as numbers, "
            f"with rows of one length."
        )
    if len(leaf.shape) == 0:
        raise InputError(f"{label} is a single number. Give an array with one row per example.")
    return leaf
