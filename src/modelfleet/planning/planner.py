"""Planning a run: which lanes there are, where they run, and how they share their devices.

The planner starts with every group fused, and looks at a step or two of each, which tells how long the run will
take. If it is long enough, the planner times a step of each group fused and apart, keeps what is faster, and then
times the lanes taking turns, in threads and in processes. Measuring may take a small part of the run, and
measurements are remembered (`timings`). With several devices, lanes are placed first, by the times that are known.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from modelfleet.errors import StrategyError
from modelfleet.lanes import Groups, LaneSpec
from modelfleet.lanes.shared_objects import find_shared_object
from modelfleet.lanes.spec import join_reasons
from modelfleet.nvidia import START_MPS, shared_by_processes
from modelfleet.planning import lane_width, placement, width_classes
from modelfleet.planning.fusability import split_indivisible, split_unfusable
from modelfleet.planning.measurements import (
    UNKNOWN_STEPS,
    Budget,
    Measurements,
    steps_per_epoch,
    total_steps,
    work,
)
from modelfleet.planning.placement import Load
from modelfleet.planning.plan import Plan
from modelfleet.planning.printing import milliseconds
from modelfleet.runs.opening import LaneOpener, OpenLane
from modelfleet.sharing import Sharings
from modelfleet.types import SharingName, Strategy
from modelfleet.workers import CannotSendError
from modelfleet.workers.pickling import pickle_value
from modelfleet.workers.process import idle_count

WORKER_START_SECONDS = 8.0  # until a new worker process has taken its first step
FEW_STEPS = 50  # assumed for lanes that only predict or evaluate
BETTER = 0.9  # an alternative must take at most this fraction of the time
OTHER_WIDTH_SECONDS = 0.5  # of a trial of narrower lanes, which are traced anew
SHARING_SECONDS = 0.1  # of steps that a trial of a sharing takes

Placement = tuple[tuple[tuple[str, ...], bool, str | None], ...]
"""Members, fused and device of every lane."""


class Planner:
    """Plans the runs of one fleet, and remembers its measurements."""

    def __init__(self) -> None:
        self.measurements = Measurements()
        self._placed: tuple[Placement, Placement] = (), ()  # the last placement, and the lanes of that plan

    def plan(
        self,
        opener: LaneOpener,
        specs: Sequence[LaneSpec],
        strategy: Strategy,
        sharings: Callable[[], Sharings],
        resumed: SharingName | None = None,
    ) -> Plan:
        """Return the plan of a verb, and open all of its lanes.

        Args:
            opener: Opens lanes for the verb.
            specs: The lanes to start with.
            strategy: The strategy that the user chose.
            sharings: Returns the ways to share the devices. Only a fit needs them.
            resumed: The sharing of a run that is resumed from a checkpoint. Its lanes stay as they are.

        Raises:
            StrategyError: The strategy is not possible.
        """
        if strategy == "auto" and resumed is None:
            specs = [part for spec in specs for part in self._by_width(opener, spec)]
        specs = split_unfusable(opener, specs, strategy)
        if opener.kind != "train":
            return Plan(tuple(specs), usual_sharing(opener.groups))
        plan = self._plan_fit(opener, specs, strategy, sharings, resumed)
        if plan.sharing == "threads":
            plan = self._refuse_shared_objects(opener, plan, strategy)
        return replace(plan, note=_cost_of_processes(opener.groups, plan))

    @staticmethod
    def _refuse_shared_objects(opener: LaneOpener, plan: Plan, strategy: Strategy) -> Plan:
        shared = find_shared_object([one.lane for one in opener.open_all(plan.lanes)])
        if shared is None:
            return plan
        if strategy == "threads":
            first, second, module = shared
            raise StrategyError(
                f'strategy="threads" is not possible: members {first!r} and {second!r} hold the same '
                f"module {module!r}, and the step of one would set its mode while the other runs it. Give "
                f'each a copy (copy.deepcopy), or use "interleaved".'
            )
        return replace(plan, sharing="interleaved")

    def _plan_fit(
        self,
        opener: LaneOpener,
        specs: Sequence[LaneSpec],
        strategy: Strategy,
        sharings: Callable[[], Sharings],
        resumed: SharingName | None,
    ) -> Plan:
        groups = opener.groups
        if "data_parallel" in (strategy, resumed):
            return Plan(tuple(split_indivisible(opener, specs)), "data_parallel")
        sharing = usual_sharing(groups)
        if strategy in ("interleaved", "threads", "processes"):
            sharing = strategy
        clustered = bool(groups.pool.places)
        if resumed is not None or clustered:  # the devices of a cluster can't be measured from here
            if resumed is None:
                specs = self._place(opener, specs)
            elif strategy in ("auto", "fused"):
                sharing = resumed
            return Plan(tuple(specs), "processes" if clustered else sharing)
        others: tuple[SharingName, ...] = ()
        if strategy == "auto":
            # A loader was read a little to check it. A worker would continue there, not from the start.
            loaders = opener.feeding.uses_loaders("data", "validation")
            others = ("threads",) if loaders or not _may_use_processes(groups) else ("threads", "processes")
        if not groups.several_devices:
            if strategy != "auto":
                return Plan(tuple(specs), sharing)
            return self._measure(opener, specs, sharings(), others, sharing)
        specs = self._place(opener, specs)
        plan = Plan(tuple(specs), sharing)
        if strategy in ("auto", "threads", "processes"):
            others = tuple(name for name in others if name == "processes")
            plan = self._measure(opener, specs, sharings(), others, sharing)
            if others and self._processes_pay_off(opener, plan):
                plan = replace(plan, sharing="processes")
        self._placed = self._placed[0], _placement(plan.lanes)
        return plan

    # --- widths --------------------------------------------------------------------------------------------------

    def _by_width(self, opener: LaneOpener, spec: LaneSpec) -> list[LaneSpec]:
        """Return a lane as it is, or in width classes if its members are not equally wide."""
        groups = opener.groups
        if opener.is_open(spec) or not width_classes.has_several(groups, spec):
            return [spec]
        return width_classes.divide(groups, spec, self._width_costs(opener, spec))

    def _width_costs(self, opener: LaneOpener, spec: LaneSpec) -> width_classes.Costs:
        """Return what lanes of some widths cost, from plain steps of the smallest and the widest member."""
        if opener.feeding.uses_loaders("data"):  # a loader is not read to measure
            return width_classes.Costs(UNKNOWN_STEPS, per_number=width_classes.UNKNOWN_PER_NUMBER)
        smallest, widest = width_classes.smallest_and_widest(opener.groups, spec)
        opened = [opener.open(LaneSpec((name,), False, device=spec.device)) for name, _ in (smallest, widest)]
        rows = opened[0].feed.first().size
        per_number = 6 * rows / width_classes.FLOPS_PER_SECOND  # forward and backward of a matrix product
        if opener.kind != "train":
            return width_classes.Costs(FEW_STEPS, per_number=per_number)
        steps = max(total_steps(one, opener.job) for one in opened)
        budget = Budget(steps)
        small, wide = (self.measurements.step_seconds(opener, one.spec, one.feed, budget) for one in opened)
        if small is None or wide is None:
            return width_classes.Costs(steps, per_number=per_number)
        if wide > 1.3 * small:  # otherwise the difference may be noise
            per_number = max(per_number, (wide - small) / (widest[1] - smallest[1]))
        return width_classes.Costs(steps, max(small - per_number * smallest[1], 0.0), per_number)

    # --- measuring -----------------------------------------------------------------------------------------------

    def _measure(
        self,
        opener: LaneOpener,
        specs: Sequence[LaneSpec],
        sharings: Sharings,
        others: Sequence[SharingName],
        usual: SharingName,
    ) -> Plan:
        """Return the plan that measures best, if the run is long enough to measure at all."""
        begun = time.perf_counter()
        opened = opener.open_all(specs)
        # A single lane of one member leaves nothing to choose, so nothing is worth measuring.
        choice = len(opened) > 1 or (opened[0].spec.width > 1 and opened[0].lane.engine.fused)
        budget = Budget(max(total_steps(one, opener.job) for one in opened) if choice else 0)
        if budget.left():
            looks = self._look(opener, opened, budget)
            times = [look * total_steps(one, opener.job) for one, look in zip(opened, looks, strict=True) if look]
            if len(times) == len(opened):
                budget.limit(sum(times))
        chosen = [spec for one in opened for spec in self._divide(opener, one, budget)]
        chosen = [self._with_known_time(opener, opener.open(spec)) for spec in chosen]
        plan = self._share(opener, Plan(tuple(chosen), usual), sharings, others, budget)
        self.measurements.timings.save()
        return replace(plan, measuring_seconds=time.perf_counter() - begun)

    def _look(self, opener: LaneOpener, opened: Sequence[OpenLane], budget: Budget) -> list[float | None]:
        """Return the time of each lane's step, after a first look at lanes that are not known.

        The first step of some frameworks compiles for a long time. Such lanes are looked at side by side.
        """
        lanes = [one.lane for one in opened]
        look = partial(self.measurements.estimate, opener, budget=budget)
        compiling = all(getattr(lane.members[0].framework, "COMPILES_FIRST", False) for lane in lanes)
        if len(lanes) == 1 or not compiling or find_shared_object(lanes) is not None:
            return [look(one) for one in opened]
        count = min(len(lanes), os.cpu_count() or 1)
        with ThreadPoolExecutor(count, "modelfleet-look") as pool:
            return list(pool.map(look, opened))

    def _with_known_time(self, opener: LaneOpener, opened: OpenLane) -> LaneSpec:
        seconds = self.measurements.known_step_seconds(opener.groups, opened)
        return replace(opened.spec, predicted_seconds_per_step=seconds)

    def _divide(self, opener: LaneOpener, opened: OpenLane, budget: Budget) -> list[LaneSpec]:
        """Return a lane as it is, in waves if it is too wide, or its members apart, whichever is fastest."""
        spec = opened.spec
        width = lane_width.widest(opened)
        remembered = self.measurements.known_width(opener.groups, opened)
        if remembered is not None:
            width = max(1, min(width, remembered))
        if spec.width == 1 or not opened.lane.engine.fused:
            self.measurements.step_seconds(opener, spec, opened.feed, budget)
            return [spec]
        lanes = [spec]
        if width < spec.width:
            reason = join_reasons(spec.apart_because, f"{spec.width} at once do not fit into memory")
            lanes = [
                replace(spec, members=names, apart_because=reason, wave=wave)
                for wave, names in enumerate(lane_width.waves(width, spec.members))
            ]
            lanes = split_unfusable(opener, lanes, "auto")
        return self._fastest_width(opener, opened, lanes, budget)

    def _fastest_width(
        self, opener: LaneOpener, opened: OpenLane, lanes: list[LaneSpec], budget: Budget
    ) -> list[LaneSpec]:
        """Return the lanes, narrower ones, or every member apart, by the time of a step of all members."""
        spec, spent = opened.spec, budget.spent

        def measure(part: LaneSpec, *, expected: float = 0.0, again: bool = False) -> float | None:
            feed = opener.part_of_feed(part, opened)
            return self.measurements.step_seconds(opener, part, feed, budget, expected=expected, again=again)

        narrow, quarter = [], lanes[0].width // 4
        if quarter >= 2 and not width_classes.has_several(opener.groups, spec):
            narrow = [replace(spec, members=names) for names in lane_width.waves(quarter, spec.members)]
        single = LaneSpec(spec.members[:1], False, device=spec.device)
        wide = measure(lanes[0])
        if wide is None:
            return lanes
        budget.predict(wide * len(lanes) * total_steps(opened, opener.job))
        apart = measure(single)
        narrower = measure(narrow[0], expected=OTHER_WIDTH_SECONDS) if narrow else None

        def step_of_all(seconds: float | None, count: float) -> float:
            return math.inf if seconds is None else seconds * count

        ratio = opened.lane.engine.time_ratio
        in_narrow = step_of_all(narrower, ratio * len(narrow))
        one_by_one = step_of_all(apart, spec.width)
        if budget.spent > spent and min(in_narrow, one_by_one) < wide * ratio * len(lanes):
            # Another process may have disturbed the first trial: the lanes stay as they are unless it shows twice.
            wide = measure(lanes[0], again=True) or wide
        as_is = wide * ratio * len(lanes)
        if one_by_one <= min(as_is, in_narrow):  # plain steps win ties
            faster = (
                f"apart is {'faster than' if one_by_one < as_is else 'as fast as'} fused: "
                f"{milliseconds(one_by_one)} a step of all, not {milliseconds(as_is)}"
            )
            reason = join_reasons(spec.apart_because, faster)
            return [
                replace(spec, members=(name,), fused=False, apart_because=reason, split=None)
                for name in spec.members
            ]
        if in_narrow < BETTER * as_is:
            faster = (
                f"lanes of {quarter} are faster than one of {spec.width} ({milliseconds(in_narrow)} a step of all)"
            )
            reason = join_reasons(spec.apart_because, faster)
            return [replace(lane, apart_because=reason) for lane in narrow]
        return lanes

    def _share(
        self,
        opener: LaneOpener,
        plan: Plan,
        sharings: Sharings,
        others: Sequence[SharingName],
        budget: Budget,
    ) -> Plan:
        """Return the plan with the sharing that measures best, if there is more than one lane."""
        opened = opener.open_all(plan.lanes)
        job, groups = opener.job, opener.groups
        known = [spec.predicted_seconds_per_step for spec in plan.lanes]
        if any(seconds is None for seconds in known):
            return plan
        per_epoch = [steps_per_epoch(one, job) for one in opened]
        turns = _busiest_device(plan.lanes, per_epoch)
        if len(opened) == 1 or any(spec.wave for spec in plan.lanes):
            return replace(plan, predicted_seconds=turns * job.longest)
        best = self.measurements.known_epoch_seconds(groups, opened, plan.sharing) or turns
        sharing = plan.sharing
        budget.predict(best * job.longest)
        for other in others:
            start = WORKER_START_SECONDS if other == "processes" else 0.0
            seconds = self.measurements.known_epoch_seconds(groups, opened, other)
            measured = self.measurements.are_measured(groups, opened)
            if seconds is None and measured and budget.allows(start + budget.longest):
                shorten = max(1.0, turns / SHARING_SECONDS)  # the trial takes a few turns of each lane
                steps = [max(1, min(64, round(count / shorten))) for count in per_epoch]
                scale = turns / max(_busiest_device(plan.lanes, steps), 1e-9)
                seconds = self.measurements.epoch_seconds(
                    opener, opened, other, sharings[other], steps, scale, budget
                )
            if seconds is None:
                continue
            total = seconds * job.longest + (0.0 if _workers_are_idle(other) else start)
            if total < BETTER * best * job.longest:
                best, sharing = seconds, other
        return replace(plan, sharing=sharing, predicted_seconds=best * job.longest)

    @staticmethod
    def _processes_pay_off(opener: LaneOpener, plan: Plan) -> bool:
        """Return True if lanes on several CPU devices are better in processes, though it was not measured.

        Compiled steps hold Python's lock, so that threads wait for each other: two took twice as long as one.
        """
        devices = {spec.device or "" for spec in plan.lanes}
        if plan.predicted_seconds is None or len(devices) == 1 or not all(d.startswith("cpu") for d in devices):
            return False
        if plan.predicted_seconds < 2 * WORKER_START_SECONDS and idle_count() < len(devices):
            return False
        try:
            pickle_value([[task.member.model for task in opener.groups.tasks.values()], opener.job], "the members")
        except CannotSendError:
            return False
        return True

    # --- placing -------------------------------------------------------------------------------------------------

    def _place(self, opener: LaneOpener, specs: Sequence[LaneSpec]) -> list[LaneSpec]:
        """Return the lanes placed by their cost."""
        if opener.feeding.uses_loaders("data"):
            # Loaders were read a little to check them, and can't always be restarted: their lanes stay in place.
            return list(specs)
        now = _placement(specs)
        placed = placement.place(self._loads(opener, specs))
        best = _placement(placed)
        if best == now or self._placed == (best, now):
            self._placed = best, now
            return list(specs)
        self._placed = best, best
        return [opener.open(spec).spec for spec in placed]

    def _loads(self, opener: LaneOpener, specs: Sequence[LaneSpec]) -> list[Load]:
        """Return the loads to place. Costs are seconds if the times of all lanes are known, otherwise sizes."""
        opened = opener.open_all(specs)
        job, groups = opener.job, opener.groups
        budget = Budget(max(total_steps(one, job) for one in opened))
        seconds: list[float] = []
        for one in opened:
            step = None
            if not groups.pool.places:
                step = self.measurements.step_seconds(opener, one.spec, one.feed, budget)
            if step is not None:
                seconds.append(step * total_steps(one, job))
        costs = seconds if len(seconds) == len(opened) else [work(one, job) for one in opened]
        return [
            Load(spec, sum(costs[number] for number in numbers), groups.devices(spec))
            for spec, numbers in placement.undo_cuts(groups, specs)
        ]


def usual_sharing(groups: Groups) -> SharingName:
    """Return how lanes share their devices before anything was measured."""
    if groups.pool.places:
        return "processes"
    return "threads" if groups.several_devices else "interleaved"


def _may_use_processes(groups: Groups) -> bool:
    """Return True if processes can compute side by side: on a device each, or on one that they can share."""
    return groups.several_devices or shared_by_processes(groups.devices(groups.specs[0])[0])


def _cost_of_processes(groups: Groups, plan: Plan) -> str:
    """Return what processes cost that take turns on one accelerator; an empty text if these do not."""
    if plan.sharing != "processes" or _may_use_processes(groups):
        return ""
    device = groups.devices(groups.specs[0])[0]
    service = f", or start NVIDIA's multi-process service ({START_MPS})" if device.kind == "cuda" else ""
    return (
        f"processes take turns on {device}, and each takes memory there for a context of its own. Use "
        f'"interleaved" or "threads"{service}.'
    )


def _placement(specs: Sequence[LaneSpec]) -> Placement:
    return tuple((spec.members, spec.fused, spec.device) for spec in specs)


def _busiest_device(specs: Sequence[LaneSpec], steps: Sequence[int]) -> float:
    """Return the seconds of the busiest device. The lanes of a device take turns; devices run side by side."""
    busy: dict[str | None, float] = {}
    for spec, count in zip(specs, steps, strict=True):
        busy[spec.device] = busy.get(spec.device, 0.0) + (spec.predicted_seconds_per_step or 0.0) * count
    return max(busy.values())


def _workers_are_idle(sharing: str) -> bool:
    return sharing != "processes" or idle_count() >= min(2, os.cpu_count() or 1)
