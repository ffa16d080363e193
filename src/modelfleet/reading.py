"""Lanes for the verbs that only read: evaluate, predict and plan, which callbacks may call within a fit."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from modelfleet.fitting import Fit
from modelfleet.gate import Gate
from modelfleet.lanes import Groups, LaneSpec
from modelfleet.live_lanes import LiveLanes
from modelfleet.members import Member
from modelfleet.runs.job import Job
from modelfleet.runs.opening import OpenLane
from modelfleet.sharing import Sharings
from modelfleet.types import Kind, Strategy

MAX_PARTS = 8  # sets of lanes for calls of some members, or with a strategy


class Reading:
    """Chooses and opens the lanes of verbs that only read.

    Args:
        lanes: The lanes of the fleet.
        members: The members of the fleet, by name.
        exposed: Members whose models the user may hold, and change.
        gate: Knows whether a verb was called within another one.
        sharings: Returns the ways to share the devices.
    """

    def __init__(
        self,
        lanes: LiveLanes,
        members: Mapping[str, Member],
        exposed: Collection[str],
        gate: Gate,
        sharings: Callable[[], Sharings],
    ) -> None:
        self.fit: Fit | None = None
        """Running fit."""
        self.members, self.gate = members, gate
        self._lanes, self._exposed, self._sharings = lanes, exposed, sharings
        self._nested: LiveLanes | None = None  # the lanes of verbs that are called within others
        self._specs: list[LaneSpec] = []  # the lanes of the fit that they were made for
        # Lanes of calls for some members, or with a strategy; with the groups of that time.
        self._parts: dict[tuple[tuple[str, ...], Strategy], tuple[Groups | None, LiveLanes]] = {}

    def begin(self, fit: Fit | None) -> None:
        """Read from this fit from now on, or from none."""
        self.fit, self._nested = fit, None
        self._parts.clear()

    def lanes(self) -> tuple[LiveLanes, Collection[str]]:
        """Return the lanes for a verb, and the members whose models may hold newer weights than these lanes.

        Within another verb, the lanes are separate from its lanes.
        """
        if not self.gate.nested:
            return self._lanes, self._exposed
        if self.fit is not None:
            self.fit.sync_all(self.gate.verb)
        specs = [] if self.fit is None else self.fit.specs()
        if self._nested is None or self._specs != specs:  # a lane may have been halved
            self._nested, self._specs = self._lanes.aside(specs), specs
        return self._nested, set(self.members)

    def lanes_of(self, names: Sequence[str], strategy: Strategy) -> tuple[LiveLanes, Collection[str]]:
        """Return the lanes for a verb of some members by a strategy, as `lanes` does for all by "auto"."""
        if strategy == "auto" and len(names) == len(self.members):
            return self.lanes()
        if self.gate.nested and self.fit is not None:
            self.fit.sync_all(self.gate.verb)
        key, groups = (tuple(names), strategy), self._lanes.current_groups
        known = self._parts.get(key)
        if known is None or known[0] is not groups or self.gate.nested:
            part = self._lanes.part({name: self.members[name] for name in names})
            if len(self._parts) >= MAX_PARTS:
                self._parts.pop(next(iter(self._parts)))
            known = self._parts[key] = groups, part
        return known[1], set(names)

    @contextmanager
    def open(self, kind: Kind, job: Job, strategy: Strategy = "auto") -> Iterator[tuple[list[OpenLane], bool]]:
        """Open the lanes for a verb. Afterwards the models have what it has changed, such as counts of calls.

        Within another verb, what changes in models that are trained in place is undone.

        Yields:
            The lanes, and True if they read one loader in step.
        """
        lanes, changed = self.lanes_of(job.names, strategy)
        _, opened, feeding = lanes.open(job, kind, strategy, changed, self._sharings)
        with ExitStack() as undoing:
            for one in opened if self.gate.nested else ():
                undoing.enter_context(one.lane.engine.undoing_changes())
            yield opened, len(opened) > 1 and feeding.one_loader
        for lane in (one.lane for one in opened if one.lane.engine.changed):
            lane.scatter(lane.names)
            if self.fit is not None:
                for name in lane.names:
                    self.fit.take(name)
