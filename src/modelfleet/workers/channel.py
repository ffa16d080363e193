"""Messages between two processes of ours: a socket pair, over which open files can be sent along.

A message is a short header, then the message itself. File descriptors travel beside the header (SCM_RIGHTS).
"""

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

_HEADER = struct.Struct("<QB")  # the length of what follows, and the number of descriptors
_PIECE = 1 << 14  # bytes read at once
_MOST = 250  # descriptors in a message; Linux takes 253
_SPACE = socket.CMSG_SPACE(_MOST * array("i").itemsize)
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
SLICE = 1.0  # seconds: time is counted in slices of at most this, so that a stopped process does not count

Message = tuple[bytes, list[int]]


class Channel:
    """One end of a socket pair. Any thread may send, read and close."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket = own
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._state = threading.Lock()
        self._users = 0  # threads at the descriptor: it must not become that of something else meanwhile
        self._closed = False
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()
        self._read: deque[Message] = deque()
        self.ended = False
        """Whether the other side is gone; what it had said before can still be read."""

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """A channel, and the socket for the other side."""
        own, other = (socket.socket(fileno=above_standard(one.detach())) for one in socket.socketpair())
        return cls(own), other

    def fileno(self) -> int:
        """The descriptor, -1 if it is closed."""
        return self._socket.fileno()

    def send(
        self, message: bytes, descriptors: Sequence[int] = (), *, patience: Callable[[], bool] | None = None
    ) -> None:
        """Send a message. Descriptors stay the sender's to close.

        A reader that does not read holds this up. `patience` is then asked every second whether to go on.
        Raises OSError if the other side is gone, or if there is no patience left.
        """
        if len(descriptors) > _MOST:
            raise OSError(f"{len(descriptors)} descriptors in one message; at most {_MOST} can be sent")
        rest = memoryview(_HEADER.pack(len(message), len(descriptors)) + message)
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        with self._sending:
            self._enter()
            try:
                while rest:
                    try:
                        rest = rest[self._socket.sendmsg([rest], beside, _NO_SIGNAL) :]
                        beside = []
                    except BlockingIOError:
                        if not self.wait(SLICE, select.POLLOUT) and patience is not None and not patience():
                            self.shut()  # half a message is on its way: nothing can follow it
                            raise TimeoutError("the other side does not read") from None
            finally:
                self._leave()

    def next(self) -> Message | None:
        """The next message that has come, with its descriptors, which are the caller's to close."""
        with self._reading:
            if self._read:
                return self._read.popleft()
            self._enter()
            try:
                while not self._read and not self.ended:
                    try:
                        got, beside, _, _ = self._socket.recvmsg(_PIECE, _SPACE, _CLOEXEC)
                    except BlockingIOError:
                        break
                    except OSError:
                        got, beside = b"", []
                    for level, kind, data in beside:
                        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                            self._descriptors.extend(_received(data))
                    self._bytes += got
                    self._cut()
                    self.ended = not got
            finally:
                self._leave()
            return self._read.popleft() if self._read else None

    def wait(self, seconds: float | None, events: int = select.POLLIN) -> bool:
        """Whether there is something to read (or room to write) within so many seconds; the end counts, too."""
        return bool(wait([self], seconds, events))

    def shut(self) -> None:
        """End the conversation for both sides, and for every thread of this one."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it. The descriptor is given back when nobody waits for it any more."""
        with self._state:
            self._closed = True
            idle = not self._users
        if idle:
            self._give_back()
        else:
            self.shut()

    def forget(self) -> None:
        """In a forked child: give back the descriptor, and leave the conversation to the parent."""
        self._sending, self._reading, self._state = threading.Lock(), threading.Lock(), threading.Lock()
        self._closed = self.ended = True
        self._give_back()

    def __del__(self) -> None:
        self._give_back()

    def _enter(self) -> int:
        """Keep the descriptor from being given back, whoever closes the channel, until `_leave`."""
        with self._state:
            self._users += 1
            return self._socket.fileno()

    def _leave(self) -> None:
        with self._state:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._give_back()

    def _give_back(self) -> None:
        self._socket.close()
        for descriptor in [*self._descriptors, *(one for _, given in self._read for one in given)]:
            os.close(descriptor)
        self._descriptors.clear()
        self._read.clear()

    def _cut(self) -> None:
        """Cut what has come into messages."""
        start = 0
        while len(self._bytes) - start >= _HEADER.size:
            size, given = _HEADER.unpack_from(self._bytes, start)
            end = start + _HEADER.size + size
            if len(self._bytes) < end:
                break
            message = bytes(memoryview(self._bytes)[start + _HEADER.size : end])
            self._read.append((message, [self._descriptors.popleft() for _ in range(given)]))
            start = end
        del self._bytes[:start]


def above_standard(descriptor: int) -> int:
    """A descriptor that is none of the standard ones, which programs and libraries write to and replace.

    A new one is, in a program that has closed its input, output or errors, as daemons do.
    """
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def wait(channels: Sequence[Channel], seconds: float | None, events: int = select.POLLIN) -> list[Channel]:
    """Those of some channels that have something to read, at the latest after so many seconds (None: no limit)."""
    poll = select.poll()
    found: dict[int, Channel] = {}
    opened: list[Channel] = []
    try:
        for channel in channels:
            descriptor = channel._enter()
            opened.append(channel)
            if descriptor < 0 or channel.ended or (channel._read and events == select.POLLIN):
                return [channel]
            poll.register(descriptor, events)
            found[descriptor] = channel
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = poll.poll(None if left is None else int(left * 1000 + 0.999))
            if ready or left is None or left <= 0:
                return [found[descriptor] for descriptor, _ in ready]
    finally:
        for channel in opened:
            channel._leave()


def _received(data: bytes) -> list[int]:
    """Descriptors that came; no program that this one starts gets them."""
    numbers = array("i")
    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    for number in numbers:
        os.set_inheritable(number, False)
    return list(map(above_standard, numbers))
