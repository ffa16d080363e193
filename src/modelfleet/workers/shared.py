"""Values that cross to another process of this machine: arrays by shared memory, the rest by pickle.

What is pickled goes from one process of ours to another that it has started, and never to a disk.
"""

import io
import os
import pickle
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle

from modelfleet import frameworks
from modelfleet.words import without_period
from modelfleet.workers import pieces
from modelfleet.workers._base import CannotSendError
from modelfleet.workers.channel import above_standard

_ALIGN = 64
_LEAST = 1 << 16  # bytes of an outbox's memory at first
_ROOMY = 1 << 23  # bytes of an outbox's memory that may be far too large without a thought
_OFTEN = 32  # messages in a row for which memory was far too large, before it is given back
_LONG = 1 << 15  # bytes of a pickle that had better go by memory, too: a socket does not hold much


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return frameworks.reduced(value)


class _ByValue(cloudpickle.Pickler):
    """Pickles with its code what others can't import: what a script, a prompt or a function defines."""

    def reducer_override(self, obj: Any) -> Any:
        # What cloudpickle would read and send of a file would be another file.
        if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
            raise TypeError(f"cannot pickle an open file, {obj!r}")
        found = frameworks.reduced(obj)
        return super().reducer_override(obj) if found is NotImplemented else found


def pickled(value: Any, what: str, pickler: Any = None) -> tuple[bytes, list[memoryview]]:
    """A value's pickle, and the arrays that are to go beside it."""
    stream, views, descriptors = _pickled(value, what, pickler)
    pieces.close(descriptors)
    return stream, views


def _pickled(value: Any, what: str, pickler: Any = None) -> tuple[bytes, list[memoryview], list[int]]:
    """A value's pickle, and the arrays and descriptors that are to go beside it.

    A worker has another `__main__`: what is of this one goes by value, and all else by its name.
    """
    for kind in [pickler] if pickler is not None else [_Pickler, _ByValue]:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        before = getattr(_on_their_way, "collected", None)
        _on_their_way.collected = descriptors = []
        try:
            kind(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        except Exception as error:  # a pickle may raise anything
            pieces.close(descriptors)
            if kind is _Pickler:
                continue
            raise CannotSendError(
                f"{what} can't be sent to a worker process: {type(error).__name__}: {without_period(error)}. "
                f"Define classes and functions at the top of a module that can be imported, and leave out what "
                f"belongs to one process alone: locks, open files, generators."
            ) from error
        finally:
            _on_their_way.collected = before
        written = stream.getvalue()
        if kind is _Pickler and b"__main__" in written:  # every reference has the module's name in it
            pieces.close(descriptors)
            continue
        return written, [buffer.raw() for buffer in buffers], descriptors
    raise AssertionError("the last of the picklers has given or raised something")


def copied(value: Any, what: str) -> Any:
    """A value as a worker process would get it, on the same arrays."""
    stream, buffers = pickled(value, what)
    return pickle.loads(stream, buffers=buffers)


def portable(error: Exception) -> Exception:
    """An error that can be sent: itself, or its words."""
    try:
        pickle_, views = pickled(error, "an error")
        pickle.loads(pickle_, buffers=views)
        return error
    except Exception:  # a pickle may raise anything, when it is written and when it is read
        return RuntimeError(f"{type(error).__name__}: {error}")


class Parcel(NamedTuple):
    """A value on its way: pickled, with its arrays in a piece of shared memory. Descriptors go beside it."""

    pickled: bytes
    """Empty if it is large: then it is the last of the spans."""
    memory: int | None = None
    """The number of the piece: 0 for one that is used once."""
    size: int = 0
    """The size of the piece, if it is new. Its descriptor is the first then; those of values in it follow."""
    spans: tuple[tuple[int, int], ...] = ()


Packed = tuple[Parcel, list[int]]  # the descriptors are the receiver's, or the sender's, to close


def pack(value: Any, what: str) -> Packed:
    """Make a parcel whose memory is its own."""
    pickle_, views, descriptors = _pickled(value, what)
    try:
        pickle_, spans, end = _laid_out(pickle_, views)
        if not views:
            return Parcel(pickle_), descriptors
        descriptors.insert(0, pieces.new(end))
        _fill(pieces.mapped(descriptors[0], end), spans, views)
    except BaseException:
        pieces.close(descriptors)
        raise
    return Parcel(pickle_, 0, end, spans), descriptors


def unpack(parcel: Parcel, descriptors: list[int]) -> Any:
    """The value of a parcel. Its arrays are views of the memory, which is there as long as they are."""
    try:
        return _loaded(parcel, _taken(parcel, descriptors), descriptors)
    finally:
        pieces.close(descriptors)


class Outbox:
    """The sending end of a conversation: messages in memory that is used again and grows as needed.

    There are two pieces of memory, for messages in turns: one can be written while the other is read.
    """

    def __init__(self) -> None:
        self._number = 0
        self._pieces: list[_Piece | None] = [None, None]

    def pack(self, value: Any, what: str) -> Packed:
        """A message; the last but one is gone."""
        pickle_, views, descriptors = _pickled(value, what)
        try:
            pickle_, spans, end = _laid_out(pickle_, views)
            if not views:
                return Parcel(pickle_), descriptors
            piece, other = self._pieces
            new = 0
            if piece is None or piece.misfits(end):
                larger = max(_LEAST, end, 0 if piece is None or len(piece.memory) > end else 2 * len(piece.memory))
                self._pieces = [None, other]  # whatever becomes of the new one
                piece = None  # its memory is given back before more is asked for
                new, descriptor = _first_of(larger, end)
                descriptors.insert(0, descriptor)
                self._number += 1
                piece = _Piece(self._number, pieces.mapped(descriptor, new))
            self._pieces = [other, piece]
            _fill(piece.memory, spans, views)
        except BaseException:
            pieces.close(descriptors)
            raise
        return Parcel(pickle_, piece.number, new, spans), descriptors

    def close(self) -> None:
        """Give the memory back; the next message gets new."""
        self._pieces = [None, None]


class _Piece:
    """A piece of an outbox."""

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.memory = memory
        self._small = 0  # messages, one after the other, for which it was far too large

    def misfits(self, end: int) -> bool:
        """Whether a message needs another piece: more memory than this, or, for some time now, far less."""
        large = len(self.memory) > max(_ROOMY, 8 * end)
        self._small = self._small + 1 if large else 0
        return len(self.memory) < end or self._small > _OFTEN


class Inbox:
    """The receiving end of a conversation. A message's arrays are gone when the next but one is sent."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, memoryview]] = []  # that were written last, at most two

    def unpack(self, parcel: Parcel, descriptors: list[int]) -> Any:
        """A message's value."""
        try:
            if parcel.memory is None:
                return _loaded(parcel, None, descriptors)
            if parcel.size:
                memory = _taken(parcel, descriptors)
                assert memory is not None
                del self._pieces[:-1]
            else:
                memory = next(known for number, known in self._pieces if number == parcel.memory)
                self._pieces = [pair for pair in self._pieces if pair[0] != parcel.memory]
            self._pieces.append((parcel.memory, memory))
            return _loaded(parcel, memory, descriptors)
        finally:
            pieces.close(descriptors)

    def close(self) -> None:
        """Give the memory back."""
        self._pieces = []


class InMemory:
    """A value in shared memory, for all processes of this machine. Pickled, it is the descriptor that is sent."""

    def __init__(self, parcel: Parcel, descriptors: list[int]) -> None:
        self._parcel = parcel
        self._descriptors = descriptors  # here, where it was put
        self._memory: memoryview | None = None  # there, where it has come to

    @classmethod
    def put(cls, value: Any, what: str) -> "InMemory":
        """Write the value down."""
        return cls(*pack(value, what))

    def __reduce__(self) -> Any:
        if self._memory is not None or (self._parcel.size and not self._descriptors):
            raise TypeError("a value in shared memory was closed, or is another process's to send")
        return _arrived, (self._parcel, sent(self._descriptors[0]) if self._descriptors else None)

    def get(self) -> Any:
        """The value, its arrays as views of the shared memory."""
        if self._memory is None:
            return unpack(self._parcel, [above_standard(os.dup(one)) for one in self._descriptors])
        return _loaded(self._parcel, self._memory, [])

    def close(self) -> None:
        """Give the memory up; those who have the value keep it."""
        pieces.close(self._descriptors)
        self._memory = None

    def __del__(self) -> None:
        pieces.close(self._descriptors)


_on_their_way = threading.local()
"""`collected`: the descriptors of values in what is pickled. `given`: those of what is unpickled."""


def sent(descriptor: int) -> int:
    """While a value is pickled: send a descriptor along. Gives its place, for `came`."""
    collected = getattr(_on_their_way, "collected", None)
    if collected is None:
        raise TypeError("what has a descriptor can be sent to worker processes only")
    collected.append(above_standard(os.dup(descriptor)))
    return len(collected) - 1


def came(place: int) -> int:
    """While a value is unpickled: a descriptor that came along. It is closed when all is unpickled."""
    return _on_their_way.given[place]


def _arrived(parcel: Parcel, place: int | None) -> InMemory:
    """A value in shared memory, where it has come to."""
    made = InMemory(parcel, [])
    if place is not None:
        made._memory = pieces.mapped(came(place), parcel.size)
    return made


def _laid_out(pickle_: bytes, views: list[memoryview]) -> tuple[bytes, tuple[tuple[int, int], ...], int]:
    """Where in a piece of memory the arrays are to lie, and how large it has to be. A long pickle joins them."""
    if len(pickle_) > _LONG:
        views.append(memoryview(pickle_))
        pickle_ = b""
    spans, end = [], 0
    for view in views:
        spans.append((end, view.nbytes))
        end += -(-view.nbytes // _ALIGN) * _ALIGN
    return pickle_, tuple(spans), max(end, 1)


def _first_of(*sizes: int) -> tuple[int, int]:
    """The first of some sizes of which a new piece can be had, and its descriptor."""
    for size in sizes[:-1]:
        with suppress(CannotSendError):
            return size, pieces.new(size)
    return sizes[-1], pieces.new(sizes[-1])


def _fill(memory: memoryview, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
    for (start, size), view in zip(spans, views, strict=True):
        memory[start : start + size] = view


def _taken(parcel: Parcel, descriptors: list[int]) -> memoryview | None:
    """The new memory of a parcel, whose descriptor is taken from those that came."""
    if not parcel.size:
        return None
    try:
        return pieces.mapped(descriptors[0], parcel.size)
    finally:
        os.close(descriptors.pop(0))


def _loaded(parcel: Parcel, memory: memoryview | None, descriptors: list[int]) -> Any:
    views = [] if memory is None else [memory[start : start + size] for start, size in parcel.spans]
    stream = parcel.pickled or views.pop()
    before = getattr(_on_their_way, "given", None)
    _on_their_way.given = descriptors
    try:
        return pickle.loads(stream, buffers=views)
    finally:
        _on_their_way.given = before
