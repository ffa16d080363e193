"""Home replicas: where a user's rows go with balance "sticky" or isolation "device"."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence

MAX_IDLE_USERS = 10_000  # users without open requests whose home is remembered: the last ones seen


class Homes:
    """Home replica of each user."""

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
