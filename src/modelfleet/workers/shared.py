"""Values that cross to another process of this machine: arrays by shared memory, the rest by pickle.

What is pickled goes from one process of ours to another that it has started, and never to a disk.
"""

import io
import os
import pickle
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any

import cloudpickle

from modelfleet import frameworks
from modelfleet.words import size as size_of
from modelfleet.workers._base import CannotSendError

_ALIGN = 64
_LEAST = 1 << 16  # bytes of a channel's memory at first
_FOLDER = "/dev/shm"  # where Linux has shared memory


@dataclass(frozen=True)
class Parcel:
    """A value on its way: pickled, with its arrays in a piece of shared memory."""

    pickled: bytes
    memory: str | None
    spans: tuple[tuple[int, int], ...]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return frameworks.reduced(value)


class _ByValue(cloudpickle.Pickler):
    """Pickles with its code what others can't import: what was defined at a prompt, or within a function."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.IOBase):  # what cloudpickle would read and send would be another file
            raise TypeError(f"cannot pickle an open file, {obj!r}")
        found = frameworks.reduced(obj)
        return super().reducer_override(obj) if found is NotImplemented else found


def pickled(value: Any, what: str, pickler: Any = None) -> tuple[bytes, list[memoryview]]:
    """A value's pickle, and the arrays that are to go beside it."""
    picklers = [pickler] if pickler is not None else [_Pickler, _ByValue] if importable_main() else [_ByValue]
    for number, kind in enumerate(picklers, 1):
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        try:
            kind(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        except Exception as error:  # a pickle may raise anything
            if number < len(picklers):
                continue
            raise CannotSendError(
                f"{what} can't be sent to a worker process: {type(error).__name__}: {error}. Define classes and "
                f"functions at the top of a module that can be imported, and leave out what belongs to one "
                f"process alone: locks, open files, generators."
            ) from error
        return stream.getvalue(), [buffer.raw() for buffer in buffers]
    raise AssertionError("the last of the picklers has given or raised something")


def copied(value: Any, what: str) -> Any:
    """A value as a worker process would get it, on the same arrays."""
    stream, buffers = pickled(value, what)
    return pickle.loads(stream, buffers=buffers)


def importable_main() -> bool:
    """Whether another process can import the script that is run: not in a notebook, nor at a prompt."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        return True
    found = getattr(main, "__file__", None)
    return found is not None and os.path.isfile(found)


def portable(error: Exception) -> Exception:
    """An error that can be sent: itself, or its words."""
    try:
        pickle_, views = pickled(error, "an error")
        pickle.loads(pickle_, buffers=views)
        return error
    except Exception:  # a pickle may raise anything, when it is written and when it is read
        return RuntimeError(f"{type(error).__name__}: {error}")


def pack(value: Any, what: str) -> tuple[Parcel, shared_memory.SharedMemory | None]:
    """Make a parcel; close and unlink the memory when the other side has opened it."""
    pickle_, views = pickled(value, what)
    if not views:
        return Parcel(pickle_, None, ()), None
    spans, end = _laid_out(views)
    memory = _new(f"mf-{secrets.token_hex(8)}", end)
    _fill(memory, spans, views)
    return Parcel(pickle_, memory.name, spans), memory


def unpack(parcel: Parcel) -> tuple[Any, shared_memory.SharedMemory | None]:
    """The value of a parcel. Its arrays are views of the memory, which must be kept as long as they are used."""
    if parcel.memory is None:
        return pickle.loads(parcel.pickled), None
    memory = _open(parcel.memory)
    return _loaded(parcel, memory), memory


class Outbox:
    """The sending end of a channel: messages in memory that is used again and grows as needed.

    There are two pieces of memory, for messages in turns: one can be written while the other is read.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._memories: list[shared_memory.SharedMemory | None] = [None, None]

    def pack(self, value: Any, what: str) -> Parcel:
        """A message; the last but one is gone."""
        pickle_, views = pickled(value, what)
        if not views:
            return Parcel(pickle_, None, ())
        spans, end = _laid_out(views)
        memory, other = self._memories
        if memory is None or memory.size < end:
            larger = max(_LEAST, end, 0 if memory is None else 2 * memory.size)
            discard(memory, unlink=True)
            self._memories = [None, other]  # whatever becomes of the new one
            memory = self._new(larger, end)
        self._memories = [other, memory]
        _fill(memory, spans, views)
        return Parcel(pickle_, memory.name, spans)

    def _new(self, *sizes: int) -> shared_memory.SharedMemory:
        """New memory, of the first of these sizes that can be had."""
        self._number += 1
        for size in sizes[:-1]:
            with suppress(CannotSendError):
                return _new(_numbered(self._name, self._number), size)
        return _new(_numbered(self._name, self._number), sizes[-1])

    def close(self) -> None:
        """Give the memory back."""
        for memory in self._memories:
            discard(memory, unlink=True)
        self._memories = [None, None]


class Inbox:
    """The receiving end of a channel. A message's arrays are gone when the next but one is sent."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._memories: list[shared_memory.SharedMemory] = []  # that were written last, at most two
        self._number = 0

    def unpack(self, parcel: Parcel) -> Any:
        """A message's value."""
        if parcel.memory is None:
            return pickle.loads(parcel.pickled)
        memory = next((known for known in self._memories if known.name == parcel.memory), None)
        if memory is None:
            memory = _open(parcel.memory)
            self._number = int(parcel.memory.rpartition("-")[2])
            if len(self._memories) == 2:
                discard(self._memories.pop(0), unlink=False)
        else:
            self._memories.remove(memory)
        self._memories.append(memory)
        return _loaded(parcel, memory)

    def close(self, *, sweep: bool = False) -> None:
        """Stop reading; `sweep` deletes what a sender that was killed may have left."""
        for memory in self._memories:
            discard(memory, unlink=sweep)
        self._memories = []
        if sweep:  # and two that may have been made since
            for number in (self._number + 1, self._number + 2):
                with suppress(FileNotFoundError):
                    discard(_open(_numbered(self._name, number)), unlink=True)


@dataclass
class InMemory:
    """A value in shared memory, for all processes of this machine."""

    parcel: Parcel

    @classmethod
    def put(cls, value: Any, what: str) -> "InMemory":
        """Write the value down."""
        parcel, memory = pack(value, what)
        made = cls(parcel)
        made._memory = memory
        return made

    _memory: Any = None

    def __getstate__(self) -> Parcel:
        return self.parcel

    def __setstate__(self, parcel: Parcel) -> None:
        self.parcel = parcel

    def get(self) -> Any:
        """The value, its arrays as views of the shared memory."""
        value, memory = unpack(self.parcel)
        discard(memory, unlink=False)
        return value

    def close(self) -> None:
        """Delete the memory; those who have the value keep it."""
        discard(self._memory, unlink=True)
        self._memory = None


def discard(memory: shared_memory.SharedMemory | None, *, unlink: bool) -> None:
    """Close a piece of shared memory, and delete it if it is ours."""
    if memory is not None:
        if unlink:
            with suppress(FileNotFoundError):
                memory.unlink()
        with suppress(BufferError):  # arrays on it are still in use; it goes when they do
            memory.close()


def _laid_out(views: Sequence[memoryview]) -> tuple[tuple[tuple[int, int], ...], int]:
    spans, end = [], 0
    for view in views:
        spans.append((end, view.nbytes))
        end += -(-view.nbytes // _ALIGN) * _ALIGN
    return tuple(spans), max(end, 1)


def _fill(
    memory: shared_memory.SharedMemory, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]
) -> None:
    assert memory.buf is not None
    for (start, size), view in zip(spans, views, strict=True):
        memory.buf[start : start + size] = view


def _loaded(parcel: Parcel, memory: shared_memory.SharedMemory) -> Any:
    assert memory.buf is not None
    views = [memory.buf[start : start + size] for start, size in parcel.spans]
    return pickle.loads(parcel.pickled, buffers=views)


class _Memory(shared_memory.SharedMemory):
    _fd: int

    def __del__(self) -> None:
        with suppress(BufferError):  # arrays on it have outlived it; the memory goes with the last of them
            super().__del__()


def _new(name: str, size: int) -> _Memory:
    memory = _Memory(name, create=True, size=size)
    if hasattr(os, "posix_fallocate"):
        # Else memory that is not there shows when it is written to, by a signal that ends the process.
        try:
            os.posix_fallocate(memory._fd, 0, size)
        except OSError as error:
            discard(memory, unlink=True)
            free = size_of(shutil.disk_usage(_FOLDER).free) if os.path.isdir(_FOLDER) else "less"
            raise CannotSendError(
                f"{size_of(size)} of shared memory can't be had, {free} of it is free. Give the machine more "
                f"(`docker run --shm-size=8g`, an emptyDir with medium: Memory at {_FOLDER}), or send less at "
                f"once."
            ) from error
    return memory


def _open(name: str) -> shared_memory.SharedMemory:
    return _Memory(name)


def _numbered(name: str, number: int) -> str:
    return f"{name}-{number}"
