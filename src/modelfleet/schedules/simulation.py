"""When each operation of a schedule would run, with the times of a spec."""

from collections import defaultdict
from collections.abc import Sequence

from modelfleet.schedules.checking import check, groups_of
from modelfleet.schedules.matching import Meeting, match
from modelfleet.schedules.operations import TRANSFERS, Operation, Schedule
from modelfleet.schedules.spec import GraphSpec
from modelfleet.schedules.tensors import Tensor, peak_bytes, used
from modelfleet.schedules.timeline import Event, Timeline


def simulate(schedule: Schedule, spec: GraphSpec, *, blocking: bool = False) -> Timeline:
    """Return the timeline of a schedule whose computations and transfers take the times of a spec.

    Sums and optimizers' steps take no time, but a sum waits until all its ranks have come.

    Args:
        schedule: The schedule.
        spec: The times and sizes.
        blocking: Whether a rank waits in every send and receive until both sides are there and the transfer is
            done, as in the proof that a schedule ends. Otherwise transfers go on beside computations, those from
            one rank to another one after the other, and a computation waits for its own inputs only.

    Raises:
        DeadlockError: If the schedule would hang.
        InputError: If a rank uses tensors that it does not have.
    """
    check(schedule)
    peak = peak_bytes(schedule, spec)
    events = _Simulation(schedule, spec, blocking=blocking).run()
    return Timeline(schedule.devices, tuple(sorted(events, key=lambda e: (e.start, e.end, e.rank))), peak)


class _Simulation:
    """Goes through the lists of all ranks, each as far as it can, until all have ended."""

    def __init__(self, schedule: Schedule, spec: GraphSpec, *, blocking: bool) -> None:
        ranks = len(schedule.devices)
        self.schedule = schedule
        self.spec = spec
        self.blocking = blocking
        self.groups = groups_of(match(schedule), ranks)
        self.next_group = [0] * ranks
        self.index = [0] * ranks
        self.clock = [0.0] * ranks
        self.came: dict[Meeting, dict[int, float]] = defaultdict(dict)  # when each rank came to a meeting
        self.sent: dict[Meeting, tuple[float, float]] = {}  # when a transfer began and ended
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.arrived: dict[tuple[int, Tensor], float] = {}
        self.events: list[Event] = []

    def run(self) -> list[Event]:
        unfinished = set(range(len(self.clock)))
        while unfinished:
            for rank in sorted(unfinished):
                while self.index[rank] < len(self.schedule.operations[rank]):
                    if not self._step(rank):
                        break
                else:
                    unfinished.discard(rank)
        return self.events

    def _step(self, rank: int) -> bool:
        """Go through a rank's next operation or group, and return False if it must wait for another rank first."""
        operations, index = self.schedule.operations[rank], self.index[rank]
        operation = operations[index]
        if operation.kind not in TRANSFERS and operation.kind != "sum":
            self._compute(rank, operation)
            self.index[rank] += 1
            return True
        group = self.groups[rank][self.next_group[rank]]
        size = 1
        while index + size < len(operations) and operations[index + size].with_previous:
            size += 1
        own = operations[index : index + size]
        for meeting in group:
            self.came[meeting].setdefault(rank, self.clock[rank])
        went_on = (
            self._meet(rank, own, group)
            if self.blocking or operation.kind == "sum"
            else self._pass(own, group, rank)
        )
        if went_on:
            self.next_group[rank] += 1
            self.index[rank] += size
        return went_on

    def _compute(self, rank: int, operation: Operation) -> None:
        if operation.kind == "free":
            return
        seconds = self.spec.node(operation.node).seconds(operation.kind)
        start = self.clock[rank]
        arrivals = [self.arrived.get((rank, tensor), 0.0) for tensor in used(operation, self.spec)]
        waited = max(0.0, max(arrivals, default=0.0) - start)
        self.clock[rank] = start + waited + seconds
        self.events.append(Event(rank, operation, start, self.clock[rank], waited))

    def _meet(self, rank: int, own: Sequence[Operation], group: Sequence[Meeting]) -> bool:
        """Wait until all ranks of a group's meetings have come."""
        if any(len(self.came[meeting]) < len({place.rank for place in meeting.places}) for meeting in group):
            return False
        start = self.clock[rank]
        for operation, meeting in zip(own, group, strict=True):
            begin = max(self.came[meeting].values())
            edge = self.spec.edge.get(operation.edge)
            end = begin + (edge.seconds if edge else 0.0)
            self.events.append(Event(rank, operation, start, end, begin - start, edge.bytes if edge else 0))
            self.clock[rank] = max(self.clock[rank], end)
        return True

    def _pass(self, own: Sequence[Operation], group: Sequence[Meeting], rank: int) -> bool:
        """Begin the transfers of a group without waiting for their ends."""
        pairs = list(zip(own, group, strict=True))
        for operation, meeting in pairs:
            if operation.kind == "send" and meeting not in self.sent:
                link = rank, operation.peer
                begin = max(self.clock[rank], self.link_free[link])
                self.link_free[link] = begin + self.spec.edge[operation.edge].seconds
                self.sent[meeting] = begin, self.link_free[link]
        if not all(meeting in self.sent for meeting in group):
            return False
        for operation, meeting in pairs:
            begin, end = self.sent[meeting]
            self.events.append(Event(rank, operation, begin, end, 0.0, self.spec.edge[operation.edge].bytes))
            if operation.kind == "receive":
                self.arrived[rank, Tensor(operation.edge, operation.gradient, operation.micro)] = end
        return True
