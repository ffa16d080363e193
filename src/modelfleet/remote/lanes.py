"""Remote lanes: lanes whose steps a worker takes, as their owner sees them.

The lanes of this process stand in for those in the workers. At the end of every epoch a worker reports its lanes'
state. So if it dies, everything up to then is in this process, and another worker can continue.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from modelfleet.failures import Failure
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.remote.messages import OwnerReply, WorkerUpdate
from modelfleet.runs.events import Reports, next_wave
from modelfleet.runs.lane_run import EpochReport, LaneRun
from modelfleet.runs.remote_state import RemoteState
from modelfleet.trees import map_tree
from modelfleet.workers.supervisor import WorkerEnd


class RemoteLanes:
    """Lanes that one worker steps.

    Args:
        runs: The runs of the lanes.
        home: The number of the place that the lanes were placed on.
    """

    def __init__(self, runs: Sequence[LaneRun], home: int) -> None:
        self.runs = list(runs)
        self.home = home
        self._held: WorkerUpdate | None = None
        for run in runs:
            run.remote = run.remote or RemoteState()

    @property
    def work(self) -> float:
        """Return how much work is left. The longest lanes are started first."""
        return sum(work_of(run) for run in self.runs)

    @property
    def working(self) -> bool:
        """Return True while any member is training."""
        return any(run.working for run in self.runs)

    @property
    def description(self) -> str:
        """Return the members' names for an error message."""
        names = ", ".join(repr(name) for run in self.runs for name in run.names)
        return f"members {names} with their data"

    def mark_sent(self) -> None:
        """Note that a worker has just been sent everything."""
        for run in self.runs:
            remote = _remote(run)
            remote.stopped, remote.changed = [], False
        self._mark_busy()

    def receive(self, update: WorkerUpdate, *, watched: bool) -> tuple[Reports, LaneRun | None]:
        """Take in a worker's update. Return the reports in it, and the lane that took a turn.

        Args:
            update: The update.
            watched: True if every turn is reported.
        """
        reports, stepped = [], None
        # Copied: the arrays of an update are gone with the next reply.
        generators = {name: np.array(state) for name, state in update.generators.items()}
        for lane in update.lanes:
            run, progress, report = self.runs[lane.number], lane.progress, lane.report
            remote = _remote(run)
            remote.state = map_tree(np.array, lane.state)
            run.add_losses(lane.losses)
            run.busy = False
            run.lane.steps[:] = progress.lane["steps"]
            run.lane.epochs[:] = progress.lane["epochs"]
            run.schedules.restore(progress.schedules)
            moved = progress.step != run.step_in_epoch
            run.epoch, run.step_in_epoch = progress.epoch, progress.step
            if report is None:
                stepped = run if moved else stepped
                continue
            remote.budget.reset()
            run.generators = generators
            run.lane.record_time(report.steps, report.seconds, first=report.epoch == 1)
            run.lane.rest(report.failures, failed=True)
            reports.append((run, report))
        if watched and update.lanes:  # the other lanes are as they were reported last
            for run in self.runs:
                run.busy = False
        return reports, stepped

    def hold(self, update: WorkerUpdate) -> None:
        """Keep the update of an ended epoch until all lanes have ended theirs.

        A checkpoint that is saved until then must have the whole epoch.
        """
        states = [replace(lane, state=map_tree(np.array, lane.state)) for lane in update.lanes]
        generators = {name: np.array(state) for name, state in update.generators.items()}
        self._held = WorkerUpdate(states, generators)
        for run in self.runs:
            run.busy = False
            run.read_up = True

    def take_held(self) -> Reports:
        """Take in the update that was held, and return its reports. State that a callback has changed stays."""
        held, self._held = self._held, None
        if held is None:
            return []
        parts = (*WEIGHTS, "optimizer")
        changed = [(run, run.lane.read(run.names, parts)) for run in self.runs if _remote(run).changed]
        reports, _ = self.receive(held, watched=True)
        for run in self.runs:
            run.read_up = False
        for run, state in changed:
            run.bring_here(to_change=True).write(run.names, state)
        return reports

    def reply(self) -> OwnerReply:
        """Return the decisions of this process since the last update."""
        reply = OwnerReply()
        for number, run in enumerate(self.runs):
            remote = _remote(run)
            reply.stopped[number], remote.stopped = remote.stopped, []
            if remote.changed:
                reply.changed[number] = run.host_state()
                reply.factors[number] = run.factors.state()
                remote.changed = False
        self._mark_busy()
        return reply

    def _mark_busy(self) -> None:
        for run in next_wave(self.runs):
            run.busy = True

    def note_started(self) -> None:
        """Note that a worker has started to run these lanes."""
        for run in self.runs:
            _remote(run).budget.note_started()

    def after_worker_end(self, end: WorkerEnd) -> tuple[Reports, list["RemoteLanes"]]:
        """Return the reports of lanes that lost too many workers, and the lanes that another worker continues.

        Lanes whose worker had started continue one by one, because one of them may have killed the worker.
        """
        for run in self.runs:
            _remote(run).budget.charge(end)
            run.busy = False
        lost = [run for run in self.runs if _remote(run).budget.is_spent]
        left = [run for run in self.runs if run.working and run not in lost]
        apart = [[run] for run in left] if end.started else [left] * bool(left)
        return fail_runs(lost, end.reason), [RemoteLanes(own, self.home) for own in apart]


def fail_runs(runs: Sequence[LaneRun], reason: str) -> Reports:
    """Set aside all members of lanes that no worker will continue. Return their reports."""
    reports = []
    for run in runs:
        run.busy = False
        failures = {
            name: Failure(run.epoch + 1, int(run.steps_done[run.lane.positions[name]]) + 1, reason)
            for name in run.training()
        }
        run.lane.rest(failures, failed=True)
        if failures:
            reports.append((run, EpochReport(run.epoch + 1, {}, failures, 0, 0.0)))
    return reports


def work_of(run: LaneRun) -> float:
    """Return the seconds that a lane's run will take if the time of a step is known, or else its steps."""
    steps = 1.0 if run.known_steps is None else float((run.known_steps * run.epochs).max())
    return steps * (run.lane.seconds_per_step or 1.0)


def _remote(run: LaneRun) -> RemoteState:
    assert run.remote is not None
    return run.remote
