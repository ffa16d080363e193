"""Waiting rows: users take turns in rings, and batches that have to be tried again come in between."""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Hashable

from modelfleet.replicas.requests import Request, RowBatch, RowSpan, open_spans, split_rows

MAX_USERS_PER_BATCH = 4  # of users that have more rows: many small spans would cost more than the model

# Ordered dicts give constant time at both ends and in the middle: turns happen at the front, and a cancelled
# request leaves from anywhere.
Requests = OrderedDict[Request, None]


class UserRings:
    """Users with rows that were never taken, and those requests: a ring of users for each priority."""

    def __init__(self) -> None:
        self._rings: dict[int, OrderedDict[Hashable, Requests]] = {}
        self._priorities: list[int] = []  # ascending

    def __bool__(self) -> bool:
        return bool(self._rings)

    def __contains__(self, user: Hashable) -> bool:
        return any(user in ring for ring in self._rings.values())

    def add(self, request: Request) -> None:
        """Put a request behind the others of its user. A new user comes last in the ring."""
        self._ring(request.priority).setdefault(request.user, OrderedDict())[request] = None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        ring = self._rings[request.priority]
        requests = ring[request.user]
        del requests[request]
        if not requests:
            del ring[request.user]
            self._remove_if_empty(request.priority)

    def pop_user(self, user: Hashable) -> dict[int, Requests]:
        """Take all requests of a user out, and return them by priority."""
        found = {priority: ring.pop(user) for priority, ring in self._rings.items() if user in ring}
        for priority in found:
            self._remove_if_empty(priority)
        return found

    def add_user(self, user: Hashable, requests: dict[int, Requests]) -> None:
        """Put a user with these requests last."""
        for priority, found in requests.items():
            self._ring(priority)[user] = found

    def top_users(self) -> int:
        """Return the number of users in the ring of the highest priority."""
        return len(self._rings[self._priorities[-1]])

    def take_turn(
        self, max_rows: int, first_rows: dict[Request, int], user: Hashable | None = None, *, one: bool
    ) -> int:
        """Take rows of the user whose turn it is. A user who has more rows goes to the end of the ring.

        Args:
            max_rows: How many rows to take at most.
            first_rows: Receives each request from which rows were taken, with the first of these rows.
            user: Take rows of this user instead.
            one: Take rows of one request only.

        Returns:
            The number of rows taken.
        """
        priority = next(p for p in reversed(self._priorities) if user is None or user in self._rings[p])
        ring = self._rings[priority]
        requests = ring.pop(user) if user is not None else None
        if requests is None:
            user, requests = ring.popitem(last=False)
        left = max_rows
        while left and requests:
            request = next(iter(requests))
            first_rows.setdefault(request, request.next_row)
            rows = min(left, request.rows - request.next_row)
            request.next_row += rows
            left -= rows
            if request.next_row == request.rows:
                del requests[request]
            if one:
                break
        if requests:
            ring[user] = requests
        else:
            self._remove_if_empty(priority)
        return max_rows - left

    def _ring(self, priority: int) -> OrderedDict[Hashable, Requests]:
        if priority not in self._rings:
            self._rings[priority] = OrderedDict()
            insort(self._priorities, priority)
        return self._rings[priority]

    def _remove_if_empty(self, priority: int) -> None:
        if not self._rings[priority]:
            del self._rings[priority]
            self._priorities.remove(priority)


class WaitingRows:
    """Rows that wait for the same replicas. Filling a batch never looks at every user or every request.

    A user is suspected if rows of theirs have to be tried again, or were bad lately. Everything that a suspected
    user has waiting goes in batches apart, which alternate with batches of other users' new rows, until one
    succeeds. So a user with bad rows costs the others one batch for each of their own, and spoils none of theirs.
    """

    def __init__(self) -> None:
        self.put_back: deque[RowBatch] = deque()
        """Batches that were taken but not run: they come before everything else."""
        # To be tried again: batches of several users, which are few and hold up users without bad rows; then
        # batches of suspected users, who take turns.
        self.mixed_retries: deque[RowBatch] = deque()
        self.retries: OrderedDict[Hashable, deque[RowBatch]] = OrderedDict()
        self.rings = UserRings()
        self.suspects = UserRings()  # new rows of the users in `retries`
        self.arrivals: OrderedDict[Request, None] = OrderedDict()  # requests with new rows, the oldest first
        self._retried_last = False

    def add(self, request: Request) -> None:
        """Put a request behind the others of its user. A new user comes last."""
        (self.suspects if request.user in self.retries else self.rings).add(request)
        self.arrivals[request] = None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        (self.suspects if request.user in self.retries else self.rings).remove(request)
        del self.arrivals[request]

    def retry(self, batch: RowBatch) -> None:
        """Have a batch tried again."""
        user, *others = dict.fromkeys(span.request.user for span in batch.spans)
        if others:
            self.mixed_retries.append(batch)
            return
        self._set_apart(user)
        self.retries[user].append(batch)

    def suspect(self, user: Hashable) -> None:
        """Set a user apart because some rows were bad."""
        if user in self.rings:
            self._set_apart(user)

    def clear(self, user: Hashable) -> None:
        """Stop suspecting a user, if there is one, because a batch succeeded."""
        if user in self.retries and not self.retries[user]:
            del self.retries[user]
            self.rings.add_user(user, self.suspects.pop_user(user))

    def take(self, retry_rows: int, new_rows: int, *, mixed: bool, new: bool = True) -> RowBatch | None:
        """Return the next batch: up to `retry_rows` rows to be tried again, or up to `new_rows` new ones.

        Args:
            retry_rows: Limit for rows that are tried again.
            new_rows: Limit for rows that were never taken.
            mixed: Allow rows of several requests in a batch.
            new: Allow new rows of users who are not suspected.
        """
        batch = _take_first(self.put_back, retry_rows) or _take_first(self.mixed_retries, retry_rows)
        if batch is not None:
            return batch
        if self._retried_last and new:
            self._retried_last = False
            batch = self._take_new(new_rows, mixed)
            if batch is not None:
                return batch
        batch = self._take_retry(retry_rows, mixed)
        self._retried_last = batch is not None
        return batch or (self._take_new(new_rows, mixed) if new else None)

    def has_new_rows(self, count: int) -> bool:
        """Return True if at least `count` rows wait that were never taken."""
        rows = 0
        for request in self.arrivals:
            rows += request.rows - request.next_row
            if rows >= count:
                return True
        return False

    def _take_new(self, max_rows: int, mixed: bool) -> RowBatch | None:
        """Take rows that were never taken: of one request, or, if `mixed`, of all users in turns."""
        first_rows: dict[Request, int] = {}
        left = max_rows
        min_part = -(-max_rows // MAX_USERS_PER_BATCH)
        while left and self.rings and (mixed or not first_rows):
            # Round by round: what users with few rows leave is dealt out again. Then the next priority.
            turns = self.rings.top_users() if mixed else 1
            part = max(min_part, left // turns) if mixed else left
            for _ in range(turns):
                left -= self.rings.take_turn(min(part, left), first_rows, one=not mixed)
                if not left:
                    break
        return self._batch(first_rows)

    def _set_apart(self, user: Hashable) -> None:
        if user not in self.retries:
            self.retries[user] = deque()
            self.suspects.add_user(user, self.rings.pop_user(user))

    def _take_retry(self, max_rows: int, mixed: bool) -> RowBatch | None:
        """Return the next batch of a suspected user, in turns: one to be tried again, or new rows."""
        while self.retries:
            user, batches = self.retries.popitem(last=False)
            batch = _take_first(batches, max_rows)
            if batch is None and user in self.suspects:
                first_rows: dict[Request, int] = {}
                self.suspects.take_turn(max_rows, first_rows, user, one=not mixed)
                batch = self._batch(first_rows)
            if batches or user in self.suspects:
                self.retries[user] = batches
            if batch is not None:
                return batch
        return None

    def _batch(self, first_rows: dict[Request, int]) -> RowBatch | None:
        for request in first_rows:
            if request.next_row == request.rows:
                self.arrivals.pop(request, None)
        spans = tuple(RowSpan(request, start, request.next_row) for request, start in first_rows.items())
        return RowBatch(spans) if spans else None


def _take_first(batches: deque[RowBatch], max_rows: int) -> RowBatch | None:
    """Return up to `max_rows` rows of the first batch that has rows of open requests."""
    while batches:
        batch = batches.popleft()
        first, rest = split_rows(open_spans(batch.spans), max_rows)
        if rest:
            batches.appendleft(RowBatch(rest, batch.deaths))
        if first:
            return RowBatch(first, batch.deaths)
    return None
