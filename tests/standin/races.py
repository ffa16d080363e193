"""Finds races: what a stream reads or writes while another may not be done with it.

Nothing runs asynchronously on the stand-in. So races are found by what is known to have happened before what: a
stream does its work in order; an event orders what was recorded before it and what waits for it; and the host,
when it waits, knows that the work is done, and so does all that it launches afterwards. Two uses of the same
memory of which one writes, without such an order, are a race on a GPU.

What the host writes to pinned memory is not seen. But it writes between two copies from the same memory, so it
must know by then that the first of them is done.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.standin.device import COUNT, Told, listening, where


@dataclass(frozen=True)
class Race:
    """Two uses of the same memory without an order."""

    what: str
    before: str
    line: str
    line_before: str

    def __str__(self) -> str:
        return f"{self.what} at {self.line} does not wait for {self.before} at {self.line_before}"


@dataclass(frozen=True)
class Use:
    """One use of some memory."""

    stream: int
    number: int
    """How many operations the stream had been given, this one included."""
    text: str
    line: str


class Races:
    """Listens to the devices, and collects races. What is counted is operations, by stream."""

    def __init__(self) -> None:
        self.found: list[Race] = []
        self.streams: set[int] = set()
        self.operations = 0
        self._given: Counter[int] = Counter()
        self._before: dict[int, Counter[int]] = defaultdict(Counter)  # by stream: what is done when it goes on
        self._host: Counter[int] = Counter()  # what the host has waited for
        self._events: dict[int, Counter[int]] = {}
        self._writes: dict[int, Use] = {}
        self._reads: dict[int, dict[int, Use]] = defaultdict(dict)  # by place and stream, since the last write
        self._sources: dict[int, Use] = {}  # by place in pinned memory: the last copy from there
        self._lock = threading.RLock()  # a tensor may be freed within a call

    def __call__(self, told: Told) -> None:
        """Take note of something that a device was asked to do."""
        with self._lock:
            if told.kind == "record":
                self._events[told.read[0]] = self._done_after(told.stream)
            elif told.kind == "wait":
                self._before[told.stream] |= self._events.get(told.read[0], Counter())
            elif told.kind == "query":
                self._host |= self._events.get(told.read[0], Counter())
            elif told.kind == "sync":
                self._wait(told)
            elif told.kind == "free":
                for place in told.written:
                    self._writes.pop(place, None)
                    self._reads.pop(place, None)
            elif told.kind != "pinned":
                self._use(told)

    def _done_after(self, stream: int) -> Counter[int]:
        done = self._before[stream] | self._host
        done[stream] = self._given[stream]
        return done

    def _wait(self, told: Told) -> None:
        if told.text == "event":
            self._host |= self._events.get(told.read[0], Counter())
            return
        streams = [told.stream]
        if told.text == "device":
            streams = [stream for stream in self._given if stream % COUNT == told.stream]
        for stream in streams:
            self._host |= self._done_after(stream)

    def _use(self, told: Told) -> None:
        stream, read = told.stream, told.read
        if told.kind == "p2p":  # both streams wait for each other, before and after
            other, *read = read
            self._before[stream] |= self._done_after(other)
        self._given[stream] += 1
        self.operations += 1
        self.streams.add(stream)
        self._before[stream] |= self._host
        use = Use(stream, self._given[stream], told.text or told.kind, where())
        if told.kind == "h2d":
            self._check_pinned(use, read)
            read = ()
        for place in read:
            self._check("reads", use, self._writes.get(place))
            self._reads[place][stream] = use
        for place in told.written:
            for earlier in (self._writes.get(place), *self._reads[place].values()):
                self._check("writes", use, earlier)
            self._writes[place] = use
            self._reads[place] = {}
        if told.kind == "p2p":
            self._before[told.read[0]] |= self._done_after(stream)
        if told.waits:
            self._host |= self._done_after(stream)

    def _check_pinned(self, use: Use, places: Sequence[int]) -> None:
        for place in places:
            earlier = self._sources.get(place)
            if earlier is not None and earlier.number > self._host[earlier.stream]:
                self.found.append(
                    Race("the host's writing to pinned memory", earlier.text, use.line, earlier.line)
                )
            self._sources[place] = use

    def _check(self, verb: str, use: Use, earlier: Use | None) -> None:
        if earlier is None or earlier.stream == use.stream:
            return
        if earlier.number > self._before[use.stream][earlier.stream]:
            what, before = (
                f"{use.text} {verb} on stream {use.stream}",
                f"{earlier.text} on stream {earlier.stream}",
            )
            self.found.append(Race(what, before, use.line, earlier.line))


@contextmanager
def watching() -> Iterator[Races]:
    """Collect the races within this context."""
    races = Races()
    with listening(races):
        yield races
