"""Statistics of replicas: by replica, by user, and by the outcome of requests."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Literal

from modelfleet.formatting import duration
from modelfleet.replicas.requests import Counts, Request

if TYPE_CHECKING:
    from rich.console import Group

MAX_USERS = 10_000  # whose numbers are kept: the last ones seen
SILENCE_LIMIT = 3.0  # seconds without a heartbeat after which a replica counts as silent; one comes twice a second
WIDTH = 110  # characters of the table as text

HealthState = Literal["ready", "busy", "starting", "silent", "given up"]


@dataclass(frozen=True)
class ReplicaStats:
    """Numbers of one replica.

    Attributes:
        rows: Rows that it has answered.
        batches: Batches that it has answered.
        seconds: Seconds for which it was busy.
        restarts: How often its worker was lost.
        broken: The reason why it was given up, if it was.
    """

    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    restarts: int = 0
    broken: str | None = None

    @property
    def rows_per_second(self) -> float:
        """Rows per second while it was busy."""
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class UserStats:
    """Numbers of one user. Waits are the seconds from `submit` until a replica took the first row.

    Attributes:
        requests: Requests that have ended.
        rows: Rows of these requests.
        mean_wait: Mean of their waits.
        longest_wait: The longest of their waits.
    """

    requests: int = 0
    rows: int = 0
    mean_wait: float = 0.0
    longest_wait: float = 0.0


@dataclass(frozen=True)
class Stats:
    """Numbers of replicas at one moment. `print` shows them as a table, in notebooks too.

    Every request that was submitted was answered, failed, was cancelled, or is open.

    Attributes:
        replicas: Numbers of each replica, by name.
        users: Numbers of each user, for the 10,000 seen last.
        submitted: Number of requests that were submitted.
        answered: Number of requests that were answered.
        failed: Number of requests that failed.
        cancelled: Number of requests that were cancelled.
        waiting: Number of open requests with rows that wait.
        waiting_rows: Number of rows that wait.
        running_rows: Number of rows that replicas have taken and not answered.
    """

    replicas: Mapping[str, ReplicaStats]
    users: Mapping[Hashable, UserStats]
    submitted: int
    answered: int
    failed: int
    cancelled: int
    waiting: int
    waiting_rows: int
    running_rows: int

    def __rich__(self) -> "Group":
        from rich.console import Group
        from rich.table import Table

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
        return Group(
            f"{self.submitted:,} requests: {self.answered:,} answered, {self.failed:,} failed, "
            f"{self.cancelled:,} cancelled; {self.waiting:,} wait with {self.waiting_rows:,} rows",
            table,
        )

    def __str__(self) -> str:
        from rich.console import Console

        # Without this, a console in a notebook shows its output there and writes nothing to `file`.
        file = StringIO()
        Console(file=file, width=WIDTH, force_terminal=False, force_jupyter=False).print(self)
        return file.getvalue().rstrip()

    __repr__ = __str__


@dataclass(frozen=True)
class Health:
    """Health of a replica. It is true if the replica takes rows, that is, if it is ready or busy.

    Attributes:
        state: "ready", "busy", "starting", "silent" or "given up".
        reason: A sentence that says more.
    """

    state: HealthState
    reason: str = ""

    def __bool__(self) -> bool:
        return self.state in ("ready", "busy")


def health(
    status: Literal["ready", "busy", "starting"], silent_seconds: float, given_up: Exception | None
) -> Health:
    """Return the health of a replica.

    Args:
        status: What its driver is doing.
        silent_seconds: Seconds since its worker's last sign of life.
        given_up: Why it was given up, if it was.
    """
    if given_up is not None:
        return Health("given up", f"{type(given_up).__name__}: {given_up}")
    if silent_seconds > SILENCE_LIMIT:
        return Health("silent", f"its worker, which was {status}, gave no sign of life for {silent_seconds:.0f} s")
    reasons = {"starting": "it is loading the model", "busy": "it is computing", "ready": "it waits for rows"}
    return Health(status, reasons[status])


class Tally:
    """Counts what replicas do. The owner holds one lock around every call."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self._replicas = {name: ReplicaStats() for name in replicas}
        self._users: OrderedDict[Hashable, UserStats] = OrderedDict()

    def count_batch(self, replica: str, rows: int, seconds: float) -> None:
        """Count a batch that a replica has answered."""
        old = self._replicas[replica]
        self._replicas[replica] = replace(
            old, rows=old.rows + rows, batches=old.batches + 1, seconds=old.seconds + seconds
        )

    def count_restart(self, replica: str) -> None:
        """Count the loss of a replica's worker."""
        old = self._replicas[replica]
        self._replicas[replica] = replace(old, restarts=old.restarts + 1)

    def count_request(self, request: Request) -> None:
        """Count a request that has ended."""
        old = self._users.pop(request.user, UserStats())
        wait = 0.0 if request.first_taken is None else request.first_taken - request.submitted
        requests = old.requests + 1
        mean = old.mean_wait + (wait - old.mean_wait) / requests
        self._users[request.user] = UserStats(requests, old.rows + request.rows, mean, max(old.longest_wait, wait))
        if len(self._users) > MAX_USERS:
            self._users.popitem(last=False)

    def stats(self, counts: Counts, given_up: Mapping[str, Exception]) -> Stats:
        """Return the numbers as they are now."""
        replicas = {
            name: replace(kept, broken=str(given_up[name]) if name in given_up else None)
            for name, kept in self._replicas.items()
        }
        return Stats(replicas, dict(self._users), **vars(counts))
