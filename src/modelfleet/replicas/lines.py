"""Where rows wait: rings of users served in turns, and the batches that have to be tried again."""

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Hashable

from modelfleet.replicas.requests import Batch, Request, Slice, cut, still_open

PARTS = 4  # of a batch, at most, for users that have more rows: many small slices would cost more than the model

# Ordered dicts, as both ends and the middle are needed in constant time: turns go on at the front, a cancelled
# request leaves.
Requests = OrderedDict[Request, None]


class Rings:
    """Users with rows that were never taken, and only such requests of theirs: a ring for each priority."""

    def __init__(self) -> None:
        self._rings: dict[int, OrderedDict[Hashable, Requests]] = {}
        self._priorities: list[int] = []  # ascending

    def __bool__(self) -> bool:
        return bool(self._rings)

    def __contains__(self, user: Hashable) -> bool:
        return any(user in ring for ring in self._rings.values())

    def join(self, request: Request) -> None:
        """Put a request behind the others of its user; a new user comes last in the ring."""
        self._ring(request.priority).setdefault(request.user, OrderedDict())[request] = None

    def leave(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        ring = self._rings[request.priority]
        requests = ring[request.user]
        del requests[request]
        if not requests:
            del ring[request.user]
            self._tidy(request.priority)

    def pop(self, user: Hashable) -> dict[int, Requests]:
        """Take all requests of a user out, by priority."""
        found = {priority: ring.pop(user) for priority, ring in self._rings.items() if user in ring}
        for priority in found:
            self._tidy(priority)
        return found

    def put(self, user: Hashable, requests: dict[int, Requests]) -> None:
        """Put a user with all requests last."""
        for priority, found in requests.items():
            self._ring(priority)[user] = found

    def users(self) -> int:
        """How many users have the highest priority that there is."""
        return len(self._rings[self._priorities[-1]])

    def turn(
        self, most: int, spans: dict[Request, int], user: Hashable | None = None, *, one: bool = False
    ) -> int:
        """Take up to `most` rows of the user whose turn it is; who has more goes to the end of the ring.

        spans: notes requests with the first row that was taken. user: this one instead. one: of one request.
        """
        priority = next(p for p in reversed(self._priorities) if user is None or user in self._rings[p])
        ring = self._rings[priority]
        requests = ring.pop(user) if user is not None else None
        if requests is None:
            user, requests = ring.popitem(last=False)
        left = most
        while left and requests:
            request = next(iter(requests))
            spans.setdefault(request, request.cursor)
            rows = min(left, request.rows - request.cursor)
            request.cursor += rows
            left -= rows
            if request.cursor == request.rows:
                del requests[request]
            if one:
                break
        if requests:
            ring[user] = requests
        else:
            self._tidy(priority)
        return most - left

    def _ring(self, priority: int) -> OrderedDict[Hashable, Requests]:
        if priority not in self._rings:
            self._rings[priority] = OrderedDict()
            insort(self._priorities, priority)
        return self._rings[priority]

    def _tidy(self, priority: int) -> None:
        if not self._rings[priority]:
            del self._rings[priority]
            self._priorities.remove(priority)


class Line:
    """What waits for the same replicas. Nothing here looks at every user or every request to fill a batch.

    A user is suspected who has rows to be tried again, or had bad ones lately. All that such a user has waiting
    goes in batches apart, which take turns with those of others' new rows, until one of them is in order. So
    whoever has poison rows costs the others one batch for each of theirs, and spoils none of theirs meanwhile.
    """

    def __init__(self) -> None:
        self.returned: deque[Batch] = deque()  # not run after all: before everything else
        # To be tried again: batches of several users, which are few and hold back the innocent; then those of
        # suspected users, these in turns.
        self.shared: deque[Batch] = deque()
        self.trials: OrderedDict[Hashable, deque[Batch]] = OrderedDict()
        self.rings = Rings()
        self.parked = Rings()  # the same of the users in `trials`
        self.since: OrderedDict[Request, None] = OrderedDict()  # both, in the order of their coming
        self._tried = False  # the last batch was of `trials`

    def join(self, request: Request) -> None:
        """Put a request behind the others of its user; a new user comes last."""
        (self.parked if request.user in self.trials else self.rings).join(request)
        self.since[request] = None

    def leave(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        (self.parked if request.user in self.trials else self.rings).leave(request)
        del self.since[request]

    def again(self, unit: Batch) -> None:
        """Have a batch tried again."""
        user, *others = dict.fromkeys(piece.request.user for piece in unit.slices)
        if others:
            self.shared.append(unit)
            return
        self._park(user)
        self.trials[user].append(unit)

    def suspect(self, user: Hashable) -> None:
        """Some rows of a user were bad."""
        if user in self.rings:
            self._park(user)

    def cleared(self, user: Hashable) -> None:
        """A batch of a suspected user was in order."""
        if user in self.trials and not self.trials[user]:
            del self.trials[user]
            self.rings.put(user, self.parked.pop(user))

    def take(self, size: int, most: int, *, mixed: bool, new: bool = True) -> Batch | None:
        """What comes next: up to `size` rows to be tried again, or up to `most` new ones (`fill`).

        new: whether rows may be taken that were never taken before, other than suspected ones.
        """
        batch = _first(self.returned, size) or _first(self.shared, size)
        if batch is not None:
            return batch
        if self._tried and new:
            self._tried = False
            batch = self.fill(most, mixed)
            if batch is not None:
                return batch
        batch = self._trial(size, mixed)
        self._tried = batch is not None
        return batch or (self.fill(most, mixed) if new else None)

    def fills(self, size: int) -> bool:
        """Whether so many rows wait that were never taken."""
        rows = 0
        for request in self.since:
            rows += request.rows - request.cursor
            if rows >= size:
                return True
        return False

    def fill(self, most: int, mixed: bool) -> Batch | None:
        """Up to `most` rows that were never taken: of one request, or `mixed`, of all users in turns."""
        spans: dict[Request, int] = {}  # the request and its first row in this batch
        left = most
        least = -(-most // PARTS)
        while left and self.rings and (mixed or not spans):
            # Round by round: what small users leave of their part is dealt out again. Then the next priority.
            turns = self.rings.users() if mixed else 1
            part = max(least, left // turns) if mixed else left
            for _ in range(turns):
                left -= self.rings.turn(min(part, left), spans, one=not mixed)
                if not left:
                    break
        return self._batch(spans)

    def _park(self, user: Hashable) -> None:
        if user not in self.trials:
            self.trials[user] = deque()
            self.parked.put(user, self.rings.pop(user))

    def _trial(self, most: int, mixed: bool) -> Batch | None:
        """The next batch of a suspected user, the users in turns: one to be tried again, or new rows."""
        while self.trials:
            user, units = self.trials.popitem(last=False)
            batch = _first(units, most)
            if batch is None and user in self.parked:
                spans: dict[Request, int] = {}
                self.parked.turn(most, spans, user, one=not mixed)
                batch = self._batch(spans)
            if units or user in self.parked:
                self.trials[user] = units
            if batch is not None:
                return batch
        return None

    def _batch(self, spans: dict[Request, int]) -> Batch | None:
        for request in spans:
            if request.cursor == request.rows:
                self.since.pop(request, None)
        slices = tuple(Slice(request, start, request.cursor) for request, start in spans.items())
        return Batch(slices) if slices else None


def _first(units: deque[Batch], most: int) -> Batch | None:
    """The first batch, as it was but for rows nobody waits for; cut at `most` rows."""
    while units:
        unit = units.popleft()
        first, rest = cut(still_open(unit.slices), most)
        if rest:
            units.appendleft(Batch(rest, unit.strikes))
        if first:
            return Batch(first, unit.strikes)
    return None


class Deadlines:
    """The open requests with a deadline, the nearest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._number = 0  # breaks ties: requests have no order
        self._closed = 0

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is not None:
            self._number += 1
            heapq.heappush(self._heap, (request.deadline, self._number, request))

    def closed(self, request: Request) -> None:
        """Forget a request that is open no more."""
        if request.deadline is None:
            return
        # They are dropped when they come up, but a far deadline must not keep answered requests in memory.
        self._closed += 1
        if self._closed * 2 > len(self._heap) + 64:
            self._heap = [entry for entry in self._heap if entry[2].status == "open"]
            heapq.heapify(self._heap)
            self._closed = 0

    def nearest(self) -> Request | None:
        """The open request with the nearest deadline."""
        while self._heap and self._heap[0][2].status != "open":
            heapq.heappop(self._heap)
            self._closed -= 1
        return self._heap[0][2] if self._heap else None
