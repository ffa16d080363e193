"""Values in transit to another process of this machine: arrays in shared memory, the rest pickled."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from modelfleet.workers import shared_memory
from modelfleet.workers.channel import above_standard
from modelfleet.workers.pickling import attach_descriptor, attached_descriptor, pickle_with_descriptors, unpickle
from modelfleet.workers.protocol import CannotSendError
from modelfleet.workers.shared_memory import close_descriptors

_ALIGNMENT = 64  # bytes
_MIN_SEGMENT = 1 << 16  # bytes of an outbox's first segment
_ALWAYS_KEPT = 1 << 23  # bytes: a segment up to this size is kept, however small the messages are
_MAX_OVERSIZED = 32  # messages in a row for which a segment was far too large, before it is released
_LONG_PICKLE = 1 << 15  # bytes: a longer pickle travels in shared memory, too, as a socket does not hold much

Spans = tuple[tuple[int, int], ...]  # (start, size) in bytes


class Parcel(NamedTuple):
    """Holds a pickled value, and where its arrays are in shared memory. Descriptors travel beside it."""

    pickled: bytes
    """Empty if the pickle is long: then it is the last of the spans."""
    segment: int | None = None
    """Number of the segment that holds the arrays; 0 for a segment that is used once."""
    new_size: int = 0
    """Size of the segment if it is new. Its descriptor comes first, then those that are attached to the value."""
    spans: Spans = ()


Packed = tuple[Parcel, list[int]]
"""Parcel and its descriptors, which sender and receiver each have to close."""


def pack(value: object, description: str) -> Packed:
    """Return a parcel with a segment of its own."""
    pickled, views, descriptors = pickle_with_descriptors(value, description)
    try:
        pickled, spans, end = _lay_out(pickled, views)
        if not views:
            return Parcel(pickled), descriptors
        descriptors.insert(0, shared_memory.create(end))
        _fill(shared_memory.map_memory(descriptors[0], end), spans, views)
    except BaseException:
        close_descriptors(descriptors)
        raise
    return Parcel(pickled, 0, end, spans), descriptors


def unpack(parcel: Parcel, descriptors: list[int]) -> Any:
    """Return the value of a parcel. Its arrays are views of the segment, and keep it mapped."""
    try:
        return _load(parcel, _map_new(parcel, descriptors), descriptors)
    finally:
        close_descriptors(descriptors)


class Outbox:
    """Sending end of a conversation. Its messages reuse shared memory, which grows as needed.

    There are two segments, for messages in turns: one can be written while the other is read.
    """

    def __init__(self) -> None:
        self._last_number = 0
        self._segments: list[_Segment | None] = [None, None]

    def pack(self, value: object, description: str) -> Packed:
        """Return the next message. It overwrites the last but one."""
        pickled, views, descriptors = pickle_with_descriptors(value, description)
        try:
            pickled, spans, end = _lay_out(pickled, views)
            if not views:
                return Parcel(pickled), descriptors
            segment, other = self._segments
            new_size = 0
            if segment is None or not segment.suits(end):
                grown = 0 if segment is None or len(segment.memory) > end else 2 * len(segment.memory)
                self._segments = [None, other]  # whatever happens to the new one
                segment = None  # its memory is released before more is asked for
                new_size, descriptor = _create(max(_MIN_SEGMENT, end, grown), end)
                descriptors.insert(0, descriptor)
                self._last_number += 1
                segment = _Segment(self._last_number, shared_memory.map_memory(descriptor, new_size))
            self._segments = [other, segment]
            _fill(segment.memory, spans, views)
        except BaseException:
            close_descriptors(descriptors)
            raise
        return Parcel(pickled, segment.number, new_size, spans), descriptors

    def close(self) -> None:
        """Release the memory. The next message gets new memory."""
        self._segments = [None, None]


class _Segment:
    """Shared memory of an outbox."""

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.memory = memory
        self._oversized = 0  # messages in a row for which it was far too large

    def suits(self, size: int) -> bool:
        """Return False if a message needs more memory than this, or messages have needed far less for a while."""
        oversized = len(self.memory) > max(_ALWAYS_KEPT, 8 * size)
        self._oversized = self._oversized + 1 if oversized else 0
        return len(self.memory) >= size and self._oversized <= _MAX_OVERSIZED


class Inbox:
    """Receiving end of a conversation. A message's arrays are overwritten when the next but one is sent."""

    def __init__(self) -> None:
        self._segments: list[tuple[int, memoryview]] = []  # the last two that were written

    def unpack(self, parcel: Parcel, descriptors: list[int]) -> Any:
        """Return the value of a message."""
        try:
            if parcel.segment is None:
                return _load(parcel, None, descriptors)
            if parcel.new_size:
                memory = _map_new(parcel, descriptors)
                assert memory is not None
                del self._segments[:-1]
            else:
                memory = next(known for number, known in self._segments if number == parcel.segment)
                self._segments = [pair for pair in self._segments if pair[0] != parcel.segment]
            self._segments.append((parcel.segment, memory))
            return _load(parcel, memory, descriptors)
        finally:
            close_descriptors(descriptors)

    def close(self) -> None:
        """Release the memory."""
        self._segments = []


class SharedMemoryValue:
    """Holds a value in shared memory, for all processes of this machine. Pickling it sends the descriptor."""

    def __init__(self, parcel: Parcel, descriptors: list[int]) -> None:
        self._parcel = parcel
        self._descriptors = descriptors  # in the process that put the value
        self._memory: memoryview | None = None  # in a process that received it

    @classmethod
    def put(cls, value: object, description: str) -> "SharedMemoryValue":
        """Write a value to shared memory."""
        return cls(*pack(value, description))

    def __reduce__(self) -> tuple[Callable[..., "SharedMemoryValue"], tuple[Parcel, int | None]]:
        if self._memory is not None or (self._parcel.new_size and not self._descriptors):
            raise TypeError("a value in shared memory was closed, or belongs to another process")
        return _unpickled, (self._parcel, attach_descriptor(self._descriptors[0]) if self._descriptors else None)

    def get(self) -> Any:
        """Return the value, its arrays as views of the shared memory."""
        if self._memory is None:
            return unpack(self._parcel, [above_standard(os.dup(one)) for one in self._descriptors])
        return _load(self._parcel, self._memory, [])

    def close(self) -> None:
        """Release the memory. Processes that have the value keep it."""
        close_descriptors(self._descriptors)
        self._memory = None

    def __del__(self) -> None:
        close_descriptors(self._descriptors)


def _unpickled(parcel: Parcel, index: int | None) -> SharedMemoryValue:
    made = SharedMemoryValue(parcel, [])
    if index is not None:
        made._memory = shared_memory.map_memory(attached_descriptor(index), parcel.new_size)
    return made


def _lay_out(pickled: bytes, views: list[memoryview]) -> tuple[bytes, Spans, int]:
    """Return the pickle, the spans of the arrays in a segment, and its size. A long pickle joins the arrays."""
    if len(pickled) > _LONG_PICKLE:
        views.append(memoryview(pickled))
        pickled = b""
    spans, end = [], 0
    for view in views:
        spans.append((end, view.nbytes))
        end += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
    return pickled, tuple(spans), max(end, 1)


def _create(wanted: int, needed: int) -> tuple[int, int]:
    """Create shared memory of the wanted size, or else of the needed one. Return its size and descriptor."""
    with suppress(CannotSendError):
        return wanted, shared_memory.create(wanted)
    return needed, shared_memory.create(needed)


def _fill(memory: memoryview, spans: Spans, views: Sequence[memoryview]) -> None:
    for (start, size), view in zip(spans, views, strict=True):
        memory[start : start + size] = view


def _map_new(parcel: Parcel, descriptors: list[int]) -> memoryview | None:
    """Map the new segment of a parcel, if it has one, and close its descriptor."""
    if not parcel.new_size:
        return None
    try:
        return shared_memory.map_memory(descriptors[0], parcel.new_size)
    finally:
        os.close(descriptors.pop(0))


def _load(parcel: Parcel, memory: memoryview | None, descriptors: list[int]) -> Any:
    views = [] if memory is None else [memory[start : start + size] for start, size in parcel.spans]
    stream = parcel.pickled or views.pop()
    return unpickle(stream, views, descriptors)
