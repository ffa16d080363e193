"""Counting the tensors that autograd keeps of a forward pass for its backward pass."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from modelfleet.frameworks.held_bytes import HeldBytes

Result = TypeVar("Result")


@contextmanager
def counting_saved(own: Iterable[Tensor], count: Callable[[int], object]) -> Iterator[None]:
    """Call `count` with the size of each piece of memory that autograd keeps, but for a model's `own` tensors.

    A model that uses torch.func raises RuntimeError within: torch.func can't be used under such hooks.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in own}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            count(memory.nbytes())
        return tensor.detach()  # as it is, an output would hold the graph that holds it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def saved_bytes(model: nn.Module, run: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of a forward pass, and the bytes that autograd keeps of it; 0 if they can't be counted."""
    sizes: list[int] = []
    try:
        with counting_saved(model.parameters(), sizes.append):
            return run(), sum(sizes)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return run(), 0


class SavedTensors:
    """Tells a rank what a node keeps of each micro-batch, in the steps in which the rank counts it."""

    def __init__(self) -> None:
        self.held: HeldBytes | None = None
        """None in all other steps."""
        self._bytes: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a step, in which nothing is kept yet."""
        self._bytes = {}

    def add(self, micro: int, size: int) -> None:
        """Note that more is kept of a micro-batch."""
        if self.held is not None:
            self._bytes[micro] = self._bytes.get(micro, 0) + size
            self.held.keep(size)

    def counting(self, micro: int, own: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Context of a forward pass of a micro-batch, which counts what is kept of it."""
        return nullcontext() if self.held is None else counting_saved(own, lambda size: self.add(micro, size))

    def release(self, micro: int) -> None:
        """Note that nothing is kept of a micro-batch any more."""
        if self.held is not None:
            self.held.keep(-self._bytes.pop(micro, 0))
