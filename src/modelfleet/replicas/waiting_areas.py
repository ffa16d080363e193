"""Waiting areas: rows wait for any replica, or, with balance "sticky" or isolation "device", for one of them."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from itertools import chain

from modelfleet.replicas.requests import Request
from modelfleet.replicas.waiting import WaitingRows

MAX_IDLE_USERS = 10_000  # users without open requests whose home is remembered: the last ones seen


class WaitingAreas:
    """Waiting rows of all users, and the replicas that may take them.

    Args:
        replicas: Names of the replicas.
        sticky: Users stay with a replica as long as it is live.
        pinned: Users stay with a replica forever.
    """

    def __init__(self, replicas: Sequence[str], *, sticky: bool, pinned: bool) -> None:
        self.live = dict.fromkeys(replicas)
        self.homes = Homes(replicas) if sticky or pinned else None
        self.given_up: dict[str, Exception] = {}
        """Why replicas were given up, to which users are pinned."""
        self._replicas = list(replicas)
        self._pinned = pinned
        self._areas: dict[str | None, WaitingRows] = {
            name: WaitingRows() for name in (replicas if self.homes is not None else [None])
        }

    def of_replica(self, replica: str) -> WaitingRows:
        """Return the rows that a replica may take."""
        assert replica in self._replicas, replica
        return self._areas[None if self.homes is None else replica]

    def of_user(self, user: Hashable) -> WaitingRows:
        """Return where the rows of a user wait. Where users have homes, a new user gets one."""
        if self.homes is None:
            return self._areas[None]
        home = self.homes.get(user)
        if home is None:
            # A live replica; if there is none, one that may come back.
            hopeful = [name for name in self._replicas if name not in self.given_up]
            home = self.homes.assign(user, self.live or hopeful or self._replicas)
        return self._areas[home]

    def add(self, request: Request) -> None:
        """Add a new request."""
        self.of_user(request.user).add(request)
        if self.homes is not None:
            self.homes.open_request(request.user)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, with its rows that were never taken."""
        if request.next_row < request.rows:
            self.of_user(request.user).remove(request)
        if self.homes is not None and request.rows:
            self.homes.close_request(request.user)

    def is_forgotten(self, user: Hashable) -> bool:
        """Return True if a user's home is not remembered any more."""
        return self.homes is not None and self.homes.get(user) is None

    def why_gone(self, user: Hashable) -> Exception | None:
        """Return the reason why a user's replica was given up, if the user is pinned to it and it was."""
        return None if self.homes is None else self.given_up.get(self.homes.get(user) or "")

    def fewest_rows(self) -> int:
        """Return the shortest backlog of new rows of a replica, times the number of replicas."""
        own = [self._areas[name] for name in self.live] or list(self._areas.values())
        return len(own) * min(sum(request.rows - request.next_row for request in area.arrivals) for area in own)

    def lose(self, replica: str) -> None:
        """Note that a replica is not live. Its sticky users move; pinned users wait."""
        self.live.pop(replica, None)
        self._move_users()

    def restore(self, replica: str) -> None:
        """Note that a replica is live again."""
        assert replica in self._replicas, replica
        self.live[replica] = None
        self._move_users()

    def give_up(self, replica: str, error: Exception) -> None:
        """Note that a replica will never be live again."""
        self.lose(replica)
        if self._pinned:
            self.given_up[replica] = error

    def _move_users(self) -> None:
        """Move the sticky users of lost replicas, with all of their rows, to live ones, if there are any."""
        if self.homes is None or self._pinned or not self.live:
            return
        for name in self._replicas:
            if name in self.live:
                continue
            old, self._areas[name] = self._areas[name], WaitingRows()
            for user in self.homes.evict(name):
                self.homes.assign(user, self.live)
            for request in old.arrivals:
                self.of_user(request.user).add(request)
            for batch in old.put_back:
                self.of_user(batch.spans[0].request.user).put_back.append(batch)
            for batch in chain(old.mixed_retries, *old.retries.values()):
                self.of_user(batch.spans[0].request.user).retry(batch)


class Homes:
    """Remembers the home replica of each user."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self._by_user: dict[Hashable, str] = {}
        self._users: dict[str, dict[Hashable, None]] = {name: {} for name in replicas}
        self._open_requests: Counter[Hashable] = Counter()
        self._idle: OrderedDict[Hashable, None] = OrderedDict()

    def get(self, user: Hashable) -> str | None:
        """Return a user's home; None if the user has none."""
        return self._by_user.get(user)

    def assign(self, user: Hashable, replicas: Collection[str]) -> str:
        """Make the replica with the fewest users a user's home, and return it."""
        home = min(replicas, key=lambda name: len(self._users[name]))
        self._by_user[user] = home
        self._users[home][user] = None
        return home

    def evict(self, replica: str) -> list[Hashable]:
        """Remove all users of a replica, and return them."""
        users, self._users[replica] = self._users[replica], {}
        for user in users:
            del self._by_user[user]
        return list(users)

    def open_request(self, user: Hashable) -> None:
        """Count a request of a user."""
        self._open_requests[user] += 1
        self._idle.pop(user, None)

    def close_request(self, user: Hashable) -> None:
        """Count the end of a request. Of users without open requests, remember the last ones seen."""
        self._open_requests[user] -= 1
        if self._open_requests[user]:
            return
        del self._open_requests[user]
        self._idle[user] = None
        while len(self._idle) > MAX_IDLE_USERS:
            forgotten, _ = self._idle.popitem(last=False)
            del self._users[self._by_user.pop(forgotten)][forgotten]
