"""Heartbeats: a few counters in memory that a process and its owner share. They outlive the process."""

import time

from modelfleet.workers import shared_memory
from modelfleet.workers.channel import MAX_COUNTED_GAP

BEAT_INTERVAL = 0.5  # seconds
_SIZE = 64  # bytes


class _Counter:
    """One number of a heartbeat, by its index in the shared memory."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, heartbeat: "Heartbeat", kind: type) -> int:
        return heartbeat._cells[self._index]

    def __set__(self, heartbeat: "Heartbeat", value: int) -> None:
        heartbeat._cells[self._index] = value


class Heartbeat:
    """Counters that a process updates and its owner reads, whatever either of them is doing."""

    def __init__(self, descriptor: int) -> None:
        self._cells: memoryview[int] = shared_memory.map_memory(descriptor, _SIZE).cast("Q")

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new heartbeat, for both sides."""
        return shared_memory.create(_SIZE)

    beats = _Counter(0)
    """Counts up every `BEAT_INTERVAL` seconds, from 1 on."""
    answers_begun = _Counter(1)
    """Number of answers that the process has started to work on."""
    busy = _Counter(2)
    """1 while the process computes, imports or loads; 0 while it waits for a message."""
    last_ping = _Counter(3)
    """Number of the last ping that the process has received."""


class Stopwatch:
    """Seconds of this process's own running time.

    At most `MAX_COUNTED_GAP` seconds are counted between two reads: time in which this process was stopped, by
    Ctrl-Z for example, does not count. So read it several times a second.
    """

    def __init__(self) -> None:
        self._seconds, self._last_read = 0.0, time.monotonic()

    def restart(self) -> None:
        """Count from zero again."""
        self._seconds, self._last_read = 0.0, time.monotonic()

    def read(self) -> float:
        """Return the seconds since the start or the last restart."""
        now = time.monotonic()
        self._seconds += min(now - self._last_read, MAX_COUNTED_GAP)
        self._last_read = now
        return self._seconds


class SilenceTimer:
    """Seconds for which a heartbeat has not changed."""

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self._last_beat: float | None = None

    def read(self, beat: float) -> float:
        """Return for how many seconds `beat` has been the same."""
        if beat != self._last_beat:
            self._last_beat = beat
            self._stopwatch.restart()
        return self._stopwatch.read()
