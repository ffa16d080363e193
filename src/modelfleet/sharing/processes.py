"""Lanes in workers: in processes of this machine, or on a cluster, at one place or at several.

On one device some lanes go to each of a few workers, and one that dies fails its members. On several devices there
is a worker for each. It is given the lanes of its device one at a time, and then those that wait for others; when
it dies, another goes on with its lanes from their last whole epoch.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modelfleet.sharing import crew
from modelfleet.sharing.away import Crew, Reports, buried, work_of
from modelfleet.sharing.shifts import Ended, Moment, Shift, Stepped, Way
from modelfleet.workers import Place, SharedValue, Worker, WorkerDiedError
from modelfleet.workers.pickling import pickle_value
from modelfleet.workers.process import ProcessPlace

MOST_DEATHS = 2  # of workers in one epoch of a lane, until its members have failed
MOST_STARTS = 3  # of workers that die before they have said a word, until it is thought to be of no use
START_LIMIT = 300.0  # seconds until a worker that has not begun is given up
LOOK = 0.2  # seconds between two looks at whether the fit is to stop
PATIENCE = 10.0  # seconds until a worker that has not begun is thought to wait for a device


def processes(orders: crew.Orders, shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    """Run the lanes of one device in a few workers; one that dies fails its members, and the rest go on.

    Lanes of later waves follow when the earlier ones are done, in new orders.
    """
    cores = os.cpu_count() or 1
    for wave in sorted({shift.lane.part.wave for shift in shifts}):
        own = [shift for shift in shifts if shift.lane.part.wave == wave and shift.working]
        if own and not way.stopped():
            crews = _dealt(own, cores)
            env = {"OMP_NUM_THREADS": str(max(1, cores // len(crews)))}
            hands = [_Hand(ProcessPlace("", "", env), None) for _ in crews]
            yield from _Foreman(orders, hands, crews, way, lasting=False).run()


def everywhere(
    orders: crew.Orders, places: Sequence[Place], shifts: Sequence[Shift], way: Way
) -> Iterator[Moment]:
    """Run lanes at several places; what a worker was at when it died, another goes on with."""
    homes = {place.name: number for number, place in enumerate(places)}
    working = [shift for shift in shifts if shift.working]
    if way.together or way.watched or way.side_by_side:
        by_home: dict[int, list[Shift]] = {}
        for shift in working:
            by_home.setdefault(homes.get(shift.lane.device, 0), []).append(shift)
        crews = [Crew(own, home) for home, own in by_home.items()]
    else:
        crews = [Crew([shift], homes.get(shift.lane.device, 0)) for shift in working]
    hands = [_Hand(place, place.device) for place in places]
    for own in crews:
        if isinstance(places[0], ProcessPlace):  # what can't be sent is refused before anybody has trained
            pickle_value(orders.order(own.shifts), _what(own))
    if crews:
        yield from _Foreman(orders, hands, crews, way, lasting=True).run()


class _Hand:
    """A place, with the worker that it has and the lanes that this one is at."""

    def __init__(self, place: Place, device: str | None) -> None:
        self.place = place
        self.device = device
        self.worker: Worker | None = None
        self.crew: Crew | None = None
        self.begun = False
        """Whether the worker has said something since it was given these lanes."""
        self.ready = False
        """Whether it has all that it needs, and takes steps."""
        self.told_to_stop = False
        self.lost = False
        """Whether a worker died here: the place may have gone with it."""
        self.since = 0.0
        self._waited = 0.0
        self._looked = 0.0
        self._on_cluster = place.on_cluster

    def take(self, own: Crew, order: crew.Order) -> None:
        """Have some lanes begin; the worker is hired if there is none."""
        self.crew, self.begun, self.since, self._waited = own, False, time.monotonic(), 0.0
        self._looked = self.since
        self.ready = self.told_to_stop = False
        if self.worker is None:
            self.worker = self.place.hire(order.fleet)
        self.worker.last_job = order.fleet
        self.worker.start(crew.work, order, _what(own))
        own.sent()

    def late(self) -> bool:
        """Whether the worker has had enough time to begin, and has not. On a cluster it may wait for a device."""
        now = time.monotonic()
        self._waited += min(now - self._looked, 1.0)  # more: this process was stopped, or busy itself
        self._looked = now
        return not self.begun and self._waited > START_LIMIT and not self._on_cluster

    def drop(self) -> None:
        """End the worker, whatever it is at."""
        self.crew = None
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def release(self) -> None:
        """Give the worker back."""
        if self.worker is not None:
            self.place.release(self.worker)
            self.worker = None


class _Foreman:
    """Hands lanes to workers, and hears them."""

    def __init__(
        self, orders: crew.Orders, hands: list[_Hand], crews: list[Crew], way: Way, *, lasting: bool
    ) -> None:
        self._orders, self._hands, self._waiting, self._way = orders, hands, list(crews), way
        self._lasting = lasting
        self._shifts = [shift for own in crews for shift in own.shifts]
        # Who is at the end of an epoch and waits for the others; those without a worker have been set aside.
        self._held: list[tuple[Crew, Reports]] = []
        self._paused: list[tuple[_Hand, Shift]] = []  # who has told a step, and waits until all have
        self._ended: Reports = []  # of lanes that nobody goes on with
        self._data: SharedValue | None = None

    def run(self) -> Iterator[Moment]:
        """All lanes, to their end."""
        try:
            if self._lasting and self._orders.data is not None:
                self._data = self._hands[0].place.share(self._orders.data, "the data")
            while True:
                self._hand_out()
                if self._paused and not any(hand.begun for hand in self._busy()):
                    yield from self._all_stepped()
                    continue
                if not self._busy():
                    if not (self._held or self._ended or self._waiting):
                        break
                    yield from self._all_ended()
                    continue
                if self._ended and not self._way.together:
                    yield from self._all_ended()
                for hand in self._ready():
                    yield from self._hear(hand)
        finally:
            for hand in self._hands:
                with suppress(WorkerDiedError):
                    hand.release()
            if self._data is not None:
                self._data.close()
            for shift in self._shifts:
                shift.pull()  # what was told last, also when something went wrong here
                shift.away, shift.busy = None, False

    # --- giving work ---------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        if self._way.stopped():
            self._stop()
            return
        for hand in sorted(self._hands, key=lambda hand: hand.worker is None):  # who is there comes first
            number = self._hands.index(hand)
            if hand.crew is None and self._waiting:
                own = [one for one in self._waiting if one.home == number] or self._waiting
                best = max(own, key=lambda one: one.work)
                self._waiting.remove(best)
                self._give(hand, best)
        self._take_over()

    def _take_over(self) -> None:
        """Let those who have nothing to do, or wait for others, begin what others can't."""
        while True:
            stuck = [hand for hand in self._busy() if self._stuck(hand)]
            if not stuck and not self._waiting:
                return
            free = [hand for hand in self._hands if hand.crew is None and hand.worker is not None]
            if not free and not [hand for hand in self._busy() if hand not in stuck]:
                free = self._set_aside()
            if not free:
                return
            if self._waiting:
                own = self._waiting.pop(0)
            else:
                assert stuck[0].crew is not None
                own = stuck[0].crew
                stuck[0].drop()
            self._give(free[0], own)

    def _stuck(self, hand: _Hand) -> bool:
        """Whether a worker may have nowhere to begin."""
        late = time.monotonic() - hand.since > PATIENCE
        return self._lasting and not hand.begun and (hand.lost or late)

    def _set_aside(self) -> list[_Hand]:
        """Free a worker whose lanes are at the end of their epoch: all of them is here, and can go on later."""
        for own, _ in self._held:
            for hand in self._hands:
                if hand.crew is own and hand.worker is not None:
                    try:
                        hand.worker.answer(crew.Answer(end=True))
                        hand.worker.receive()
                    except WorkerDiedError:
                        hand.drop()
                        hand.lost = True
                        continue
                    hand.crew = None
                    return [hand]
        return []

    def _give(self, hand: _Hand, own: Crew) -> None:
        order = self._orders.order(own.shifts, hand.device, self._data)
        order = replace(order, together=self._way.together, watched=self._way.watched)
        try:
            hand.take(own, order)
        except WorkerDiedError as error:
            self._died(hand, str(error))

    def _stop(self) -> None:
        """Tell all that they are to stop, those at the end of an epoch too; who has taken no step is ended."""
        self._waiting.clear()
        for hand in self._hands:
            if hand.crew is None or hand.worker is None:
                continue
            if not hand.ready:
                hand.drop()
            elif not hand.told_to_stop:
                hand.told_to_stop = True
                hand.worker.interrupt()

    # --- hearing -------------------------------------------------------------------------------------------------

    def _busy(self) -> list[_Hand]:
        """Those that are at something, and do not wait for the others."""
        held = [id(own) for own, _ in self._held] + [id(hand.crew) for hand, _ in self._paused]
        return [hand for hand in self._hands if hand.crew is not None and id(hand.crew) not in held]

    def _ready(self) -> list[_Hand]:
        """Those that have something to say, are lost or late.

        Blocks until there is one, or somebody is stuck or was not told to stop.
        """
        busy = self._busy()
        workers: list[Any] = [hand.worker for hand in busy]
        stuck = [hand for hand in busy if self._stuck(hand)]
        while not all(hand.begun for hand in busy):
            ready = [hand for hand in busy if hand.worker is not None and hand.worker.poll(0.05 / len(busy))]
            late = [hand for hand in busy if hand.late()]
            if ready or late or self._way.stopped():
                return [*ready, *(hand for hand in late if hand not in ready)]
            if any(self._stuck(hand) for hand in busy if hand not in stuck):
                return []
        ready: list[Any] = []
        while not ready and not (self._way.stopped() and not all(hand.told_to_stop for hand in busy)):
            ready = type(workers[0]).wait(workers, LOOK)
        return [hand for hand in busy if hand.worker in ready]

    def _hear(self, hand: _Hand) -> Iterator[Moment]:
        own, worker = hand.crew, hand.worker
        assert own is not None
        assert worker is not None
        if hand.late() and not worker.poll():
            self._died(hand, f"its worker process did not begin within {START_LIMIT:g} s")
            return
        try:
            more, told = worker.receive()
        except WorkerDiedError as error:
            self._died(hand, str(error))
            return
        if not more:
            hand.crew = None
            return
        hand.ready = hand.begun  # its second word: it is about to take steps
        hand.begun, hand.lost = True, False
        reports, stepped = own.heard(told, watched=self._way.watched)
        if stepped is not None and self._way.watched:
            self._paused.append((hand, stepped))
            return
        if stepped is not None:
            yield Stepped(stepped, 1)
        if reports and self._way.together:
            self._held.append((own, reports))
            return
        if reports:
            yield Ended(reports)
        self._answer(hand)

    def _all_stepped(self) -> Iterator[Moment]:
        """All workers have told a step: while callbacks look at them, none goes on."""
        paused, self._paused = self._paused, []
        for _, shift in paused:
            yield Stepped(shift, 1)
        for hand, _ in paused:
            self._answer(hand)

    def _all_ended(self) -> Iterator[Moment]:
        """All lanes that go together have ended their epoch, or are lost."""
        held, self._held = self._held, []
        reports = [pair for _, reports in held for pair in reports] + self._ended
        self._ended = []
        if reports:
            yield Ended(reports)
        hands = {id(hand.crew): hand for hand in self._hands}
        for own, _ in held:
            if id(own) in hands:
                self._answer(hands[id(own)])
            elif own.working:
                self._waiting.append(own)

    def _answer(self, hand: _Hand) -> None:
        assert hand.crew is not None
        assert hand.worker is not None
        try:
            hand.worker.answer(hand.crew.answer())
        except WorkerDiedError as error:
            self._died(hand, str(error))

    def _died(self, hand: _Hand, reason: str) -> None:
        own, begun = hand.crew, hand.begun
        assert own is not None
        hand.drop()
        hand.lost = True
        if not self._lasting:
            self._ended += buried(own.shifts, reason)
            return
        own.failed_starts += not begun
        if not begun and own.failed_starts < MOST_STARTS:
            self._waiting.append(own)
            return
        reports, left = own.bereaved(reason, MOST_DEATHS if begun else 0)
        self._ended += reports
        self._waiting += left


def _what(own: Crew) -> str:
    return f"members {own.names} with their data"


def _dealt(shifts: Sequence[Shift], most: int) -> list[Crew]:
    """The lanes dealt out to at most so many hands, the longest first, each to whoever has least."""
    hands: list[list[Shift]] = [[] for _ in range(max(1, min(most, len(shifts))))]
    loads = [0.0 for _ in hands]
    for shift in sorted(shifts, key=work_of, reverse=True):
        least = loads.index(min(loads))
        hands[least].append(shift)
        loads[least] += work_of(shift)
    return [Crew(own, number) for number, own in enumerate(hands)]
