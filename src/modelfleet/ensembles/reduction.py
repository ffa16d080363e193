"""Reducing lanes batch by batch: what is kept has the size of one member's outputs, however many there are."""

import threading
from collections.abc import Iterator, Sequence

from modelfleet.ensembles.parts import Answer, Merging, Outputs, Part
from modelfleet.errors import InputError
from modelfleet.feeds import Feed
from modelfleet.joining import joined
from modelfleet.lanes import Lane
from modelfleet.lanes.work import Work
from modelfleet.types import Tree


class Reduction:
    """Parts of an answer, one for each batch of rows, to which lanes add their members.

    Several threads may add at once.
    """

    def __init__(self, way: Merging) -> None:
        self._way = way
        self._parts: list[Part] = []
        self._lock = threading.Lock()

    @property
    def parts(self) -> list[Part]:
        """Return the parts of all batches so far."""
        return self._parts

    def add(self, batch: int, part: Part) -> None:
        """Add the part of some members for a batch, counted from 0. A lane's batches come in their order."""
        with self._lock:
            if batch == len(self._parts):
                self._parts.append(part)
            else:
                self._parts[batch] = self._way.merged(self._parts[batch], part)

    def add_all(self, parts: Sequence[Part]) -> None:
        """Add what some members say about all batches."""
        for batch, part in enumerate(parts):
            self.add(batch, part)

    def answer(self) -> Answer:
        """Return the answer for all rows.

        Raises:
            InputError: Members have unequal numbers of rows.
        """
        counts = [part.members for part in self._parts]
        if len(set(counts)) > 1:
            raise InputError(
                f"only {counts[-1]} of {counts[0]} members have rows in batch {len(counts)}. An ensemble needs "
                f"every member's output for the same rows: give all members equally many."
            )
        return join_answers([self._way.answer(part) for part in self._parts])

    def reducing(self, lane: Lane, feed: Feed) -> Work[None]:
        """Add the members of a lane, batch by batch."""
        for batch, found in enumerate(batches_of(lane, feed)):
            while found:  # what is reduced is kept no longer
                self.add(batch, self._way.part(found.pop(0)))
            yield


def batches_of(lane: Lane, feed: Feed) -> Iterator[list[Outputs]]:
    """Yield what a lane's members say about one batch of rows after the other."""
    for found in lane.predictions(feed):
        yield [Outputs(tuple(lane.name_in(slot) for slot in slots), tree) for slots, tree in found]


def join_answers(answers: Sequence[Answer]) -> Answer:
    """Return the answers for several batches of rows as one."""
    spreads: list[Tree] = [answer.spread for answer in answers]
    return Answer(joined([answer.output for answer in answers]), None if spreads[0] is None else joined(spreads))
