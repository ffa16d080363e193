"""Lanes for the verbs that only read: evaluate, predict and plan, which callbacks may call within a fit."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from modelfleet.fitting import Fit
from modelfleet.gate import Gate
from modelfleet.lanes import LaneSpec
from modelfleet.live_lanes import LiveLanes
from modelfleet.members import Member
from modelfleet.runs.job import Job
from modelfleet.runs.opening import OpenLane
from modelfleet.sharing import Sharings
from modelfleet.types import Kind


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
        self._lanes, self._members, self._exposed = lanes, members, exposed
        self._gate, self._sharings = gate, sharings
        self._nested: LiveLanes | None = None  # the lanes of verbs that are called within others
        self._specs: list[LaneSpec] = []  # the lanes of the fit that they were made for

    def begin(self, fit: Fit | None) -> None:
        """Read from this fit from now on, or from none."""
        self.fit, self._nested = fit, None

    def lanes(self) -> tuple[LiveLanes, Collection[str]]:
        """Return the lanes for a verb, and the members whose models may hold newer weights than these lanes.

        Within another verb, the lanes are separate from its lanes.
        """
        if not self._gate.nested:
            return self._lanes, self._exposed
        if self.fit is not None:
            self.fit.sync_all(self._gate.verb)
        specs = [] if self.fit is None else self.fit.specs()
        if self._nested is None or self._specs != specs:  # a lane may have been halved
            self._nested, self._specs = self._lanes.aside(specs), specs
        return self._nested, set(self._members)

    @contextmanager
    def open(self, kind: Kind, job: Job) -> Iterator[tuple[list[OpenLane], bool]]:
        """Open the lanes for a verb. Afterwards the models have what it has changed, such as counts of calls.

        Within another verb, what changes in models that are trained in place is undone.

        Yields:
            The lanes, and True if they read one loader in step.
        """
        lanes, changed = self.lanes()
        _, opened, feeding = lanes.open(job, kind, "auto", changed, self._sharings)
        with ExitStack() as undoing:
            for one in opened if self._gate.nested else ():
                undoing.enter_context(one.lane.engine.undoing_changes())
            yield opened, len(opened) > 1 and feeding.one_loader
        for lane in (one.lane for one in opened if one.lane.engine.changed):
            lane.scatter(lane.names)
            if self.fit is not None:
                for name in lane.names:
                    self.fit.take(name)
