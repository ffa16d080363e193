"""Exchanging by rows: every device gets all members' values of its share of a batch's rows, and combines them.

The lanes of all devices go through their batches in step. No device ever holds more than its own members' values
of one batch, and all members' values of its share.
"""

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Protocol

from modelfleet.ensembles.parts import Answer, Outputs
from modelfleet.ensembles.reduction import batches_of
from modelfleet.ensembles.whole import Whole, share_of
from modelfleet.errors import InputError
from modelfleet.runs.opening import OpenLane

Shares = list[Outputs] | None
"""Some members' values for some rows; None from a device whose lanes have no more batches."""


class Exchange(Protocol):
    """Connects a device with the others."""

    @property
    def rank(self) -> int:
        """Return the number of this device."""
        ...

    @property
    def size(self) -> int:
        """Return the number of devices."""
        ...

    def swap(self, shares: Sequence[Shares]) -> list[Shares]:
        """Give every device a share, and return what every device has given to this one."""
        ...


class Alone:
    """The only device."""

    rank, size = 0, 1

    def swap(self, shares: Sequence[Shares]) -> list[Shares]:
        """Return the share."""
        return list(shares)


class Table:
    """A table at which the threads of several devices meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._shares: list[Sequence[Shares]] = [[] for _ in range(size)]
        self._barrier = threading.Barrier(size)

    def swap(self, rank: int, shares: Sequence[Shares]) -> list[Shares]:
        """Put down shares for all threads, and take what all have put down for this one."""
        self._shares[rank] = shares
        self._barrier.wait()
        taken = [given[rank] for given in self._shares]
        self._barrier.wait()  # nobody puts down the next ones before all have taken these
        self._shares[rank] = []
        return taken

    def leave(self) -> None:
        """Wake the other threads, because one has failed. They raise `threading.BrokenBarrierError`."""
        self._barrier.abort()


class Seat:
    """The place of one thread at a table."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, table.size

    def swap(self, shares: Sequence[Shares]) -> list[Shares]:
        """Give every thread a share, and return what every thread has given to this one."""
        return self._table.swap(self.rank, shares)


class Ranks:
    """The place of one process in a framework's process group."""

    def __init__(self, group: Any) -> None:  # a framework's own type
        self._group = group
        self.rank, self.size = int(group.rank), int(group.size)

    def swap(self, shares: Sequence[Shares]) -> list[Shares]:
        """Give every process a share, and return what every process has given to this one."""
        packed = [pickle.dumps(share, protocol=pickle.HIGHEST_PROTOCOL) for share in shares]
        return [pickle.loads(part) for part in self._group.swap(packed)]


def combine_in_step(
    opened: Sequence[OpenLane], way: Whole, exchange: Exchange, *, own_stream: bool = False
) -> list[Answer | None]:
    """Return the answer for this device's share of every batch. None: it has no rows of that batch.

    Args:
        opened: The lanes of this device.
        way: How the values of all members become one.
        exchange: Connects this device with the others.
        own_stream: True if the device has a thread of its own.

    Raises:
        InputError: Members differ in the shape of their outputs, or in their rows.
    """
    lanes = [batches_of(one.lane, one.feed) for one in opened]
    streams = [one.lane.engine.stream for one in opened] if own_stream else []
    answers: list[Answer | None] = []
    for batch in count():
        found = _next(lanes, streams)
        size = exchange.size
        taken = exchange.swap([None if found is None else share_of(found, rank, size) for rank in range(size)])
        del found
        ended = [share is None for share in taken]
        if all(ended):
            return answers
        if any(ended):
            raise InputError(
                f"some members have no rows in batch {batch + 1}, and others have. An ensemble needs every "
                f"member's output for the same rows: give all members equally many."
            )
        mine = [outputs for share in taken if share is not None for outputs in share]
        answers.append(way.answer(mine) if mine else None)
        del taken, mine
    raise AssertionError("batches have an end")


def _next(lanes: Sequence[Iterator[list[Outputs]]], streams: Sequence[Any]) -> list[Outputs] | None:
    """Return what the members of all lanes say about the next batch; None after the last batch."""
    found: list[Outputs] = []
    for number, lane in enumerate(lanes):
        if streams:
            context: AbstractContextManager[object] = streams[number]()
            with context:
                found += next(lane, [])
        else:
            found += next(lane, [])
    return found or None


def join_shares(by_rank: Sequence[Sequence[Answer | None]]) -> list[Answer]:
    """Return the answers of all devices in the order of the rows, given those of each device by batch."""
    return [answer for batch in zip(*by_rank, strict=True) for answer in batch if answer is not None]
