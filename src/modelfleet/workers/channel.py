"""Messages between two processes: a socket pair that can send open files along.

A message is a short header and a body. File descriptors travel beside the header (SCM_RIGHTS).
"""

import errno
import fcntl
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

_HEADER = struct.Struct("<QB")  # length of the body, number of descriptors
_READ_SIZE = 1 << 14  # bytes
_MAX_DESCRIPTORS = 250  # in a message; Linux takes 253
_ANCILLARY_SIZE = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize)
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
MAX_COUNTED_GAP = 1.0  # seconds: of a longer gap no more counts as waiting, as this process may have been stopped

Message = tuple[bytes, list[int]]
"""Body, and the descriptors that came with it."""


class Channel:
    """One end of a socket pair. Any thread may send, read and close."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket = own
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._state = threading.Lock()
        self._users = 0  # threads that use the descriptor; it must not be reused for another file meanwhile
        self._closed = False
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()
        self._messages: deque[Message] = deque()
        self.ended = False
        """True once the other side is gone. Messages that it sent before can still be read."""

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """Return a channel, and the socket for the other side."""
        own, other = (socket.socket(fileno=above_standard(one.detach())) for one in socket.socketpair())
        return cls(own), other

    def fileno(self) -> int:
        """Return the descriptor, -1 if the channel is closed."""
        return self._socket.fileno()

    def send(
        self,
        body: bytes,
        descriptors: Sequence[int] = (),
        *,
        keep_waiting: Callable[[], bool] | None = None,
    ) -> None:
        """Send a message.

        Args:
            body: The message.
            descriptors: Descriptors to send along. They remain the sender's to close.
            keep_waiting: Called every second while the other side does not read; False gives up.

        Raises:
            OSError: If the other side is gone, or `keep_waiting` returned False.
        """
        if len(descriptors) > _MAX_DESCRIPTORS:
            raise OSError(f"{len(descriptors)} descriptors in one message; at most {_MAX_DESCRIPTORS} can be sent")
        rest = memoryview(_HEADER.pack(len(body), len(descriptors)) + body)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        with self._sending:
            self._enter()
            try:
                while rest:
                    try:
                        rest = rest[self._socket.sendmsg([rest], ancillary, _NO_SIGNAL) :]
                        ancillary = []
                    except BlockingIOError:
                        writable = self.wait(MAX_COUNTED_GAP, select.POLLOUT)
                        if not writable and keep_waiting is not None and not keep_waiting():
                            self.shut()  # half a message is on its way: nothing can follow it
                            raise TimeoutError("the other side does not read") from None
            finally:
                self._leave()

    def next(self) -> Message | None:
        """Return the next message that has arrived, if any. Its descriptors are the caller's to close."""
        with self._reading:
            if self._messages:
                return self._messages.popleft()
            self._enter()
            try:
                while not self._messages and not self.ended:
                    try:
                        got, ancillary, _, _ = self._socket.recvmsg(_READ_SIZE, _ANCILLARY_SIZE, _CLOEXEC)
                    except BlockingIOError:
                        break
                    except OSError:
                        got, ancillary = b"", []
                    for level, kind, data in ancillary:
                        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                            self._descriptors.extend(_received_descriptors(data))
                    self._bytes += got
                    self._split_messages()
                    self.ended = not got
            finally:
                self._leave()
            return self._messages.popleft() if self._messages else None

    def wait(self, seconds: float | None, events: int = select.POLLIN) -> bool:
        """Return True if the channel can be read (or written) within `seconds`. A closed one can be read."""
        return bool(wait([self], seconds, events))

    def shut(self) -> None:
        """End the conversation for both sides, and for every thread of this one."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the conversation. The descriptor is released when no thread uses it any more."""
        with self._state:
            self._closed = True
            idle = not self._users
        if idle:
            self._release()
        else:
            self.shut()

    def abandon(self) -> None:
        """Release the descriptor in a forked child, and leave the conversation to the parent."""
        self._sending, self._reading, self._state = threading.Lock(), threading.Lock(), threading.Lock()
        self._closed = self.ended = True
        self._release()

    def __del__(self) -> None:
        self._release()

    def _enter(self) -> int:
        """Return the descriptor, which is not released before `_leave`, even if the channel is closed."""
        with self._state:
            self._users += 1
            return self._socket.fileno()

    def _leave(self) -> None:
        with self._state:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._release()

    def _release(self) -> None:
        self._socket.close()
        for descriptor in [*self._descriptors, *(one for _, given in self._messages for one in given)]:
            os.close(descriptor)
        self._descriptors.clear()
        self._messages.clear()

    def _split_messages(self) -> None:
        start = 0
        while len(self._bytes) - start >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._bytes, start)
            end = start + _HEADER.size + size
            if len(self._bytes) < end:
                break
            if len(self._descriptors) < count:  # the system drops those for which there is no room
                raise OSError(
                    errno.EMFILE, "too many open files: memory of a message was lost. Raise the limit (ulimit -n)"
                )
            body = bytes(memoryview(self._bytes)[start + _HEADER.size : end])
            self._messages.append((body, [self._descriptors.popleft() for _ in range(count)]))
            start = end
        del self._bytes[:start]


def above_standard(descriptor: int) -> int:
    """Return a descriptor, moved if it is a standard one, which programs and libraries write to and replace.

    A new descriptor can be a standard one in a program that has closed its input, output or errors, as daemons do.
    """
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def wait(channels: Sequence[Channel], seconds: float | None, events: int = select.POLLIN) -> list[Channel]:
    """Return the channels that can be read (or written); wait up to `seconds` for the first (None: no limit)."""
    poll = select.poll()
    by_descriptor: dict[int, Channel] = {}
    entered: list[Channel] = []
    try:
        for channel in channels:
            descriptor = channel._enter()
            entered.append(channel)
            if descriptor < 0 or channel.ended or (channel._messages and events == select.POLLIN):
                return [channel]
            poll.register(descriptor, events)
            by_descriptor[descriptor] = channel
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = poll.poll(None if left is None else int(left * 1000 + 0.999))
            if ready or left is None or left <= 0:
                return [by_descriptor[descriptor] for descriptor, _ in ready]
    finally:
        for channel in entered:
            channel._leave()


def _received_descriptors(data: bytes) -> list[int]:
    """Return descriptors that were received, so that no program started here inherits them."""
    numbers = array("i")
    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    for number in numbers:
        os.set_inheritable(number, False)
    return list(map(above_standard, numbers))
