"""Gate of a fleet: decides which verbs may run at the same time, and in which threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from modelfleet.errors import BusyError
from modelfleet.frameworks.contexts import without_callers_contexts

OWN_THREADS = "modelfleet-"  # prefix of the names of modelfleet's own threads


class Gate:
    """Lets one thread at a time use a fleet.

    Another thread waits until a verb is over, or gets `BusyError` if that verb is `fit`. Within a verb, the same
    thread may call verbs that only read, as callbacks do.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._waiting = 0  # threads
        self._verbs: list[str] = []  # running now, the outermost first

    @property
    def nested(self) -> bool:
        """Return True if the current verb was called within another one."""
        return len(self._verbs) > 1

    @property
    def held_here(self) -> bool:
        """Return True if a verb is running in this thread."""
        return self._owner == threading.get_ident()

    @property
    def verb(self) -> str:
        """Return the current verb."""
        return self._verbs[-1]

    @contextmanager
    def reading(self, verb: str) -> Iterator[None]:
        """Run a verb that leaves the members as they are."""
        self.enter(verb)
        try:
            with without_callers_contexts():
                yield
        finally:
            self.leave()

    @contextmanager
    def changing(self, verb: str) -> Iterator[None]:
        """Run a verb that changes the fleet or its members. Raise `BusyError` within another verb."""
        if self._owner == threading.get_ident():
            raise BusyError(
                f"fleet.{verb} was called within fleet.{self._verbs[0]} of the same fleet, by a callback or a "
                f"loader. Call it when that is over. To change a member's model in a callback, change what "
                f"run.sync(name) returns, and call run.take(name)."
            )
        with self.reading(verb):
            yield

    def enter(self, verb: str) -> None:
        """Begin a verb that leaves the members as they are. `leave` must follow. Use `reading` where you can."""
        me = threading.get_ident()
        with self._changed:
            while self._owner not in (None, me):
                if self._verbs[0] == "fit":
                    raise BusyError(
                        f"fleet.{verb} was called while another thread is in fleet.fit of the same fleet. "
                        f"Wait until the fit is over, or use a callback: it may call run.fleet.{verb} if that "
                        f"only reads."
                    )
                if threading.current_thread().name.startswith(OWN_THREADS):  # the other thread waits for this one
                    raise BusyError(
                        f"fleet.{verb} was called by a loader that fleet.{self._verbs[0]} of the same fleet is "
                        f"reading. Compute what the loader needs before the fleet reads it."
                    )
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1
            self._owner = me
            self._verbs.append(verb)

    def leave(self) -> None:
        """End the verb that `enter` has begun."""
        with self._changed:
            self._verbs.pop()
            if not self._verbs:
                self._owner = None
                if self._waiting:
                    self._changed.notify_all()
