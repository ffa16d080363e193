"""Protocol of every feed, and the array operations that a feed needs from a framework."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

import numpy as np

from modelfleet.frameworks.batch import Batch
from modelfleet.types import Json, NativeDevice, Tensor, Tree


class Feed(Protocol):
    """Yields the batches for a lane."""

    shared: bool
    """True if all batches are shared."""
    failures: dict[int, Exception]
    """Exceptions that the data of members raised, by position. These members sit out from then on."""

    @property
    def rows(self) -> np.ndarray | None:
        """`(member,)`: rows per epoch; None if unknown."""
        ...

    @property
    def steps(self) -> np.ndarray | None:
        """`(member,)`: steps per epoch; None if unknown."""
        ...

    @property
    def settings(self) -> dict[str, Json]:
        """Settings that decide how rows become batches."""
        return {}

    @property
    def form(self) -> str:
        """Parts of a batch, in words; empty if no batch has been read yet."""
        ...

    def epoch(self, number: int, *, start: int = 0, several: int = 1) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch. Close the generator to stop early.

        Args:
            number: The epoch, counted from 0.
            start: How many batches to leave out at the beginning.
            several: The most steps that one batch may hold. Steps share a batch if they have the same size and no
                padding.
        """
        ...

    def first(self) -> Batch:
        """Return a batch shaped like those to come, without consuming anything."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """Return where the loaders are at the start of the next epoch, beside the global generators."""
        ...

    @property
    def has_state(self) -> bool:
        """True if `state` is needed to read on: the global generators do not suffice."""
        ...

    def rewind(self, state: Mapping[str, np.ndarray]) -> None:
        """Forget what was read ahead, and go back to a `state`, for a run that resumes from a checkpoint."""
        ...

    def give_up(self) -> None:
        """Have threads that wait for a loader stop, after Ctrl-C. Any thread may call it, at the end."""
        ...

    def select(self, keep: Sequence[int]) -> "Feed":
        """Return a feed for the members at these positions, in this order. It replaces this feed."""
        ...


class Sender(Protocol):
    """Sends batches from the host to a device, which may be computing meanwhile."""

    def send(self, tree: Tree, /, *, copy: bool) -> Callable[[], Tree]:
        """Send a batch. Any thread may call it.

        Args:
            tree: A tree of tensors.
            copy: Never share memory with these tensors.

        Returns:
            A function for the thread that computes with the batch. It returns the tensors on the device.
        """
        ...


class ArrayOperations(Protocol):
    """Operations on a framework's arrays that feeds need. The modules `frameworks/*/arrays.py` have this form."""

    def is_array(self, value: object, /) -> bool:
        """Return True if `place` accepts the value."""
        ...

    def size(self, leaf: Tensor, /) -> int:
        """Return the length of the first axis."""
        ...

    def place(self, leaf: Tensor, device: NativeDevice | None, /, *, copy: bool = False) -> Tensor:
        """Return any array as the framework's tensor on a device; with None, wherever the array is now."""
        ...

    def index(self, positions: np.ndarray, device: NativeDevice | None, /) -> Tensor:
        """Return row numbers for `take`, on a device."""
        ...

    def take(self, tensor: Tensor, index: Tensor, /) -> Tensor:
        """Return the rows of `tensor` at an index of one to three axes: `(*index axes, …)`."""
        ...

    def sender(self, device: NativeDevice, /) -> "Sender":
        """Return what sends batches from the host to a device."""
        ...

    def room(self, device: NativeDevice, /) -> int | None:
        """Return how many bytes of data may be stored on a device; None for any number."""
        ...

    def on_host(self, tensor: Tensor, /) -> Tensor:
        """Return a tensor in the host's memory."""
        ...

    def concatenate(self, tensors: Sequence[Tensor], /) -> Tensor:
        """Join tensors along the first axis."""
        ...

    def stack(self, tensors: Sequence[Tensor], /) -> Tensor:
        """Join tensors along a new first axis."""
        ...
