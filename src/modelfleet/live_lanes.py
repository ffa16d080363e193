"""Live lanes of a fleet, kept from verb to verb for the optimizer's state and the programs."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from modelfleet.errors import FleetWarning
from modelfleet.garbage import without_full_collections
from modelfleet.lanes import DevicePool, Groups, Lane, LaneBuilder, LaneSpec, saved_state
from modelfleet.lanes.saved_state import TrainingState
from modelfleet.members import Member
from modelfleet.planning import width_classes
from modelfleet.planning.fusability import refuse_data_parallel, refuse_on_cluster, refuse_unfused
from modelfleet.planning.measurements import UNKNOWN_STEPS
from modelfleet.planning.placement import place_by_size
from modelfleet.planning.plan import Plan
from modelfleet.planning.planner import Planner, usual_sharing
from modelfleet.planning.stored import StoredPlan
from modelfleet.recipe import Recipe
from modelfleet.runs.feeding import Feeding
from modelfleet.runs.halving import halve
from modelfleet.runs.job import Job
from modelfleet.runs.lane_run import LaneRun
from modelfleet.runs.opening import LaneOpener, OpenLane
from modelfleet.sharing import Sharings
from modelfleet.types import Kind, SharingName, State, Strategy

UNKNOWN_ROWS = 32  # assumed for a batch before there are data
Asked = tuple[list[tuple[str, ...]], bool]
"""Members of the requested lanes, and True if each lane is over all devices."""


class LiveLanes:
    """Lanes for all members of a fleet.

    A fleet keeps one set from verb to verb. A verb that a callback calls within a `fit` gets its own set,
    because the lanes that train may be narrowed, or have their state in a worker.

    Args:
        members: The members of the fleet, by name. The set sees members that join or leave later.
        recipes: The recipe of each member.
        pool: The devices of the fleet.
        builder: Builds the lanes.
        planner: Plans the runs.
        fixed: The lanes to use, if any, with the groups that they were made for.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        recipes: Mapping[str, Recipe | None],
        pool: DevicePool,
        builder: LaneBuilder,
        planner: Planner,
        fixed: tuple[Groups, Sequence[LaneSpec]] | None = None,
    ) -> None:
        self.lanes: list[Lane] = []
        """Current lanes. Every member is in one of them. Empty if they have to be built again."""
        self._members, self._recipes = members, recipes
        self._pool, self._builder, self._planner = pool, builder, planner
        self._groups, self._fixed = fixed or (None, None)
        self._asked: Asked | None = None
        """Request that the current lanes were built for."""
        self._sharing: SharingName | None = None
        """Sharing of the last fit."""
        self._holders: dict[str, tuple[Lane, str]] = {}
        """By member, the lane that has its current optimizer state, and its name in that lane."""
        self._saved: dict[str, TrainingState] = {}
        """State of members of a loaded fleet, until they are in a lane that trains or evaluates."""
        self._stamps: dict[str, Any] = {}
        """By member, a stamp of its model. While the model equals it, the lanes have the model's weights."""
        self._together: tuple[list[str], Any] | None = None
        """Some members, and their stamps, to be compared together."""

    @property
    def groups(self) -> Groups:
        """Return the members in groups, as they were when the lanes were made."""
        assert self._groups is not None
        return self._groups

    @property
    def current_groups(self) -> Groups | None:
        """Return the members in groups; None if they have to be grouped again."""
        return self._groups

    def part(self, members: Mapping[str, Member]) -> "LiveLanes":
        """Return another set for some members, with the optimizer state that they have here."""
        own = LiveLanes(members, self._recipes, self._pool, self._builder, self._planner)
        own.take_state(self, list(members))
        return own

    def aside(self, specs: Sequence[LaneSpec]) -> "LiveLanes":
        """Return another set for the same members, in these lanes, or in others if there are none."""
        fixed = (self._groups, specs) if specs and self._groups is not None else None
        return LiveLanes(self._members, self._recipes, self._pool, self._builder, self._planner, fixed)

    # --- for a verb ----------------------------------------------------------------------------------------------

    @without_full_collections()
    def open(
        self,
        job: Job,
        kind: Kind,
        strategy: Strategy,
        changed: Collection[str],
        sharings: Callable[[], Sharings],
        stored: StoredPlan | None = None,
    ) -> tuple[Plan, list[OpenLane], Feeding]:
        """Plan a verb, and open the lanes of the plan.

        Args:
            job: The arguments of the verb.
            kind: The verb.
            strategy: The strategy that the user chose.
            changed: Members whose models may hold weights that their lanes do not.
            sharings: Returns the ways to share the devices.
            stored: The plan of a run that is to be resumed.

        Returns:
            The plan, its lanes with their feeds, and the feeding that made them.
        """
        changed = self._really_changed(changed)
        specs, asked = self._specs(kind, strategy, changed, stored)
        stamps = {} if kind == "train" else self._new_stamps(changed)
        opener = LaneOpener(self._builder, self.groups, job, kind, existing=self.lanes, changed=changed)
        split = opener.feeding.split_by_form(specs)
        if split != specs:
            if strategy == "fused":
                refuse_unfused(split)
            asked = None  # the next verb's data may have other forms
        resumed = None if stored is None else stored.sharing
        plan = self._planner.plan(opener, split, strategy, sharings, resumed)
        opened = opener.open_all(plan.lanes)
        self._keep([one.lane for one in opened], asked)
        self._stamps.update(stamps)
        if kind == "train":
            self._sharing = plan.sharing
            self._stamps.clear()  # training changes the lanes
            self._together = None
        return plan, opened, opener.feeding

    def specs_for(self, job: Job, kind: Kind, strategy: Strategy, changed: Collection[str]) -> list[LaneSpec]:
        """Return the lanes of a verb that runs elsewhere. They are not opened here."""
        specs, _ = self._specs(kind, strategy, changed)
        return Feeding(job, self.groups).split_by_form(specs)

    def draw_states(self, names: Collection[str]) -> dict[str, State]:
        """Return the part of some members' state that their random draws depend on, on the host."""
        found: dict[str, State] = {}
        for name in names:
            if name in self._holders:
                lane, source = self._holders[name]
                found[name] = lane.read([source], ("member",), host=True)
        return found

    @without_full_collections()
    def plan_without_data(self, kind: Kind, changed: Collection[str]) -> tuple[Plan, list[Lane]]:
        """Return what can be planned without data, and the lanes of that plan."""
        self._stamps.clear()
        self._together = None
        specs, asked = self._specs(kind, "auto", changed)
        existing = {lane.spec.key: lane for lane in self.lanes}
        lanes = []
        costs = width_classes.Costs(UNKNOWN_STEPS, per_number=UNKNOWN_ROWS * 6 / width_classes.FLOPS_PER_SECOND)
        specs = [
            part
            for spec in specs
            for part in ([spec] if spec.key in existing else width_classes.divide(self.groups, spec, costs))
        ]
        for spec in specs:
            lane = existing.get(spec.key)
            if lane is None:
                lane = self._builder.build(self.groups, spec)
            else:
                lane.gather([name for name in lane.names if name in changed])
            lanes.append(lane)
        self._keep(lanes, asked)
        return Plan(tuple(specs), self._sharing or usual_sharing(self.groups)), lanes

    def _specs(
        self, kind: Kind, strategy: Strategy, changed: Collection[str], stored: StoredPlan | None = None
    ) -> tuple[list[LaneSpec], Asked]:
        """Return the lanes to start planning with, and the request that they are for.

        If the request is the same as last time, these are the current lanes.
        """
        members = list(self._members.values())
        if self._pool.clustered:
            refuse_on_cluster(strategy)
        if self._pool.refresh():
            self.lanes, self._groups = [], None
        if self._is_outdated(kind, changed):
            self.lanes, self._fixed, self._asked = [], None, None
            self._groups = None  # an error below must not leave the lanes of other groups
            self._groups = Groups(self._pool, members, self._recipes, kind)
        groups = self.groups
        for name, (lane, source) in self._holders.items():
            groups.epochs[name] = int(lane.epochs[lane.positions[source]])
        groups.epochs.update({name: int(saved.epochs[0]) for name, saved in self._saved.items()})
        if kind == "train":
            groups.refuse_shared_parameters()
        if strategy == "fused":
            refuse_unfused(groups.specs)
        parallel = "data_parallel" in (strategy, None if stored is None else stored.sharing)
        if parallel:
            refuse_data_parallel(members, self._pool.of_all(members))
        asked = self._asked_for(strategy, parallel, stored)
        key = [spec.members for spec in asked], parallel
        usable = self.lanes and not (strategy == "fused" and any(not lane.spec.fused for lane in self.lanes))
        if usable and key == self._asked and stored is None:
            return [lane.spec for lane in self.lanes], key
        if stored is not None or parallel or self._fixed is not None:
            return groups.on_first_device(asked), key
        return place_by_size(groups, asked), key

    def _asked_for(self, strategy: Strategy, parallel: bool, stored: StoredPlan | None) -> list[LaneSpec]:
        if self._fixed is not None:
            return list(self._fixed)
        if stored is not None and stored.members == set(self._members):
            return stored.specs(self.groups)
        # With several devices each has a thread or a process, and groups need not be taken apart for them.
        whole = {"auto", "fused", "data_parallel"}
        if self.groups.several_devices:
            whole |= {"threads", "processes"}
        if strategy not in whole and not parallel:
            return self.groups.apart(f'strategy="{strategy}"')
        if parallel or self.groups.several_devices:  # what is placed, or divided by rows, is not padded
            return [part for spec in self.groups.specs for part in width_classes.apart(self.groups, spec)]
        return self.groups.specs

    def _is_outdated(self, kind: Kind, changed: Collection[str]) -> bool:
        """Return True if the members have to be grouped again."""
        if self._groups is None or self._groups.tasks.keys() != self._members.keys():
            return True
        if self._groups.kind == "predict" and kind != "predict":
            return True
        # A user who holds a model may have changed its structure, for example frozen a layer.
        for name in changed:
            member = self._members[name]
            if member.framework.signature(member.model) != self._groups.tasks[name].signature:
                return True
        return not all(lane.engine.still_shared(lane.members) for lane in self.lanes)

    def _really_changed(self, held: Collection[str]) -> list[str]:
        """Return those members, of some that users hold, whose models may differ from the state of their lanes."""
        if self.hold_weights_of(held):
            return []
        stamps, members = self._stamps, self._members
        return [name for name in held if name not in stamps or not stamps[name].same(members[name].model)]

    def hold_weights_of(self, held: Collection[str], *, same_structure: bool = False) -> bool:
        """Return True if the lanes have the weights of the models of these members.

        With `same_structure`, it is known that the models have the structure that they had.
        """
        if not held:
            return True
        names = list(held)
        if self._together is None or self._together[0] != names:
            stamps = [self._stamps.get(name) for name in names]
            frameworks = {self._members[name].framework for name in names}
            if None in stamps or len(frameworks) > 1:
                return False
            self._together = names, next(iter(frameworks)).ModelStamps(stamps)  # pyrefly: ignore
        stamps = self._together[1]
        return stamps.same_weights() if same_structure else stamps.same([self._members[n].model for n in names])

    def _new_stamps(self, names: Collection[str]) -> dict[str, Any]:
        """Return stamps of members' models. They must be taken before a lane reads the models."""
        self._together = None
        for name in names:
            self._stamps.pop(name, None)  # not valid again if the models can't be read now
        members = (self._members[name] for name in names)
        return {m.name: m.framework.ModelStamp(m.model) for m in members if hasattr(m.framework, "ModelStamp")}

    # --- upkeep --------------------------------------------------------------------------------------------------

    def _keep(self, lanes: list[Lane], asked: Asked | None) -> None:
        """Make these the current lanes. They take over the members' optimizer state.

        Args:
            lanes: The lanes.
            asked: The request that they are for. None if the next verb must not start with these lanes.
        """
        for lane in lanes:
            for holder, names in self._by_holder(lane.names).items():
                if holder is not lane:
                    lane.adopt(names, holder, [self._holders[name][1] for name in names])
        # Lanes that only predict may have another optimizer, or none.
        saved = {} if self.groups.kind == "predict" else self._saved
        for lane in lanes:
            saved_state.write(lane, {name: saved[name] for name in lane.names if name in saved})
        # Only now: after a Ctrl-C before this line, the next verb still finds the state where it is.
        self.lanes, self._asked, self._holders = lanes, asked, _own_members(lanes)
        self._saved = {} if saved else self._saved

    def regroup(self) -> None:
        """Group the members again at the next verb. Their optimizer state is kept."""
        self._groups = None

    def drop(self, name: str) -> None:
        """Forget a member that leaves the fleet. If possible, the others stay in their groups as they are."""
        groups = self._groups
        self.forget([name])
        if groups is not None and groups.drop(name):
            self._groups = groups

    def forget(self, names: Collection[str]) -> None:
        """Group the members again at the next verb. The optimizer state of some is dropped."""
        self.regroup()
        for name in names:
            self._holders.pop(name, None)
            self._saved.pop(name, None)
            self._stamps.pop(name, None)
        self._together = None

    def copy_state(self, name: str, clone: str) -> None:
        """Have a member start with another's optimizer state."""
        self.regroup()
        if name in self._holders:
            self._holders[clone] = self._holders[name]
        if name in self._saved:
            self._saved[clone] = self._saved[name]

    def take_state(self, other: "LiveLanes", names: Collection[str]) -> None:
        """Have members start with the optimizer state that they have in another fleet."""
        self._holders.update({name: other._holders[name] for name in names if name in other._holders})
        self._saved.update({name: other._saved[name] for name in names if name in other._saved})

    def give_saved(self, states: Mapping[str, TrainingState]) -> None:
        """Have members start with their saved state, given by name."""
        self._saved.update(states)

    def warn_of_dropped_state(self, names: Iterable[str]) -> None:
        """Warn if members of a loaded fleet whose recipe was incomplete lose their state to another optimizer."""
        incomplete = {name: own for name in names if (own := self._recipes[name]) is not None and own.missing}
        dropped = {name: own.optimizer_of(name) for name, own in incomplete.items() if name in self._saved}
        if dropped:
            first, others = next(iter(dropped)), f" (and {len(dropped) - 1} more)" if len(dropped) > 1 else ""
            warnings.warn(
                f"member {first!r}{others} was saved with the optimizer {dropped[first]!r}, and is compiled with "
                f"another: the saved optimizer state is dropped. Compile with the same optimizer to keep it.",
                FleetWarning,
                stacklevel=3,
            )

    def training_states(self) -> list[tuple[list[str], TrainingState]]:
        """Return the state of the members that have taken steps, those of one lane together."""
        found: list[tuple[list[str], TrainingState]] = []
        for lane, names in self._by_holder(self._holders).items():
            by_source: dict[str, list[str]] = {}  # several for a member that was cloned
            for name in names:
                source = self._holders[name][1]
                if lane.steps[lane.positions[source]]:  # not of a member that still has its loaded state
                    by_source.setdefault(source, []).append(name)
            for sources, state in saved_state.read(lane, list(by_source)):
                found.append(([by_source[source][0] for source in sources], state))
                clones = [(row, clone) for row, source in enumerate(sources) for clone in by_source[source][1:]]
                found += [([clone], state.row(row)) for row, clone in clones]
        return [*found, *(([name], saved) for name, saved in self._saved.items())]

    def halve(self, run: LaneRun) -> list[LaneRun]:
        """Return two runs in place of one whose lane has run out of memory. The width that fits is remembered."""
        halves = halve(self._builder, self.groups, run)
        self._planner.measurements.remember_width(self.groups, run.lane.spec, run.feed, len(halves[0].names))
        self._holders.update(_own_members([half.lane for half in halves]))
        # The next fit is planned from the start, and does not use the halved lane again.
        self.lanes, self._asked = [lane for lane in self.lanes if lane is not run.lane], None
        return halves

    @without_full_collections()
    def write_back(self) -> None:
        """Write the current state of every member into its model."""
        for lane, names in self._by_holder(self._holders).items():
            lane.scatter([self._holders[name][1] for name in names])

    def _by_holder(self, names: Iterable[str]) -> dict[Lane, list[str]]:
        """Return the members whose optimizer state is in some lane, by that lane."""
        found: dict[Lane, list[str]] = {}
        for name in names:
            if name in self._holders:
                found.setdefault(self._holders[name][0], []).append(name)
        return found


def _own_members(lanes: Sequence[Lane]) -> dict[str, tuple[Lane, str]]:
    """Return the lane of each member, and the member's name there."""
    return {name: (lane, name) for lane in lanes for name in lane.names}
