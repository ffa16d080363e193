"""Batches that go from the host to an accelerator while it computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from modelfleet.trees import leaves, rebuild
from modelfleet.types import Tree

RING = 4  # batches that may be on their way at once
_ALIGNMENT = 512  # bytes; torch's own allocators align to as many


class Uploader:
    """Copies one batch after the other to an accelerator, beside the work that it is doing.

    A batch is put into pinned memory, and goes from there in one copy, on a stream that does nothing else. The
    pinned memory is a ring of a few buffers, which are used again and again. Three orders matter:

    - The work that reads a batch waits on the device until it has arrived.
    - The memory of a batch on the device is not used again before that work is done. `record_stream` sees to it.
    - A buffer of the ring is not written before its last copy is done. Only if the host is a whole ring ahead does
      it wait for that.
    """

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device, self._stream = device, stream
        self._ring = [_Buffer() for _ in range(RING)]
        self._sent = 0
        self._lock = Lock()  # feeds of several lanes may share an uploader

    def send(self, tree: Tree, /, *, copy: bool) -> Callable[[], Tree]:
        """Send a batch to the device. It is read at once, so its memory may be written to afterwards.

        Returns:
            A function for the thread that computes with the batch. It returns the tensors, and makes the thread's
            stream wait for them.
        """
        tensors = leaves(tree)
        with self._lock, torch.no_grad():
            packed = [tensor for tensor in tensors if _packs(tensor)]
            others = [tensor for tensor in tensors if not _packs(tensor)]
            parts = [_part_of(tensor) for tensor in packed]
            starts, total = _starts(parts)
            buffer = self._ring[self._sent % RING]
            self._sent += 1
            pinned = buffer.of(total)
            for tensor, part, start in zip(packed, parts, starts, strict=True):
                part.within(pinned, start).copy_(tensor)
            for tensor in others:
                if tensor.device.type != "cpu":  # the work that makes it was given to this thread's stream
                    self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))
            with self._stream:
                there = torch.empty(total, dtype=torch.uint8, device=self._device)
                there.copy_(pinned, non_blocking=True)
                copies = [tensor.to(self._device, copy=True) for tensor in others]
                arrived = buffer.copied = self._stream.record_event()
            for tensor in others:
                if tensor.device == self._device:
                    tensor.record_stream(self._stream)
            whole = iter([part.within(there, start) for part, start in zip(parts, starts, strict=True)])
            rest = iter(copies)
            placed = [next(whole) if _packs(tensor) else next(rest) for tensor in tensors]

        def receive() -> Tree:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(arrived)
            for tensor in (there, *copies):
                tensor.record_stream(stream)
            return rebuild(tree, placed)

        return receive


class _Buffer:
    """Pinned memory for one batch at a time."""

    def __init__(self) -> None:
        self.copied: torch.Event | None = None
        """Recorded behind the last copy."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        """Return so many bytes, as soon as the last copy is done."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory[:size]


@dataclass(frozen=True)
class _Part:
    """Form of one tensor of a batch."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def within(self, memory: Tensor, start: int) -> Tensor:
        """Return the tensor that begins at a byte of some memory.

        It is no view: writing to one input of a model must not count as writing to another.
        """
        found = torch.empty(0, dtype=self.dtype, device=memory.device)
        return found.set_(memory.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


def _part_of(tensor: Tensor) -> _Part:
    # The strides that `Tensor.to` would keep: other ones may have other kernels, which round otherwise.
    return _Part(tensor.dtype, tensor.shape, torch.empty_like(tensor, device="meta").stride())


def _starts(parts: Sequence[_Part]) -> tuple[list[int], int]:
    """Return the byte at which each part begins, and the number of bytes of all."""
    starts, total = [], 0
    for part in parts:
        starts.append(total)
        total += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, total


def _packs(tensor: Tensor) -> bool:
    """Return True if a tensor is plain numbers on the host."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.device.type == "cpu"
