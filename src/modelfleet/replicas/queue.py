"""The books of the replicas' queue: whose rows go next, to which replica, and what became of every row.

No threads, clocks or frameworks: the time is passed in as `now`, outputs are trees nobody looks into, and whoever
holds the queue has one lock around every call.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real
from typing import Any

from modelfleet.errors import ClosedError, DeadlineError, FleetError, InputError, QueueFullError, unknown
from modelfleet.replicas.lines import Deadlines, Line
from modelfleet.replicas.rates import Rates
from modelfleet.replicas.requests import Batch, Request, Slice, Status, between, cut, still_open
from modelfleet.words import count

BALANCES = ("least-busy", "sticky")
ISOLATIONS = ("rows", "batch", "device")
DEATHS = 3  # that a single row is given before it fails
USERS = 10_000  # without open requests, whose replica is remembered: those seen last
WAIT = 1.0  # seconds to suggest while no replica's rate is known
SHORTEST_WAIT = 0.01


@dataclass
class Counts:
    """Requests by what became of them, and the rows of open requests that wait or run."""

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    waiting: int = 0
    """Open requests with rows that wait: not taken yet, or to be tried again."""
    waiting_rows: int = 0
    running_rows: int = 0

    @property
    def open(self) -> int:
        """Requests without an outcome."""
        return self.submitted - self.answered - self.failed - self.cancelled


class Queue:
    """Deals the rows of many users out to replicas, fairly, and keeps the books.

    `replicas` are their names. A batch has at most `batch_size` rows; at most `max_queue` requests wait (None:
    any number). `balance`, `isolation` and `batch_wait` are those of `modelfleet.Replicas`. `counts` is exact.

    A free replica is given what `take` says. Each batch is then reported exactly once: `answered`, `sorted_out`
    (some rows were answered, some were not), `failed` (none can be), `died` (the replica did) or `returned` (it
    was not run). The reports give the requests that ended by them.

    Unless rows may share a batch (isolation "rows"), a batch is a request, or a part of one cut at multiples of
    `batch_size`; it is never cut, joined or changed after that.
    """

    def __init__(
        self,
        replicas: Sequence[str],
        *,
        batch_size: int,
        max_queue: int | None,
        balance: str,
        isolation: str,
        batch_wait: float = 0.0,
    ) -> None:
        if not replicas or len(set(replicas)) != len(replicas):
            raise InputError(f"replicas are named {list(replicas)!r}. Give at least one name, and none twice.")
        _check_positive("batch_size", batch_size)
        if max_queue is not None:
            _check_positive("max_queue", max_queue)
        if balance not in BALANCES:
            raise unknown("balance", balance, BALANCES)
        if isolation not in ISOLATIONS:
            raise unknown("isolation", isolation, ISOLATIONS)
        if not isinstance(batch_wait, Real) or not 0 <= float(batch_wait) < float("inf"):
            raise InputError(f"batch_wait={batch_wait!r}. Give the seconds that a batch may take to fill, or 0.")
        self.counts = Counts()
        self._batch_size = batch_size
        self._max_queue = max_queue
        self._mixed = isolation == "rows"
        self._pinned = isolation == "device"
        self._live = dict.fromkeys(replicas)
        self._rates = Rates()
        self._deadlines = Deadlines()
        self._open: dict[Request, None] = {}
        self._running: set[Batch] = set()
        self._closed: Exception | None = None
        self._given_up: dict[str, Exception] = {}
        # Users with a home wait in its line, all others in one line for all replicas.
        self._homely = self._pinned or balance == "sticky"
        self._lines: dict[str | None, Line] = {name: Line() for name in (replicas if self._homely else [None])}
        self._homes: dict[Hashable, str] = {}
        self._busy: Counter[Hashable] = Counter()  # open requests of users with a home
        self._idle: OrderedDict[Hashable, None] = OrderedDict()  # users with a home and no open requests
        self._batch_wait = float(batch_wait) if self._mixed else 0.0  # a request alone can't get fuller
        self._guests: dict[str, dict[Hashable, None]] = {name: {} for name in replicas}

    def submit(
        self,
        user: Hashable,
        data: Any,
        rows: int,
        now: float,
        deadline: float | None = None,
        priority: int = 0,
    ) -> Request:
        """Put a request in the queue; one without rows is answered at once. `deadline` is a time like `now`."""
        if self._closed is not None:
            raise ClosedError(f"a request of user {user!r} came after the end: {self._closed}") from self._closed
        _check_request(user, rows, deadline, priority)
        gone = self._given_up.get(self._homes.get(user, ""))
        if gone is not None:
            raise ClosedError(f"user {user!r} is pinned to a replica that is gone: {gone}") from gone
        if rows and self.full:
            wait = self.wait()
            raise QueueFullError(
                f"the request of user {user!r} finds the queue full: {self.counts.waiting:,} requests wait, "
                f"and max_queue={self._max_queue}. Submit it again in {wait:.2g} s, submit more rows at once, "
                f"or give a larger max_queue.",
                wait,
            )
        request = Request(user, data, rows, now, deadline, int(priority))
        self.counts.submitted += 1
        self._open[request] = None
        self._deadlines.add(request)
        if rows:
            self._shift(request, waiting=rows)
            self._line(user).join(request)
            if self._homely:
                self._busy[user] += 1
                self._idle.pop(user, None)
        else:
            self._end(request, "answered")
        return request

    @property
    def full(self) -> bool:
        """Whether as many requests wait as may wait."""
        return self._max_queue is not None and self.counts.waiting >= self._max_queue

    @property
    def ahead(self) -> int:
        """How many rows wait; as if each replica had only as many as the one that has the fewest of its own."""
        if not self._homely:
            return self.counts.waiting_rows
        own = [self._lines[name] for name in self._live] or list(self._lines.values())
        return len(own) * min(sum(request.rows - request.cursor for request in line.since) for line in own)

    def take(self, replica: str, now: float, most: int | None = None, several: int = 1) -> Batch | None:
        """The next rows for a free replica, at most `most`; None if there are none for it, or while it is lost.

        `several` times the size of a batch may be taken at once, where so many rows wait. A batch that is not full
        is taken when its oldest row has waited for `batch_wait`: ask again at the time that `due` tells.

        Deadlines are not looked at: call `expire` before.
        """
        assert replica in self._guests, replica
        assert most is None or most >= 1, most
        if replica not in self._live:
            return None
        line = self._lines[replica if self._homely else None]
        if self._mixed:
            size = min(self._batch_size, most or self._batch_size)
            most = min(self._batch_size * several, most or self._batch_size * several, self._share(replica))
        else:
            size = most = self._batch_size
        due = self.due(replica)
        new = due is None or now >= due or self.full or line.fills(size)
        batch = line.take(size, most, mixed=self._mixed, new=new)
        if batch is None:
            return None
        batch.replica = replica
        self._running.add(batch)
        for piece in batch.slices:
            self._shift(piece.request, waiting=-piece.rows, running=piece.rows)
            if piece.request.begun is None:
                piece.request.begun = now
        return batch

    def due(self, replica: str) -> float | None:
        """When a part-filled batch for a replica is taken; None if nothing has to wait for its batch to fill."""
        line = self._lines[replica if self._homely else None]
        oldest = next(iter(line.since), None) if self._batch_wait else None
        return None if oldest is None else oldest.submitted + self._batch_wait

    def hurry(self) -> None:
        """Wait for no batch to fill any more: no more rows will come."""
        self._batch_wait = 0.0

    def answered(self, batch: Batch, outputs: Sequence[Any], now: float) -> list[Request]:
        """Keep the outputs of a batch: a tree per slice, with as many rows (which is not looked at here)."""
        return self.sorted_out(batch, list(zip(batch.slices, outputs, strict=True)), {}, (), now)

    def sorted_out(
        self,
        batch: Batch,
        answers: Sequence[tuple[Slice, Any]],
        errors: Mapping[int, Exception],
        left: Sequence[tuple[int, int]],
        now: float,
        *,
        first: bool = False,
    ) -> list[Request]:
        """Keep what became of each row of a batch.

        answers: outputs by the rows that they are for. errors: by the row's position in the batch. left: positions
        (start, stop) of rows to be tried again, each span in a batch of its own; `first`, before all else.
        """
        self._reported(batch)
        for piece, output in answers:
            if piece.request.status == "open":
                piece.request.pieces[piece.start, piece.stop] = output
                piece.request.latest = now
                self._shift(piece.request, running=-piece.rows)
        bad = self._blame(batch, errors)
        for start, stop in reversed(left) if first else left:
            self._again(still_open(between(batch.slices, start, stop)), batch.strikes, first)
        users = dict.fromkeys(piece.request.user for piece in batch.slices)
        if self._mixed and bad:
            for user in bad:
                self._line(user).suspect(user)
        elif len(users) == 1 and not left:
            user = next(iter(users))
            if not self._homely or user in self._homes:  # it may have been forgotten
                self._line(user).cleared(user)
        return self._ended(still_open(batch.slices))

    def failed(self, batch: Batch, error: Exception) -> list[Request]:
        """No row of a batch can be answered, for the same reason."""
        return self.sorted_out(batch, (), dict.fromkeys(range(batch.rows), error), (), 0.0)

    def died(self, batch: Batch, reason: str) -> list[Request]:
        """A replica died or hung with a batch: try it once more as it was, then look for the guilty rows.

        Bisecting begins with the second death, and from then on every death bisects. A single row fails when it is
        charged with three. For the halves the deaths before count as one, so a row that was merely in bad company
        needs two more of its own. A batch that must not be cut is tried as it is, and fails with the third death.
        """
        slices = self._reported(batch)
        strikes = batch.strikes + 1
        if strikes >= DEATHS and (batch.rows == 1 or not self._mixed):
            return self._given_up_on(slices, reason)
        if strikes == 1 or batch.rows == 1 or not self._mixed:
            self._again(slices, strikes)
        else:
            self._halve(slices, strikes=1)
        return []

    def returned(self, batch: Batch) -> None:
        """A batch was not run after all: it is the next to be taken, whole or cut smaller."""
        self._again(self._reported(batch), batch.strikes, first=True)

    def parted(self, batch: Batch, groups: Sequence[tuple[Slice, ...]]) -> list[Batch]:
        """Several batches in the place of one that was taken: its slices, in groups that can go together."""
        assert batch in self._running, "a batch that is not running was parted"
        assert sum(len(group) for group in groups) == len(batch.slices)
        self._running.remove(batch)
        parts = [Batch(group, batch.strikes, batch.replica) for group in groups]
        self._running.update(parts)
        return parts

    def trimmed(self, batch: Batch) -> Batch | None:
        """A batch that was taken, without the rows that nobody waits for any more; None if none are left."""
        if all(piece.request.status == "open" for piece in batch.slices):
            return batch
        slices = self._reported(batch)
        if not slices:
            return None
        rest = Batch(slices, batch.strikes, batch.replica)
        self._running.add(rest)
        return rest

    def cancel(self, request: Request) -> bool:
        """Nobody waits for a request any more. False if it had ended before."""
        if request.status != "open":
            return False
        self._end(request, "cancelled")
        return True

    def expire(self, now: float) -> list[Request]:
        """Fail the requests whose deadline has come, those with rows in flight, too."""
        ended: list[Request] = []
        while (request := self._deadlines.nearest()) is not None:
            assert request.deadline is not None
            if request.deadline > now:
                break
            missing = request.waiting + request.running
            error = DeadlineError(
                f"{missing:,} of {count(request.rows, 'row')} of user {request.user!r} had no answer when the "
                f"deadline came, {request.deadline - request.submitted:.3g} s after they were submitted. "
                f"Give a later deadline, submit fewer rows at once, or use more devices."
            )
            self._end(request, "failed", error)
            ended.append(request)
        return ended

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        request = self._deadlines.nearest()
        return None if request is None else request.deadline

    def lost(self, replica: str) -> None:
        """A replica takes nothing until it is back. Its sticky users move, those pinned to their device wait."""
        self._live.pop(replica, None)
        self._resettle()

    def back(self, replica: str) -> None:
        """A replica that was lost takes rows again."""
        assert replica in self._guests, replica
        self._live[replica] = None
        self._resettle()

    def given_up(self, replica: str, error: Exception) -> list[Request]:
        """A replica will never be back: those pinned to it fail with `error`, now and when they come again."""
        self.lost(replica)
        if not self._pinned:
            return []
        self._given_up[replica] = error
        ended = [request for request in self._open if self._homes[request.user] == replica]
        for request in ended:
            self._end(request, "failed", error)
        return ended

    def close(self, error: Exception) -> list[Request]:
        """Fail everything that is open with `error`, and take no more."""
        self._closed = error
        ended = list(self._open)
        for request in ended:
            self._end(request, "failed", error)
        return ended

    def noted(self, replica: str, rows: int, seconds: float) -> None:
        """A batch of `rows` rows took a replica `seconds`: its rate decides its share of what waits."""
        self._rates.note(replica, rows, seconds)

    def wait(self) -> float:
        """Seconds until there is room in the queue, by the replicas' rates; 0 if there is room now."""
        if self._max_queue is None or self.counts.waiting < self._max_queue:
            return 0.0
        rate = self._rates.total(self._live)
        if rate is None:
            return WAIT
        return max(SHORTEST_WAIT, self.counts.waiting_rows / self.counts.waiting / rate)

    # Rows: every one of an open request waits, runs, or has its outcome.

    def _shift(self, request: Request, waiting: int = 0, running: int = 0) -> None:
        """Book rows of an open request in or out of those that wait and those that run."""
        self.counts.waiting -= request.waiting > 0
        request.waiting += waiting
        request.running += running
        self.counts.waiting += request.waiting > 0
        self.counts.waiting_rows += waiting
        self.counts.running_rows += running

    def _reported(self, batch: Batch) -> tuple[Slice, ...]:
        """The slices of a batch that somebody still waits for; a batch is reported once."""
        assert batch in self._running, "a batch that is not running was reported"
        self._running.remove(batch)
        return still_open(batch.slices)

    def _halve(self, slices: tuple[Slice, ...], strikes: int) -> None:
        # Slices that nobody waits for any more are gone, and may have been the guilty ones: even a single row that
        # is left has to be tried alone.
        rows = sum(piece.rows for piece in slices)
        for half in cut(slices, (rows + 1) // 2):
            self._again(half, strikes)

    def _again(self, slices: tuple[Slice, ...], strikes: int, first: bool = False) -> None:
        if not slices:
            return
        for piece in slices:
            self._shift(piece.request, waiting=piece.rows, running=-piece.rows)
        line, unit = self._line(slices[0].request.user), Batch(slices, strikes)
        if first:
            line.returned.appendleft(unit)
        else:
            line.again(unit)

    def _given_up_on(self, slices: tuple[Slice, ...], reason: str) -> list[Request]:
        for piece in slices:
            what = f"row {piece.start}" if piece.rows == 1 else f"rows {piece.start} to {piece.stop - 1}"
            message = (
                f"replicas died again and again on {what} of user {piece.request.user!r}, the last one so: "
                f"{reason}. It is not tried again."
            )
            for row in range(piece.start, piece.stop):
                piece.request.fail(row, FleetError(message))
            self._shift(piece.request, running=-piece.rows)
        return self._ended(slices)

    def _blame(self, batch: Batch, errors: Mapping[int, Exception]) -> dict[Hashable, None]:
        """Note the errors of a batch's rows, by position; gives the users whose rows they are."""
        users: dict[Hashable, None] = {}
        position = 0
        for piece in batch.slices if errors else ():
            rows = [row for row in range(piece.rows) if position + row in errors]
            if rows and piece.request.status == "open":
                for row in rows:
                    piece.request.fail(piece.start + row, errors[position + row])
                self._shift(piece.request, running=-len(rows))
                users[piece.request.user] = None
            position += piece.rows
        return users

    def _ended(self, slices: Iterable[Slice]) -> list[Request]:
        """End the requests of which every row has its outcome now."""
        touched = dict.fromkeys(piece.request for piece in slices)
        ended = [request for request in touched if not (request.waiting or request.running)]
        for request in ended:
            if request.errors:
                self._end(request, "failed", request.failure())
            else:
                self._end(request, "answered")
        return ended

    def _end(self, request: Request, status: Status, error: Exception | None = None) -> None:
        assert request.status == "open", request.status
        if request.cursor < request.rows:
            self._line(request.user).leave(request)
        self._shift(request, waiting=-request.waiting, running=-request.running)
        request.status = status
        request.error = error
        setattr(self.counts, status, getattr(self.counts, status) + 1)
        del self._open[request]
        self._deadlines.closed(request)
        if self._homely and request.rows:
            self._leave(request.user)

    # Replicas and their users.

    def _share(self, replica: str) -> int:
        """How many new rows a replica takes at most: the end of a long job must not hang on a slow one."""
        share = None if self._homely else self._rates.share(replica, self._live, self.counts.waiting_rows)
        if share is None:
            return self._batch_size
        if share > self._batch_size:  # beyond a batch only half of it: rates are not that exact
            return max(self._batch_size, share // 2)
        return max(1, self._batch_size // 8, share)

    def _line(self, user: Hashable) -> Line:
        """Where the rows of a user wait. A user of a kind that stays with a replica gets one at first sight."""
        if not self._homely:
            return self._lines[None]
        if user not in self._homes:
            self._house(user)
        return self._lines[self._homes[user]]

    def _house(self, user: Hashable) -> None:
        """Give a user the live replica that has the fewest; if none lives, any that may come back."""
        homes = self._live or [name for name in self._guests if name not in self._given_up] or self._guests
        home = min(homes, key=lambda name: len(self._guests[name]))
        self._homes[user] = home
        self._guests[home][user] = None

    def _leave(self, user: Hashable) -> None:
        """A request of a user with a home has ended. Of users without any, those seen last are remembered."""
        self._busy[user] -= 1
        if self._busy[user]:
            return
        del self._busy[user]
        self._idle[user] = None
        while len(self._idle) > USERS:
            forgotten, _ = self._idle.popitem(last=False)
            del self._guests[self._homes.pop(forgotten)][forgotten]

    def _resettle(self) -> None:
        """Move the sticky users of lost replicas, with all that waits for them, to live ones, if there are any."""
        if not self._homely or self._pinned or not self._live:
            return
        for name in self._guests:
            if name in self._live or not self._guests[name]:
                continue
            old, self._lines[name] = self._lines[name], Line()
            users, self._guests[name] = self._guests[name], {}
            for user in users:
                self._house(user)
            for request in old.since:
                self._line(request.user).join(request)
            for unit in old.returned:
                self._line(unit.slices[0].request.user).returned.append(unit)
            for unit in chain(old.shared, *old.trials.values()):
                self._line(unit.slices[0].request.user).again(unit)


def _check_positive(what: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InputError(f"{what}={value!r}. Give a whole number, at least 1.")


def _check_request(user: object, rows: int, deadline: float | None, priority: object) -> None:
    assert rows >= 0, rows
    try:
        hash(user)
    except TypeError as error:
        raise InputError(
            f"a user is named by a {type(user).__name__}, {user!r}, which can't be a key of a dict. "
            f"Name users by strings, numbers or tuples of them."
        ) from error
    if not isinstance(priority, Integral):
        raise InputError(f"priority={priority!r} of user {user!r}. Give a whole number; higher ones come first.")
    if deadline is not None and deadline != deadline:
        raise InputError(f"the deadline of user {user!r} is {deadline}. Give seconds, or None for no deadline.")
