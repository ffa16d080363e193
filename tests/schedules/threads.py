"""Schedules run for real: a thread for each rank, with sends that wait for their receivers.

Shares nothing with the checker but the operations.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from modelfleet.schedules import Operation, Schedule


class Program(Protocol):
    """What the ranks compute."""

    def compute(self, rank: int, operation: Operation) -> None: ...

    def give(self, rank: int, operation: Operation) -> Any: ...

    def take(self, rank: int, operation: Operation, values: Sequence[Any]) -> None: ...


@dataclass
class MicroBatches:
    """Computes nothing: it sends the numbers of micro-batches, and notes those that are not the expected ones."""

    wrong: list[Operation] = field(default_factory=list)

    def compute(self, rank: int, operation: Operation) -> None:
        pass

    def give(self, rank: int, operation: Operation) -> int:
        return operation.micro

    def take(self, rank: int, operation: Operation, values: Sequence[int]) -> None:
        if operation.kind == "receive" and list(values) != [operation.micro]:
            self.wrong.append(operation)


@dataclass
class Ticket:
    """One operation that a rank has come to."""

    rank: int
    operation: Operation
    value: Any = None


class Rendezvous:
    """Where threads meet. All of its state is under one lock, so it knows at once when nobody can go on."""

    def __init__(self, ranks: int, program: Program) -> None:
        self.lock = threading.Lock()
        self.program = program
        self.wake = [threading.Condition(self.lock) for _ in range(ranks)]
        self.pending = [0] * ranks
        self.awake = ranks
        self.ended = 0
        self.blocked = False
        self.waiting: dict[tuple[object, ...], deque[Ticket]] = defaultdict(deque)

    def meet(self, rank: int, group: Sequence[Operation]) -> bool:
        """Come to a group of operations, and return True when all are done, or False if nobody can go on."""
        with self.lock:
            self.pending[rank] = len(group)
            for operation in group:
                value = None if operation.kind == "receive" else self.program.give(rank, operation)
                self._come(Ticket(rank, operation, value))
            if not self.pending[rank]:
                return True
            self._fall_asleep()
            while self.pending[rank] and not self.blocked:
                self.wake[rank].wait()
            return not self.pending[rank]

    def end(self) -> None:
        with self.lock:
            self.ended += 1
            self._fall_asleep()

    def _come(self, ticket: Ticket) -> None:
        rank, operation = ticket.rank, ticket.operation
        if operation.kind == "sum":
            ranks = sorted(operation.ranks)
            queues = [self.waiting["sum", operation.node, *ranks, "of", other] for other in ranks]
            queues[ranks.index(rank)].append(ticket)
        else:
            way = (rank, operation.peer) if operation.kind == "send" else (operation.peer, rank)
            channel = operation.edge, operation.gradient, *way
            queues = [self.waiting["send", *channel], self.waiting["receive", *channel]]
            queues[operation.kind == "receive"].append(ticket)
        if all(queues):
            tickets = [queue.popleft() for queue in queues]
            values = [other.value for other in tickets if other.operation.kind != "receive"]
            for other in tickets:
                self.program.take(other.rank, other.operation, values)
                self._done(other.rank, but=rank)

    def _done(self, rank: int, but: int) -> None:
        self.pending[rank] -= 1
        if not self.pending[rank] and rank != but:
            self.awake += 1
            self.wake[rank].notify()

    def _fall_asleep(self) -> None:
        self.awake -= 1
        if not self.awake and self.ended < len(self.wake):
            self.blocked = True
            for condition in self.wake:
                condition.notify()


def run(schedule: Schedule, program: Program) -> bool:
    """Run a schedule, and return whether it ended. If not, all threads that were left waited for each other."""
    meeting_point = Rendezvous(len(schedule.devices), program)
    errors: list[BaseException] = []

    def go_through(rank: int) -> None:
        try:
            for group in _groups(schedule.operations[rank]):
                if group[0].kind in ("send", "receive", "sum"):
                    if not meeting_point.meet(rank, group):
                        return
                else:
                    program.compute(rank, group[0])
        except BaseException as error:  # shown by the test, whatever it is
            errors.append(error)
        meeting_point.end()

    _in_threads(go_through, len(schedule.devices))
    if errors:
        raise errors[0]
    return not meeting_point.blocked


def _in_threads(target: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _groups(operations: Sequence[Operation]) -> list[list[Operation]]:
    groups: list[list[Operation]] = []
    for operation in operations:
        if operation.with_previous:
            groups[-1].append(operation)
        else:
            groups.append([operation])
    return groups
