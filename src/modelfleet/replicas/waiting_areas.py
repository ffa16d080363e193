"""Where rows wait: for any replica, or, where users stay with a replica, for that one."""

from collections.abc import Hashable, Sequence
from itertools import chain

from modelfleet.replicas.homes import Homes
from modelfleet.replicas.requests import Request
from modelfleet.replicas.waiting import WaitingRows


class WaitingAreas:
    """Waiting rows of all users, and the replicas that may take them.

    Args:
        replicas: Names of the replicas.
        sticky: Users stay with a replica as long as that is live.
        pinned: Users stay with a replica for ever.
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
        """Return why the replica that a user is pinned to was given up, if it was."""
        return None if self.homes is None else self.given_up.get(self.homes.get(user) or "")

    def fewest_rows(self) -> int:
        """Return the number of new rows that wait, as if each replica had as few as the one with the fewest."""
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
