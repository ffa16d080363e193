"""Worker's side of a fit: some of a fleet's lanes, taking turns in a worker process or on a Ray node."""

from collections.abc import Generator
from dataclasses import replace

import numpy as np

from modelfleet import frameworks
from modelfleet.errors import StrategyError
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.contexts import computing, using_settings
from modelfleet.lanes import DevicePool, Groups, LaneBuilder
from modelfleet.members import Member
from modelfleet.remote.messages import LaneOrder, LaneUpdate, OwnerReply, WorkerUpdate
from modelfleet.runs.events import EpochsEnded, Reports, RunOptions, due
from modelfleet.runs.interleaved import interleaved
from modelfleet.runs.lane_run import EpochReport, LaneRun, Progress
from modelfleet.runs.opening import LaneOpener
from modelfleet.runs.starting import make_runs
from modelfleet.trees import map_tree
from modelfleet.workers import interrupted

RENDEZVOUS_TIMEOUT = 300.0  # seconds that ranks wait for each other: one of them may be compiling

_builders: dict[str, LaneBuilder] = {}
"""Builder of the last fleet, which keeps its programs."""


def builder_of(fleet: str) -> LaneBuilder:
    """Return the builder of a fleet. Only that of the last fleet is kept."""
    if fleet not in _builders:
        _builders.clear()
        _builders[fleet] = LaneBuilder()
    return _builders[fleet]


def run_lanes(order: LaneOrder) -> Generator[WorkerUpdate, OwnerReply, None]:
    """Run the lanes of an order. Yield the updates, and receive the replies."""
    yield WorkerUpdate()
    with using_settings(order.settings), computing():
        yield from _run_lanes(order)


def _run_lanes(order: LaneOrder) -> Generator[WorkerUpdate, OwnerReply, None]:
    ranks = _join_ranks(order)
    lanes = _WorkerLanes(order, ranks)
    stopped = interrupted if ranks is None else lambda: ranks.any(interrupted())
    options = RunOptions(order.together, order.watched, stopped, lanes.in_step, _refuse_to_halve)
    for run in lanes.runs:
        run.begin()
    try:
        yield WorkerUpdate()
        for event in interleaved(lanes.runs, options):
            reports = event.reports if isinstance(event, EpochsEnded) else []
            for run in [run for run, _ in reports] if isinstance(event, EpochsEnded) else [event.run]:
                lanes.refuse_python_state(run)
            if isinstance(event, EpochsEnded):
                updates = [lanes.update(run, report) for run, report in reports]
            elif order.watched and lanes.have_stepped(event.run, options):
                updates = [lanes.update(run) for run in due(lanes.runs, options)]
            else:
                continue
            reply = yield WorkerUpdate(updates, global_generators.state())
            if reply.end:
                return
            lanes.apply(reply, reports)
    finally:
        for run in lanes.runs:
            run.close()
            run.lane.engine.stop()
        if ranks is not None:
            ranks.close()
    yield WorkerUpdate([lanes.update(run) for run in lanes.runs], global_generators.state())


def _join_ranks(order: LaneOrder):  # noqa: ANN202  a framework's own type
    """Return the framework's process group for an order that several workers share; None for one worker."""
    if order.ranks is None:
        return None
    meeting, rank, size = order.ranks
    address = meeting if isinstance(meeting, str) else meeting.address
    framework = frameworks.adapter(order.members[0][3])
    (device,) = framework.choose(order.devices)[:1]
    native = framework.native(device)
    return framework.ProcessGroup.join(address, rank, size, RENDEZVOUS_TIMEOUT, device=str(native))


def _refuse_to_halve(run: LaneRun) -> None:
    raise AssertionError("lanes in workers are not halved")


class _WorkerLanes:
    """Lanes of an order, live in this worker."""

    def __init__(self, order: LaneOrder, ranks: object | None) -> None:
        self._reports_state = order.ranks is None or order.ranks[1] == 0  # of all ranks the first reports it
        builder = builder_of(order.fleet)
        job = order.job
        if order.data is not None:
            data, validation = order.data.get()
            job = replace(job, data=data, validation=validation)
        members = [Member(name, model, seed, frameworks.adapter(f)) for name, model, seed, f in order.members]
        global_generators.restore(order.generators)
        groups = Groups(DevicePool(order.devices), members, order.recipes, "train")
        for spec, progress in zip(order.lanes, order.progress, strict=True):
            # Shuffles depend on them.
            groups.epochs.update(zip(spec.members, progress.before["epochs"], strict=True))
        opener = LaneOpener(builder, groups, job, "train", ranks=ranks)
        self.in_step = len(order.lanes) > 1 and opener.feeding.one_loader
        self.runs = make_runs(opener.open_all(order.lanes), opener.feeding)
        self._signatures = {id(run): run.lane.signature for run in self.runs if len(run.lane.members) == 1}
        self._numbers = {id(run): number for number, run in enumerate(self.runs)}
        for run, progress, state in zip(self.runs, order.progress, order.states, strict=True):
            run.lane.write(run.names, map_tree(_writable, state))
            self._resume(run, progress)
            # Lanes that read one loader take its batches one by one.
            run.choose_turn_length(single=order.watched or self.in_step)
        if any(progress.epoch or progress.step for progress in order.progress):
            global_generators.restore(order.generators)
            for feed in (feed for run in self.runs for feed in run.feeds):
                feed.rewind({})

    @staticmethod
    def _resume(run: LaneRun, progress: Progress) -> None:
        """Continue where a lane was, whichever process took its steps until then."""
        run.resume(progress.lane, progress.epoch, progress.step)
        run.before = {name: np.array(column) for name, column in progress.before.items()}
        run.schedules.restore(progress.schedules)
        run.factors.restore(progress.factors)

    def refuse_python_state(self, run: LaneRun) -> None:
        """Raise StrategyError if a lane's first turn has changed more of its model than the reported tensors."""
        before = self._signatures.pop(id(run), None)
        member = run.lane.members[0]
        change = before and member.framework.difference(member.framework.signature(member.model), before)
        if change:
            raise StrategyError(
                f"member {member.name!r} keeps state in Python: after a step, {change}. In a worker process that "
                f'change would be lost. Use strategy="interleaved" or "threads", or keep the state in a buffer.'
            )

    def have_stepped(self, stepped: LaneRun, options: RunOptions) -> bool:
        """Return True if all lanes have taken the step that one of them has just taken.

        Only then the step is reported: the owner's callbacks must not see a lane that is ahead of the others.
        """
        now = stepped.epoch, stepped.step_in_epoch
        stepping = [run for run in due(self.runs, options) if not (run.at_end and run.epoch == now[0])]
        return all((run.epoch, run.step_in_epoch) >= now for run in stepping)

    def update(self, run: LaneRun, report: EpochReport | None = None) -> LaneUpdate:
        """Return a lane's state. The owner keeps it, so that nothing is lost if this worker dies."""
        losses = run.take_losses()
        if not self._reports_state:
            return LaneUpdate(self._numbers[id(run)], {}, run.progress(), report, {})
        return LaneUpdate(self._numbers[id(run)], run.host_state(), run.progress(), report, losses)

    def apply(self, reply: OwnerReply, reports: Reports) -> None:
        """Stop the members and load the states that the owner's reply names."""
        for number, state in reply.changed.items():
            # Copied: a framework may keep an array without copying it, and these are gone with the next reply.
            self.runs[number].lane.write(self.runs[number].names, map_tree(np.array, state))
            self.runs[number].factors.restore(reply.factors[number])
        for run, _ in reports:
            run.leave(reply.stopped.get(self._numbers[id(run)], []))


def _writable(array: np.ndarray) -> np.ndarray:
    """Return an array that a framework may keep: what came from a cluster is read-only."""
    return array if array.flags.writeable else array.copy()
