"""Answers of as many members as are there in time: the owner's side of a quorum."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from modelfleet.ensembles.parts import Answer, Merging
from modelfleet.ensembles.reduction import Reduction
from modelfleet.ensembles.reports import Report, ReportOrder, report_lanes
from modelfleet.errors import DeadlineError, InputError
from modelfleet.sharing.answering import copied
from modelfleet.workers import Place, Worker, WorkerDiedError

CHECK_SECONDS = 0.1  # between two looks at whether the caller has given up
LATE = "it had not answered at the deadline"
now: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Quorum:
    """How many members must answer, and by when.

    Attributes:
        needed: The number of members that must answer.
        deadline: Seconds after which the others are not waited for; None: all are.
    """

    needed: int
    deadline: float | None

    @classmethod
    def of(cls, quorum: float | None, deadline: float | None, members: int) -> "Quorum":
        """Return what the arguments of `predict` mean for so many members.

        Raises:
            InputError: An argument is out of range.
        """
        if deadline is not None and not (_is_number(deadline) and 0 < deadline < math.inf):
            raise InputError(f"deadline is {deadline!r}; expected a number of seconds above 0, or None.")
        if quorum is None:
            return cls(members, deadline)
        if isinstance(quorum, int) and not isinstance(quorum, bool) and 1 <= quorum <= members:
            return cls(quorum, deadline)
        if isinstance(quorum, float) and 0 < quorum <= 1:
            return cls(math.ceil(round(quorum * members, 9)), deadline)
        raise InputError(
            f"quorum is {quorum!r}; expected a number of members from 1 to {members}, or a fraction of them above "
            f"0.0 and up to 1.0."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Asked:
    """A worker that was asked for reports, and the members that it has not reported on."""

    place: Place
    worker: Worker
    members: set[str]


@dataclass
class Collected:
    """Reports so far."""

    way: Merging
    names: tuple[str, ...]
    """All members."""
    answered: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reduction = Reduction(self.way)

    def add(self, report: Report) -> None:
        """Add a report."""
        self._reduction.add_all(report.parts)
        self.answered.update(report.answered)
        self.failed.update(report.failed)

    def missing(self) -> dict[str, str]:
        """Return the members without an answer, in their order, with the reasons."""
        return {name: self.failed.get(name, LATE) for name in self.names if name not in self.answered}

    def answer(self, quorum: Quorum) -> Answer:
        """Return the combined answer.

        Raises:
            DeadlineError: Too few members have answered, and some are late.
            InputError: Too few members have answered, because the others failed.
        """
        missing = self.missing()
        if len(self.answered) < quorum.needed:
            late = [name for name, reason in missing.items() if reason == LATE]
            reasons = "; ".join(f"{name!r}: {reason}" for name, reason in missing.items() if reason != LATE)
            has = f"{len(self.answered)} of {len(self.names)} members have answered, and {quorum.needed} must"
            failed = f" Failed: {reasons}." if reasons else ""
            if late:
                raise DeadlineError(
                    f"{has}. Late after {quorum.deadline:g} s: {', '.join(map(repr, late))}.{failed} Give a "
                    f"longer deadline or a smaller quorum, or leave out the late members by members=[...]."
                )
            raise InputError(f"{has}.{failed} Fix or leave out these members, or give a smaller quorum.")
        return self._reduction.answer()


def ask(place: Place, order: ReportOrder, members: Sequence[str], description: str) -> Asked:
    """Ask a worker for reports on lanes that hold these members."""
    worker = place.hire()
    worker.start(report_lanes, order, description)
    return Asked(place, worker, set(members))


def collect(asked: list[Asked], collected: Collected, quorum: Quorum, given_up: threading.Event) -> None:
    """Collect reports until all are there, or the deadline has passed. Workers that are done leave `asked`.

    Args:
        asked: The workers.
        collected: Collects the reports.
        quorum: Has the deadline.
        given_up: Set if nobody waits for the answer any more.
    """
    begun = now()
    while asked and not given_up.is_set():
        left = math.inf if quorum.deadline is None else quorum.deadline - (now() - begun)
        if left <= 0:
            return
        workers: list[Any] = [own.worker for own in asked]
        ready = type(workers[0]).wait(workers, min(CHECK_SECONDS, left))
        for own in [own for own in asked if own.worker in ready]:
            if not _take(own, collected):
                asked.remove(own)


def _take(own: Asked, collected: Collected) -> bool:
    """Take what a worker has sent. Return False if it was the last."""
    try:
        more, report = own.worker.receive()
        if not more:
            own.place.release(own.worker)
            return False
        if report is not None:
            report = copied(report)
            collected.add(report)
            own.members.difference_update(report.answered, report.failed)
        own.worker.answer()
    except WorkerDiedError as error:
        collected.failed.update(dict.fromkeys(own.members, f"its worker is gone: {error}"))
        own.worker.close()
        return False
    return True


def dismiss(asked: Sequence[Asked], *, wait: bool) -> None:
    """End the workers that are late.

    Args:
        asked: The workers.
        wait: True for threads of this process. They end after their current batch, and are waited for.
    """
    for own in asked:
        with suppress(WorkerDiedError):
            own.worker.interrupt()
    for own in asked:
        with suppress(WorkerDiedError):
            if wait:
                own.worker.poll(None)
            own.worker.close()
