"""What replicas have done: by replica, by user, and by what became of the requests."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from modelfleet.replicas.queue import Counts
from modelfleet.replicas.requests import Request
from modelfleet.words import duration

USERS = 10_000  # whose numbers are kept: those seen last


@dataclass(frozen=True)
class ReplicaStats:
    """One replica."""

    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    """That it was busy."""
    restarts: int = 0
    broken: str | None = None
    """Why it was given up, if it was."""

    @property
    def rows_per_second(self) -> float:
        """While it was busy."""
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class UserStats:
    """One user. Waits are from `submit` until the first row was taken, in seconds."""

    requests: int = 0
    rows: int = 0
    mean_wait: float = 0.0
    longest_wait: float = 0.0


@dataclass(frozen=True)
class Stats:
    """Replicas at one moment. Every request that was submitted was answered, failed, was cancelled, or is open."""

    replicas: Mapping[str, ReplicaStats]
    users: Mapping[Hashable, UserStats]
    submitted: int
    answered: int
    failed: int
    cancelled: int
    waiting: int
    """Requests with rows that wait."""
    waiting_rows: int
    running_rows: int

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        title = (
            f"{self.submitted:,} requests: {self.answered:,} answered, {self.failed:,} failed, "
            f"{self.cancelled:,} cancelled; {self.waiting:,} wait with {self.waiting_rows:,} rows"
        )
        table = Table()
        for column in ("replica", "rows", "batches", "busy", "rows / s", "restarts"):
            table.add_column(column)
        for name, replica in self.replicas.items():
            table.add_row(
                name,
                f"{replica.rows:,}",
                f"{replica.batches:,}",
                duration(replica.seconds),
                f"{replica.rows_per_second:,.0f}",
                str(replica.restarts) if replica.broken is None else f"given up: {replica.broken}",
            )
        console = Console(file=StringIO(), width=110, force_terminal=False)
        console.print(title)
        console.print(table)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip()


SILENT = 3.0  # seconds without a sign of life, which comes every second


@dataclass(frozen=True)
class Health:
    """How a replica is. It is true if the replica is there: ready or busy."""

    state: str
    """ "ready", "busy", "starting", "silent" or "given up"."""
    reason: str = ""

    def __bool__(self) -> bool:
        return self.state in ("ready", "busy")


def health(state: str, silent: float, broken: Exception | None) -> Health:
    """How a replica is, of which nothing was heard for `silent` seconds."""
    if broken is not None:
        return Health("given up", f"{type(broken).__name__}: {broken}")
    if silent > SILENT:
        return Health("silent", f"nothing was heard of its worker for {silent:.0f} s, which was {state}")
    reasons = {"starting": "it is loading the model", "busy": "it is computing", "ready": "it waits for rows"}
    return Health(state, reasons[state])


class Tally:
    """Keeps count; whoever holds it has one lock around every call."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self._replicas: dict[str, list[Any]] = {name: [0, 0, 0.0, 0] for name in replicas}
        self._users: OrderedDict[Hashable, list[Any]] = OrderedDict()

    def answered(self, replica: str, rows: int, seconds: float) -> None:
        """A replica has answered a batch."""
        kept = self._replicas[replica]
        kept[0] += rows
        kept[1] += 1
        kept[2] += seconds

    def lost(self, replica: str) -> None:
        """A replica was lost."""
        self._replicas[replica][3] += 1

    def ended(self, request: Request) -> None:
        """A request has its outcome."""
        kept = self._users.setdefault(request.user, [0, 0, 0.0, 0.0])
        self._users.move_to_end(request.user)
        if len(self._users) > USERS:
            self._users.popitem(last=False)
        wait = 0.0 if request.begun is None else request.begun - request.submitted
        kept[0] += 1
        kept[1] += request.rows
        kept[2] += wait
        kept[3] = max(kept[3], wait)

    def stats(self, counts: Counts, broken: Mapping[str, Exception]) -> Stats:
        """As it is now."""
        replicas = {
            name: ReplicaStats(*kept, broken=str(broken[name]) if name in broken else None)
            for name, kept in self._replicas.items()
        }
        users = {
            user: UserStats(requests, rows, waited / requests, longest)
            for user, (requests, rows, waited, longest) in self._users.items()
        }
        return Stats(
            replicas,
            users,
            counts.submitted,
            counts.answered,
            counts.failed,
            counts.cancelled,
            counts.waiting,
            counts.waiting_rows,
            counts.running_rows,
        )
