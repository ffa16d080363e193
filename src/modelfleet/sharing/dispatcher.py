"""The dispatcher: gives lanes to workers, receives their updates, and replaces workers that die."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modelfleet.remote.lanes import RemoteLanes, fail_runs
from modelfleet.remote.messages import LaneOrder, OrderWriter, OwnerReply
from modelfleet.remote.worker import run_lanes
from modelfleet.runs.events import EpochsEnded, Event, Reports, RunOptions, StepsTaken
from modelfleet.runs.lane_run import LaneRun
from modelfleet.workers import Place, Shared, Worker, WorkerDiedError

MAX_DEATHS = 2  # of workers in one epoch of a lane, before its members fail
MAX_FAILED_STARTS = 3  # of workers that die before their first update, before the members fail
START_TIMEOUT = 300.0  # seconds for a worker to send its first update
POLL_SECONDS = 0.2  # between two looks at whether the fit should stop
STUCK_AFTER = 10.0  # seconds without a first update, after which a worker may be waiting for a device


class WorkerSlot:
    """A place for one worker, the worker there, and the lanes that it runs."""

    def __init__(self, place: Place, device: str | None) -> None:
        self.place = place
        self.device = device
        self.worker: Worker | None = None
        self.lanes: RemoteLanes | None = None
        self.started = False
        """True if the worker has sent something since it was given these lanes."""
        self.ready = False
        """True if the worker has everything it needs, and takes steps."""
        self.interrupted = False
        self.lost = False
        """True if a worker died here: the place may be gone with it."""
        self.since = 0.0
        self._waited = 0.0
        self._looked = 0.0
        self._on_cluster = hasattr(getattr(place, "places", [place])[0], "host")

    def take(self, own: RemoteLanes, order: LaneOrder) -> None:
        """Start some lanes. If there is no worker, one is hired."""
        self.lanes, self.started, self.since, self._waited = own, False, time.monotonic(), 0.0
        self._looked = self.since
        self.ready = self.interrupted = False
        if self.worker is None:
            self.worker = self.place.hire(order.fleet)
        self.worker.last = order.fleet
        self.worker.start(run_lanes, order, own.description)
        own.mark_sent()

    def late(self) -> bool:
        """Return True if the worker has not started in time. On a cluster it may wait for a device."""
        now = time.monotonic()
        self._waited += min(now - self._looked, 1.0)  # if it was longer, this process itself was stopped or busy
        self._looked = now
        return not self.started and self._waited > START_TIMEOUT and not self._on_cluster

    def drop(self) -> None:
        """Kill the worker."""
        self.lanes = None
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def release(self) -> None:
        """Return the worker to its place."""
        if self.worker is not None:
            self.place.release(self.worker)
            self.worker = None


class Dispatcher:
    """Gives lanes to workers, receives their updates, and replaces workers that die.

    Args:
        writer: Writes the orders.
        slots: The places for workers.
        assignments: The lanes that one worker takes, for each worker.
        options: How the lanes run.
        replaces_workers: True if another worker continues the lanes of one that died. False: their members fail.
    """

    def __init__(
        self,
        writer: OrderWriter,
        slots: list[WorkerSlot],
        assignments: list[RemoteLanes],
        options: RunOptions,
        *,
        replaces_workers: bool,
    ) -> None:
        self._writer, self._slots, self._queue, self._options = writer, slots, list(assignments), options
        self._replaces_workers = replaces_workers
        self._runs = [run for own in assignments for run in own.runs]
        # At the end of an epoch, and waiting for the others; some have given their worker to other lanes.
        self._held: list[tuple[RemoteLanes, Reports]] = []
        self._paused: list[tuple[WorkerSlot, LaneRun]] = []  # have reported a step, and wait until all have
        self._ended: Reports = []  # of lanes that no worker will continue
        self._data: Shared | None = None

    def run(self) -> Iterator[Event]:
        """Run all lanes to their end."""
        try:
            if self._replaces_workers and self._writer.data is not None:
                self._data = self._slots[0].place.share(self._writer.data, "the data")
            while True:
                self._assign()
                if self._paused and not any(slot.started for slot in self._busy()):
                    yield from self._all_stepped()
                    continue
                if not self._busy():
                    if not (self._held or self._ended or self._queue):
                        break
                    yield from self._all_ended()
                    continue
                if self._ended and not self._options.together:
                    yield from self._all_ended()
                for slot in self._ready():
                    yield from self._receive(slot)
        finally:
            for slot in self._slots:
                with suppress(WorkerDiedError):
                    slot.release()
            if self._data is not None:
                self._data.close()
            for run in self._runs:
                run.pull()  # the last reported state, also after an error here
                run.remote, run.busy = None, False

    # --- giving work ---------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        if self._options.stopped():
            self._stop()
            return
        for slot in sorted(self._slots, key=lambda slot: slot.worker is None):  # workers that exist come first
            number = self._slots.index(slot)
            if slot.lanes is None and self._queue:
                own = [one for one in self._queue if one.home == number] or self._queue
                best = max(own, key=lambda one: one.work)
                self._queue.remove(best)
                self._give(slot, best)
        self._take_over()

    def _take_over(self) -> None:
        """Let workers that are idle, or wait for others, start lanes that are stuck elsewhere."""
        while True:
            stuck = [slot for slot in self._busy() if self._stuck(slot)]
            if not stuck and not self._queue:
                return
            free = [slot for slot in self._slots if slot.lanes is None and slot.worker is not None]
            if not free and not [slot for slot in self._busy() if slot not in stuck]:
                free = self._free_worker()
            if not free:
                return
            if self._queue:
                own = self._queue.pop(0)
            else:
                assert stuck[0].lanes is not None
                own = stuck[0].lanes
                stuck[0].drop()
            self._give(free[0], own)

    def _stuck(self, slot: WorkerSlot) -> bool:
        """Return True if a worker may have nowhere to start."""
        late = time.monotonic() - slot.since > STUCK_AFTER
        return self._replaces_workers and not slot.started and (slot.lost or late)

    def _free_worker(self) -> list[WorkerSlot]:
        """Free a worker whose lanes are at the end of an epoch. Their state is here: they can continue later."""
        for own, _ in self._held:
            for slot in self._slots:
                if slot.lanes is own and slot.worker is not None:
                    try:
                        slot.worker.answer(OwnerReply(end=True))
                        slot.worker.receive()
                    except WorkerDiedError:
                        slot.drop()
                        slot.lost = True
                        continue
                    slot.lanes = None
                    return [slot]
        return []

    def _give(self, slot: WorkerSlot, own: RemoteLanes) -> None:
        order = self._writer.order(own.runs, slot.device, self._data)
        order = replace(order, together=self._options.together, watched=self._options.watched)
        try:
            slot.take(own, order)
        except WorkerDiedError as error:
            self._died(slot, str(error))

    def _stop(self) -> None:
        """Interrupt all workers, also at the end of an epoch. Those that have taken no step are killed."""
        self._queue.clear()
        for slot in self._slots:
            if slot.lanes is None or slot.worker is None:
                continue
            if not slot.ready:
                slot.drop()
            elif not slot.interrupted:
                slot.interrupted = True
                slot.worker.interrupt()

    # --- receiving -----------------------------------------------------------------------------------------------

    def _busy(self) -> list[WorkerSlot]:
        """Return the slots whose worker runs, and does not wait for the others."""
        held = [id(own) for own, _ in self._held] + [id(slot.lanes) for slot, _ in self._paused]
        return [slot for slot in self._slots if slot.lanes is not None and id(slot.lanes) not in held]

    def _ready(self) -> list[WorkerSlot]:
        """Return the slots whose worker has sent something, is lost, or is late.

        Blocks until there is one, or a worker is stuck, or one has to be interrupted.
        """
        busy = self._busy()
        workers: list[Any] = [slot.worker for slot in busy]
        stuck = [slot for slot in busy if self._stuck(slot)]
        while not all(slot.started for slot in busy):
            ready = [slot for slot in busy if slot.worker is not None and slot.worker.poll(0.05 / len(busy))]
            late = [slot for slot in busy if slot.late()]
            if ready or late or self._options.stopped():
                return [*ready, *(slot for slot in late if slot not in ready)]
            if any(self._stuck(slot) for slot in busy if slot not in stuck):
                return []
        ready: list[Any] = []
        while not ready and not (self._options.stopped() and not all(slot.interrupted for slot in busy)):
            ready = type(workers[0]).wait(workers, POLL_SECONDS)
        return [slot for slot in busy if slot.worker in ready]

    def _receive(self, slot: WorkerSlot) -> Iterator[Event]:
        own, worker = slot.lanes, slot.worker
        assert own is not None
        assert worker is not None
        if slot.late() and not worker.poll():
            self._died(slot, f"its worker process did not start within {START_TIMEOUT:g} s")
            return
        try:
            more, update = worker.receive()
        except WorkerDiedError as error:
            self._died(slot, str(error))
            return
        if not more:
            slot.lanes = None
            return
        slot.ready = slot.started  # with its second update it is about to take steps
        slot.started, slot.lost = True, False
        reports, stepped = own.receive(update, watched=self._options.watched)
        if stepped is not None and self._options.watched:
            self._paused.append((slot, stepped))
            return
        if stepped is not None:
            yield StepsTaken(stepped, 1)
        if reports and self._options.together:
            self._held.append((own, reports))
            return
        if reports:
            yield EpochsEnded(reports)
        self._reply(slot)

    def _all_stepped(self) -> Iterator[Event]:
        """Report a step of all workers. None continues while callbacks look at the members."""
        paused, self._paused = self._paused, []
        for _, run in paused:
            yield StepsTaken(run, 1)
        for slot, _ in paused:
            self._reply(slot)

    def _all_ended(self) -> Iterator[Event]:
        """End the epoch of all lanes that wait for each other. Some may be lost."""
        held, self._held = self._held, []
        reports = [pair for _, reports in held for pair in reports] + self._ended
        self._ended = []
        if reports:
            yield EpochsEnded(reports)
        slots = {id(slot.lanes): slot for slot in self._slots}
        for own, _ in held:
            if id(own) in slots:
                self._reply(slots[id(own)])
            elif own.working:
                self._queue.append(own)

    def _reply(self, slot: WorkerSlot) -> None:
        assert slot.lanes is not None
        assert slot.worker is not None
        try:
            slot.worker.answer(slot.lanes.reply())
        except WorkerDiedError as error:
            self._died(slot, str(error))

    def _died(self, slot: WorkerSlot, reason: str) -> None:
        own, started = slot.lanes, slot.started
        assert own is not None
        slot.drop()
        slot.lost = True
        if not self._replaces_workers:
            self._ended += fail_runs(own.runs, reason)
            return
        own.failed_starts += not started
        if not started and own.failed_starts < MAX_FAILED_STARTS:
            self._queue.append(own)
            return
        reports, left = own.after_death(reason, MAX_DEATHS if started else 0)
        self._ended += reports
        self._queue += left
