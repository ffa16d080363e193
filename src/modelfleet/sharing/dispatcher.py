"""Dispatching lanes: gives them to workers, receives their updates, and replaces workers that die."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from modelfleet.remote.lanes import RemoteLanes
from modelfleet.remote.messages import LaneOrder, OrderWriter, OwnerReply
from modelfleet.remote.worker import run_lanes
from modelfleet.runs.events import EpochsEnded, Event, Reports, RunOptions, StepsTaken
from modelfleet.runs.lane_run import LaneRun
from modelfleet.runs.remote_state import WORKER_POLICY
from modelfleet.workers import Place, SharedValue, Worker, WorkerDiedError
from modelfleet.workers.supervisor import Supervisor

POLL_SECONDS = 0.2  # between two checks of whether the fit should stop


class WorkerSeat:
    """A seat for one worker after another at one place, and the lanes that the worker runs."""

    def __init__(self, place: Place, device: str | None) -> None:
        self.device = device
        self.supervisor = Supervisor(place, WORKER_POLICY)
        self.lanes: RemoteLanes | None = None
        self.ready = False
        """True if the worker has everything it needs, and takes steps."""
        self.interrupted = False

    @property
    def started(self) -> bool:
        """Return True if the worker has sent something since it was given these lanes."""
        return self.supervisor.started

    @property
    def worker(self) -> Worker:
        """Return the worker that runs the lanes."""
        assert self.supervisor.worker is not None
        return self.supervisor.worker

    def start(self, lanes: RemoteLanes, order: LaneOrder) -> None:
        """Start some lanes, in a new worker if there is none."""
        self.lanes, self.ready, self.interrupted = lanes, False, False
        self.supervisor.start(run_lanes, order, lanes.description, job=order.fleet)
        lanes.mark_sent()

    def drop(self) -> None:
        """Kill the worker."""
        self.lanes = None
        self.supervisor.drop()


class Dispatcher:
    """Gives lanes to workers, receives their updates, and replaces workers that die.

    Args:
        writer: Writes the orders.
        seats: The places for workers.
        assignments: The lanes of each worker.
        options: How the lanes run.
    """

    def __init__(
        self,
        writer: OrderWriter,
        seats: list[WorkerSeat],
        assignments: list[RemoteLanes],
        options: RunOptions,
    ) -> None:
        self._writer, self._options = writer, options
        self._seats, self._queue = list(seats), list(assignments)
        self._runs = [run for own in assignments for run in own.runs]
        # Lanes that wait for the others: at the end of an epoch, or after a step of one of their runs if steps are
        # watched. Some have given their worker to other lanes.
        self._held: list[tuple[RemoteLanes, Reports]] = []
        self._paused: list[tuple[RemoteLanes, LaneRun]] = []
        self._ended: Reports = []  # of lanes that no worker will continue
        self._data: SharedValue | None = None

    def run(self) -> Iterator[Event]:
        """Run all lanes to their end."""
        try:
            if self._writer.data is not None:
                self._data = self._seats[0].supervisor.place.publish(self._writer.data, "the data")
            while True:
                self._assign()
                if not self._busy():
                    if self._queue:  # a worker has died at once: the others wait for its lanes too
                        continue
                    if self._paused:
                        yield from self._all_stepped()
                    elif self._held or self._ended:
                        yield from self._all_ended()
                    else:
                        break
                    continue
                if self._ended and not self._options.together:
                    yield from self._all_ended()
                for seat in self._ready():
                    yield from self._receive(seat)
        finally:
            for seat in self._seats:
                with suppress(WorkerDiedError):
                    seat.supervisor.release()
            if self._data is not None:
                self._data.close()
            for run in self._runs:
                run.bring_here()  # the last reported state, also after an error here
                run.remote, run.busy = None, False

    # --- giving work ---------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        if self._options.stopped():
            self._stop()
            return
        for seat in sorted(self._seats, key=lambda seat: seat.supervisor.worker is None):  # existing workers first
            number = self._seats.index(seat)
            if seat.lanes is None and self._queue:
                own = [lanes for lanes in self._queue if lanes.home == number] or self._queue
                longest = max(own, key=lambda lanes: lanes.work)
                self._queue.remove(longest)
                self._give(seat, longest)
        self._take_over()

    def _take_over(self) -> None:
        """Let workers that are idle, or wait for others, start lanes that are stuck elsewhere."""
        while True:
            stuck = [seat for seat in self._busy() if seat.supervisor.may_be_stuck()]
            if not stuck and not self._queue:
                return
            free = [seat for seat in self._seats if seat.lanes is None and seat.supervisor.worker is not None]
            # A process will start, or be late. A node of a cluster may never come back.
            in_need = self._queue or any(seat.supervisor.place.on_cluster for seat in stuck)
            if in_need and not free and not [seat for seat in self._busy() if seat not in stuck]:
                free = self._free_worker()
            if not free:
                return
            if self._queue:
                lanes = self._queue.pop(0)
            else:
                assert stuck[0].lanes is not None
                lanes = stuck[0].lanes
                stuck[0].drop()
            self._give(free[0], lanes)

    def _free_worker(self) -> list[WorkerSeat]:
        """Free a worker whose lanes wait for the others. Their state is here: they can continue later."""
        for lanes in self._waiting():
            for seat in self._seats:
                worker = seat.supervisor.worker
                if seat.lanes is lanes and worker is not None:
                    try:
                        worker.answer(OwnerReply(end=True))
                        worker.receive()
                    except WorkerDiedError as error:
                        seat.lanes = None
                        seat.supervisor.lose(error)
                        continue
                    seat.lanes = None
                    return [seat]
        return []

    def _give(self, seat: WorkerSeat, lanes: RemoteLanes) -> None:
        order = self._writer.order(lanes.runs, seat.device, self._data)
        order = replace(order, together=self._options.together, watched=self._options.watched)
        try:
            seat.start(lanes, order)
        except WorkerDiedError as error:
            self._handle_death(seat, error)

    def _stop(self) -> None:
        """Interrupt all workers, even at the end of an epoch. Those that have taken no step are killed."""
        self._queue.clear()
        for seat in self._seats:
            worker = seat.supervisor.worker
            if seat.lanes is None or worker is None:
                continue
            if not seat.ready:
                seat.drop()
            elif not seat.interrupted:
                seat.interrupted = True
                worker.interrupt()

    # --- receiving -----------------------------------------------------------------------------------------------

    def _busy(self) -> list[WorkerSeat]:
        """Return the seats whose worker is running and does not wait for the others."""
        waiting = [id(lanes) for lanes in self._waiting()]
        return [seat for seat in self._seats if seat.lanes is not None and id(seat.lanes) not in waiting]

    def _waiting(self) -> list[RemoteLanes]:
        """Return the lanes that wait for the others."""
        return [lanes for lanes, _ in [*self._held, *self._paused]]

    def _ready(self) -> list[WorkerSeat]:
        """Return the seats whose worker has sent something, is lost, or is late.

        Blocks until there is one, or a worker is stuck, or one has to be interrupted.
        """
        busy = self._busy()
        workers = [seat.worker for seat in busy]
        stuck = [seat for seat in busy if seat.supervisor.may_be_stuck()]
        while not all(seat.started for seat in busy):
            ready = [seat for seat, worker in zip(busy, workers, strict=True) if worker.poll(0.05 / len(busy))]
            late = [seat for seat in busy if seat.supervisor.is_late()]
            if ready or late or self._options.stopped():
                return [*ready, *(seat for seat in late if seat not in ready)]
            if any(seat.supervisor.may_be_stuck() for seat in busy if seat not in stuck):
                return []
        told: list[Worker] = []
        while not told and not (self._options.stopped() and not all(seat.interrupted for seat in busy)):
            told = type(workers[0]).wait(workers, POLL_SECONDS)
        return [seat for seat in busy if seat.worker in told]

    def _receive(self, seat: WorkerSeat) -> Iterator[Event]:
        lanes, supervisor = seat.lanes, seat.supervisor
        assert lanes is not None
        if supervisor.is_late() and not seat.worker.poll():
            self._handle_death(seat, supervisor.late_error())
            return
        has_started = seat.started
        try:
            more, update = supervisor.receive()
        except WorkerDiedError as error:
            self._handle_death(seat, error)
            return
        if not more:
            seat.lanes = None
            return
        if not has_started:
            lanes.note_started()
        seat.ready = has_started  # with its second update a worker is about to take steps
        if self._options.together and self._options.watched and any(lane.report for lane in update.lanes):
            lanes.hold(update)
            self._held.append((lanes, []))
            return
        reports, stepped = lanes.receive(update, watched=self._options.watched)
        if stepped is not None and self._options.watched:
            self._paused.append((lanes, stepped))
            return
        if stepped is not None:
            yield StepsTaken(stepped, 1)
        if reports and self._options.together:
            self._held.append((lanes, reports))
            return
        if reports:
            yield EpochsEnded(reports)
        self._reply(seat)

    def _all_stepped(self) -> Iterator[Event]:
        """Report a step of all lanes. None continues while callbacks look at the members, or change them.

        All have taken the same step, even those whose worker died meanwhile: an exchange of members that are at
        different steps would give other numbers than in one process.
        """
        paused, self._paused = self._paused, []
        for _, run in paused:
            yield StepsTaken(run, 1)
        self._continue([lanes for lanes, _ in paused])

    def _all_ended(self) -> Iterator[Event]:
        """End the epoch of all lanes that wait for each other. Some may be lost."""
        held, self._held = self._held, []
        reports = [pair for lanes, own in held for pair in own or lanes.take_held()] + self._ended
        self._ended = []
        if reports:
            yield EpochsEnded(reports)
        self._continue([lanes for lanes, _ in held])

    def _continue(self, waited: list[RemoteLanes]) -> None:
        """Let lanes continue that waited for the others. Those that gave their worker away are queued."""
        seats = {id(seat.lanes): seat for seat in self._seats}
        for lanes in waited:
            if id(lanes) in seats:
                self._reply(seats[id(lanes)])
            elif lanes.working:
                self._queue.append(lanes)

    def _reply(self, seat: WorkerSeat) -> None:
        assert seat.lanes is not None
        try:
            seat.worker.answer(seat.lanes.reply())
        except WorkerDiedError as error:
            self._handle_death(seat, error)

    def _handle_death(self, seat: WorkerSeat, error: WorkerDiedError) -> None:
        """Queue the lanes of a worker that died for another, or fail those that too many workers have died on."""
        lanes, seat.lanes = seat.lanes, None
        assert lanes is not None
        reports, left = lanes.after_worker_end(seat.supervisor.lose(error))
        self._ended += reports
        self._queue += left
        place = seat.supervisor.place
        if self._options.watched and not place.on_cluster:
            # After each step they wait for each other, and would have to swap if they had one worker.
            self._seats += [WorkerSeat(place, seat.device) for _ in left[1:]]
