"""Transports: how ranks send each other tensors. This one is for ranks that are threads of one process."""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelfleet.errors import RankLostError
from modelfleet.types import Tensor, Tree

CHECK_SECONDS = 0.2  # between two looks whether to stop


@dataclass(frozen=True)
class Message:
    """Names what travels: an edge's tensors for one micro-batch, or their gradients."""

    edge: str
    gradient: bool
    micro: int
    source: int
    target: int

    def __str__(self) -> str:
        what = "the gradients of " if self.gradient else ""
        return f"{what}micro-batch {self.micro} over {self.edge}"


class Transport(Protocol):
    """Moves tensors between this rank and the others."""

    def begin(self, step: int, rows: Sequence[int]) -> None:
        """Start a step, with the number of rows of every micro-batch."""
        ...

    def send(self, message: Message, tree: Tree) -> None:
        """Send tensors, without waiting until they have arrived."""
        ...

    def expect(self, message: Message) -> None:
        """Get ready to receive what a message names, without waiting for it."""
        ...

    def take(self, message: Message) -> Tree:
        """Wait for what a message names, and return it.

        Raises:
            RankLostError: It did not come in time, or the other rank is lost.
        """
        ...

    def sum(self, name: str, ranks: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Sum tensors over some ranks, in place."""
        ...

    def close(self) -> None:
        """Release what the transport holds."""
        ...


class Hub:
    """What the threads of one graph share: the messages on their way, and the sums that are being taken."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, Message], Tree] = {}
        self.sums: dict[tuple[int, str], dict[int, Sequence[Tensor]]] = {}
        self.taken: dict[tuple[int, str], int] = {}
        self.closed = False

    def close(self) -> None:
        """Make every rank that waits for something stop."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class ThreadTransport:
    """Transport of one rank that is a thread. Tensors are handed over as they are."""

    def __init__(self, hub: Hub, rank: int, timeout: float, add: Callable[[Tensor, Tensor], None]) -> None:
        """Make the transport. `add` adds a tensor to another one in place, whatever devices they are on."""
        self._hub, self._rank, self._timeout, self._add = hub, rank, timeout, add
        self._step = 0

    def begin(self, step: int, rows: Sequence[int]) -> None:
        """Start a step, with the number of rows of every micro-batch."""
        self._step = step

    def send(self, message: Message, tree: Tree) -> None:
        """Hand over tensors."""
        with self._hub.changed:
            self._hub.messages[self._step, message] = tree
            self._hub.changed.notify_all()

    def expect(self, message: Message) -> None:
        """Do nothing: a message waits until it is taken."""

    def take(self, message: Message) -> Tree:
        """Wait for a message."""
        key = self._step, message
        self._wait(lambda: key in self._hub.messages, f"{message} from rank {message.source}")
        with self._hub.changed:
            return self._hub.messages.pop(key)

    def sum(self, name: str, ranks: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Sum tensors over some ranks. All add them up in the order of the ranks, so all get the same numbers."""
        hub, key = self._hub, (self._step, name)
        with hub.changed:
            hub.sums.setdefault(key, {})[self._rank] = [copy.deepcopy(tensor) for tensor in tensors]
            hub.changed.notify_all()
        self._wait(lambda: len(hub.sums[key]) == len(ranks), f"the sum of {name}")
        given = hub.sums[key]
        for number, total in enumerate(tensors):
            total[...] = 0  # torch and NumPy both take this
            for rank in ranks:
                self._add(total, given[rank][number])
        with hub.changed:
            hub.taken[key] = hub.taken.get(key, 0) + 1
            if hub.taken[key] == len(ranks):
                del hub.sums[key], hub.taken[key]

    def close(self) -> None:
        """Do nothing: the owner closes the hub."""

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        with self._hub.changed:
            if not self._hub.changed.wait_for(lambda: self._hub.closed or there(), self._timeout):
                raise RankLostError(
                    f"rank {self._rank} waited {self._timeout:g} s for {what}. The other rank hangs or is too "
                    f"slow: look at what its model does, or set a longer timeout."
                )
            if self._hub.closed and not there():
                raise StoppedError(f"rank {self._rank} was stopped while it waited for {what}")


class StoppedError(RankLostError):
    """Raised in a rank that waits, because its owner stops all ranks. The cause is the error of another one."""
