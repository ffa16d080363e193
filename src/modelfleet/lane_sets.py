"""A set of lanes for all members of a fleet, kept from verb to verb."""

from collections.abc import Callable, Collection, Mapping, Sequence

from modelfleet.checkpoints import Arrangement
from modelfleet.feeds import Feed
from modelfleet.lanes import Lane
from modelfleet.members import Member
from modelfleet.planning import supply
from modelfleet.planning.assembly import (
    Assembly,
    Part,
    Studied,
    refuse_here,
    refuse_undivided,
    refuse_unfused,
    settle,
)
from modelfleet.planning.placement import spread_out
from modelfleet.planning.planner import Choice, Planner
from modelfleet.planning.supply import Job
from modelfleet.recipe import Recipe
from modelfleet.sharing.shifts import Sharing


class LaneSet:
    """Lanes for all members of a fleet.

    A fleet keeps one set from verb to verb, for the optimizer's state and the programs. A verb within a `fit` has
    a set of its own: the lanes that train may be narrowed, or have their state in a worker.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        recipes: Mapping[str, Recipe | None],
        assembly: Assembly,
        planner: Planner,
    ) -> None:
        self.lanes: list[Lane] | None = None
        self.choice = Choice([])
        """How the lanes run."""
        self.asked: list[Part] = []
        """What the lanes were made for."""
        self._members, self._recipes = members, recipes
        self._assembly, self._planner = assembly, planner
        self._studied: Studied | None = None
        self._fixed = False  # whether the lanes stay in the parts they were made for
        self._parallel = False  # whether each lane is over all devices
        self._parted = False  # whether lanes were cut for the data of the last verb
        self._kind = ""  # what the lanes can do: "predict" only, or all
        self._trainable = False  # whether it is known that no two members train one parameter
        self._carried: dict[str, tuple[Lane, int]] = {}  # where a member's optimizer state is, between two sets

    @property
    def studied(self) -> Studied:
        """The members as they were when the lanes were made."""
        assert self._studied is not None
        return self._studied

    def aside(self, parts: Sequence[Part]) -> "LaneSet":
        """A set for the same members in these parts, or in others if `parts` is empty."""
        other = LaneSet(self._members, self._recipes, self._assembly, self._planner)
        if parts and self._studied is not None:
            other._studied, other._kind, other.asked = self._studied, self._kind, list(parts)
            other.lanes = [self._assembly.lane(self._studied, part) for part in parts]
            other._fixed = True
        return other

    def settled(
        self,
        strategy: str,
        job: Job,
        kind: str,
        handed: Collection[str],
        ways: Callable[[], dict[str, Callable[[Job], Sharing]]],
        kept: Arrangement | None = None,
    ) -> list[tuple[Lane, Feed]]:
        """The lanes with their feeds, checked against each other and ready for their steps.

        `handed` are the members whose models hold what their lanes may not. `kept` is the arrangement of a run
        that is to be resumed, if there is one.
        """
        lanes = self.ready(strategy, kind, handed, kept)
        own = self._alike(lanes, job, strategy)
        fed = supply.feeds(own, job)
        for lane, feed in fed:
            if kind == "predict":
                lane.engine.output_shape(feed.first(), lane.names[0])
            else:
                supply.check(lane, feed, job)
        settled = settle(self.studied, fed, kind, strategy)
        if kind == "train":
            sharing = None if kept is None else kept.sharing
            self.choice = self._planner.decide(self.studied, settled, job, strategy, ways(), sharing)
            settled = self.choice.lanes
        made = [lane for lane, _ in settled]
        if made != lanes:
            self.regroup()
            self._take(made)
        self._parted = own != lanes
        return settled

    def ready(
        self, strategy: str, kind: str, handed: Collection[str], kept: Arrangement | None = None
    ) -> list[Lane]:
        """The lanes of the fleet as it is now, their weights as the members' models have them."""
        lanes = self.lanes
        members = list(self._members.values())
        if self._assembly.clustered:
            refuse_here(strategy)
        if self._assembly.look():
            self.regroup()  # even if something is refused below: the next look finds nothing new
            lanes = None
        if lanes is None or self._restructured(lanes, handed) or (self._kind == "predict" and kind != "predict"):
            self._studied = self._assembly.study(members, self._recipes, kind)
            self._kind = kind
            lanes, self._fixed, self._trainable = None, False, False
            self.regroup()  # what is refused below must not leave lanes of another study
        if kind == "train" and not self._trainable:
            self.studied.refuse_shared_parameters()
            self._trainable = True
        if strategy == "fused":
            refuse_unfused(self.studied.groups)
        parallel = strategy == "data_parallel" or (kept is not None and kept.sharing == "data_parallel")
        if parallel:
            refuse_undivided(members, self._assembly.all_chosen(members))
        # On several devices there is a thread or a process for each, and groups need not be taken apart for them.
        whole = ("auto", "fused", "threads", "processes") if self.studied.scattered else ("auto", "fused")
        alone = strategy not in (*whole, "data_parallel")
        asked = self.studied.apart(f'strategy="{strategy}"') if alone else self.studied.groups
        if kept is not None and kept.members == set(self._members):
            asked = kept.placed(self.studied)
        asked = self.asked if self._fixed else asked
        parted = strategy == "fused" and any(not lane.part.fused for lane in lanes or ())
        parted |= self._parted or parallel != self._parallel
        self._parallel = parallel
        if lanes is None or parted or [part.names for part in asked] != [part.names for part in self.asked]:
            self.regroup()
            parts = asked if kept is not None or parallel else spread_out(self.studied, asked)
            lanes = [self._assembly.lane(self.studied, part) for part in parts]
            self._take(lanes)
            self.asked = list(asked)
        else:
            for lane in lanes:
                lane.refresh(handed)
        # The lanes that are cut or placed anew from these begin their feeds before they take over any state.
        self.studied.epochs = {
            name: int(done) for lane in lanes for name, done in zip(lane.names, lane.epochs, strict=True)
        }
        return lanes

    def write_back(self) -> None:
        """Have every member's model hold its state: that of the last lane it is in, if a lane was cut in two."""
        lanes = self.lanes or ()
        last = {name: lane for lane in lanes for name in lane.names}
        for lane in lanes:
            if all(last[name] is lane for name in lane.names):
                lane.engine.write_back(lane.members)
                continue
            for position, name in enumerate(lane.names):
                if last[name] is lane:
                    lane.sync(position)

    def _alike(self, lanes: list[Lane], job: Job, strategy: str) -> list[Lane]:
        """The lanes, cut where members' own data have rows of unlike forms."""
        found: list[Lane] = []
        for lane, parts in zip(lanes, supply.alike(lanes, job), strict=True):
            if len(parts) == 1:
                found.append(lane)
                continue
            if strategy == "fused":
                refuse_unfused(parts)
            found += [self._assembly.lane(self.studied, part) for part in parts]
        return found

    def regroup(self) -> None:
        """Give up the lanes, and remember where each member's optimizer state is."""
        for lane in self.lanes or ():
            self._carried.update({name: (lane, row) for row, name in enumerate(lane.names)})
        self.lanes = None

    def forget(self, names: Collection[str]) -> None:
        """Give up the lanes, and with them the optimizer state of some members."""
        self.regroup()
        for name in names:
            self._carried.pop(name, None)

    def lend(self, name: str, clone: str) -> None:
        """Have a member begin with another's optimizer state."""
        self.regroup()
        if name in self._carried:
            self._carried[clone] = self._carried[name]

    def _take(self, lanes: list[Lane]) -> None:
        """Make these the lanes; they take over the members' optimizer state."""
        for lane in lanes:
            for row, name in enumerate(lane.names):
                if name in self._carried:
                    lane.adopt(row, *self._carried[name])
        # Only now: after Ctrl-C in the midst of it the next verb begins from where the state is.
        self.lanes, self._carried = lanes, {}

    def _restructured(self, lanes: Sequence[Lane], handed: Collection[str]) -> bool:
        """Whether somebody who holds a model has changed its structure: frozen a layer, say."""
        return any(
            member.framework.signature(member.model) != lane.signature
            for lane in lanes
            for member in lane.members
            if member.name in handed
        ) or not all(lane.engine.still_shared(lane.members) for lane in lanes)
