"""Where rows wait: a ring of users served in turns, and the batches that have to be tried again."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable

from modelfleet.replicas.requests import Batch, Request, Slice, cut, still_open

PARTS = 4  # of a batch, at most, for users that have more rows: many small slices would cost more than the model


class Line:
    """What waits for the same replicas. Nothing here looks at every user or every request to fill a batch.

    Rows that have to be tried again take their user's turn: they take turns with other users' new rows, and until
    the last of them is taken, the user's own new rows wait. So whoever has poison rows costs the others one batch
    for each of theirs, and spoils no more batches meanwhile.
    """

    def __init__(self) -> None:
        self.returned: deque[Batch] = deque()  # not run after all: before everything else
        # To be tried again: batches of several users, which are few and hold back the innocent; then those of one
        # user each, the users in turns.
        self.shared: deque[Batch] = deque()
        self.trials: OrderedDict[Hashable, deque[Batch]] = OrderedDict()
        # Only users with rows that were never taken, and only such requests of theirs. Ordered dicts, as both
        # ends and the middle are needed in constant time: turns go on at the front, a cancelled request leaves.
        self.ring: OrderedDict[Hashable, OrderedDict[Request, None]] = OrderedDict()
        self.parked: dict[Hashable, OrderedDict[Request, None]] = {}  # the same of the users in `trials`
        self._tried = False  # the last batch was of `trials`

    def join(self, request: Request) -> None:
        """Put a request behind the others of its user; a new user comes last in the ring."""
        place = self.parked if request.user in self.trials else self.ring
        place.setdefault(request.user, OrderedDict())[request] = None

    def leave(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        place = self.parked if request.user in self.trials else self.ring
        requests = place[request.user]
        del requests[request]
        if not requests:
            del place[request.user]

    def again(self, unit: Batch) -> None:
        """Have a batch tried again."""
        user, *others = dict.fromkeys(piece.request.user for piece in unit.slices)
        if others:
            self.shared.append(unit)
            return
        self.trials.setdefault(user, deque()).append(unit)
        if user in self.ring:
            self.parked[user] = self.ring.pop(user)

    def take(self, size: int, most: int, mixed: bool) -> Batch | None:
        """What comes next: up to `size` rows to be tried again, or up to `most` new ones (`fill`)."""
        batch = _first(self.returned, size) or _first(self.shared, size)
        if batch is not None:
            return batch
        if self._tried:
            self._tried = False
            batch = self.fill(most, mixed)
            if batch is not None:
                return batch
        batch = self._trial(size)
        self._tried = batch is not None
        return batch or self.fill(most, mixed)

    def _trial(self, most: int) -> Batch | None:
        """The next batch of one user to be tried again; of users that have several, in turns."""
        while self.trials:
            user, units = self.trials.popitem(last=False)
            batch = _first(units, most)
            if units:
                self.trials[user] = units
            elif user in self.parked:
                self.ring[user] = self.parked.pop(user)
            if batch is not None:
                return batch
        return None

    def fill(self, most: int, mixed: bool) -> Batch | None:
        """Up to `most` rows that were never taken: of one user, or `mixed`, of all users in turns."""
        spans: dict[Request, int] = {}  # the request and its first row in this batch
        left = most
        least = -(-most // PARTS)
        while left and self.ring and (mixed or not spans):
            # Round by round: what small users leave of their part is dealt out again.
            turns = len(self.ring) if mixed else 1
            part = max(least, left // turns)
            for _ in range(turns):
                left -= self._turn(min(part, left), spans)
                if not left:
                    break
        if not spans:
            return None
        return Batch(tuple(Slice(request, start, request.cursor) for request, start in spans.items()))

    def _turn(self, most: int, spans: dict[Request, int]) -> int:
        """Take up to `most` rows of the user whose turn it is; who has more goes to the end of the ring."""
        user, requests = self.ring.popitem(last=False)
        left = most
        while left and requests:
            request = next(iter(requests))
            spans.setdefault(request, request.cursor)
            rows = min(left, request.rows - request.cursor)
            request.cursor += rows
            left -= rows
            if request.cursor == request.rows:
                del requests[request]
        if requests:
            self.ring[user] = requests
        return most - left


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
