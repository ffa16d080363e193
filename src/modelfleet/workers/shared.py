"""Values that cross to another process: arrays by shared memory, the rest by pickle.

What is pickled goes from one process of ours to another that it has started, and never to a disk.
"""

import io
import pickle
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.errors import FleetError

_ALIGN = 64


class CannotSendError(FleetError):
    """A value can't be sent to another process; the message says which and why."""


@dataclass(frozen=True)
class Parcel:
    """A value on its way: pickled, with its arrays in a piece of shared memory."""

    pickled: bytes
    memory: str | None
    spans: tuple[tuple[int, int], ...]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return frameworks.reduced(value)


def pack(value: Any, what: str) -> tuple[Parcel, shared_memory.SharedMemory | None]:
    """Make a parcel; close and unlink the memory when the other side has opened it."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:  # a pickle may raise anything
        raise CannotSendError(
            f"{what} can't be sent to a worker process: {type(error).__name__}: {error}. Define classes and "
            f"functions at the top of a module that can be imported, not inside of a function or as a lambda."
        ) from error
    views = [buffer.raw() for buffer in buffers]
    if not views:
        return Parcel(stream.getvalue(), None, ()), None
    spans, end = [], 0
    for view in views:
        spans.append((end, view.nbytes))
        end += -(-view.nbytes // _ALIGN) * _ALIGN
    memory = _new(end)
    assert memory.buf is not None
    for (start, size), view in zip(spans, views, strict=True):
        memory.buf[start : start + size] = view
    return Parcel(stream.getvalue(), memory.name, tuple(spans)), memory


def unpack(parcel: Parcel) -> tuple[Any, shared_memory.SharedMemory | None]:
    """The value of a parcel. Its arrays are views of the memory, which must be kept as long as they are used."""
    if parcel.memory is None:
        return pickle.loads(parcel.pickled), None
    memory = _open(parcel.memory)
    assert memory.buf is not None
    views = [memory.buf[start : start + size] for start, size in parcel.spans]
    return pickle.loads(parcel.pickled, buffers=views), memory


class Block:
    """A set of named arrays in shared memory, twice: one half is whole while the other is being written."""

    def __init__(self, layout: Mapping[str, tuple[tuple[int, ...], str]], memory: str | None = None) -> None:
        self._layout = dict(layout)
        self._places: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in self._layout.items():
            self._places[name] = end
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self._half = max(end, _ALIGN)
        self._memory = _new(2 * self._half) if memory is None else _open(memory)
        self._owner = memory is None

    @classmethod
    def like(cls, arrays: Mapping[str, np.ndarray]) -> "Block":
        """A block for arrays of these shapes."""
        return cls({name: (array.shape, array.dtype.str) for name, array in arrays.items()})

    @property
    def address(self) -> tuple[dict[str, tuple[tuple[int, ...], str]], str]:
        """What `Block(*address)` needs in another process."""
        return self._layout, self._memory.name

    def write(self, half: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write all arrays into a half."""
        for name, view in self._views(half).items():
            np.copyto(view, arrays[name], casting="no")

    def read(self, half: int) -> dict[str, np.ndarray]:
        """Copies of the arrays of a half."""
        return {name: view.copy() for name, view in self._views(half).items()}

    def _views(self, half: int) -> dict[str, np.ndarray]:
        return {
            name: np.ndarray(shape, dtype, buffer=self._memory.buf, offset=half * self._half + self._places[name])
            for name, (shape, dtype) in self._layout.items()
        }

    def close(self) -> None:
        """Give the memory back."""
        discard(self._memory, unlink=self._owner)


def discard(memory: shared_memory.SharedMemory | None, *, unlink: bool) -> None:
    """Close a piece of shared memory, and delete it if it is ours."""
    if memory is not None:
        if unlink:
            with suppress(FileNotFoundError):
                memory.unlink()
        with suppress(BufferError):  # arrays on it are still in use; it goes when they do
            memory.close()


class _Memory(shared_memory.SharedMemory):
    def __del__(self) -> None:
        with suppress(BufferError):  # arrays on it have outlived it; the memory goes with the last of them
            super().__del__()


def _new(size: int) -> shared_memory.SharedMemory:
    return _Memory(f"mf-{secrets.token_hex(8)}", create=True, size=size)


def _open(name: str) -> shared_memory.SharedMemory:
    return _Memory(name)
