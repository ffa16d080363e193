"""Opening lanes for a verb: each lane is built, fed, checked and made ready."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from modelfleet.feeds import Feed, StoredArrays
from modelfleet.lanes import Groups, Lane, LaneBuilder, LaneSpec
from modelfleet.runs.feeding import Feeding
from modelfleet.runs.job import Job
from modelfleet.types import Kind


@dataclass(frozen=True)
class OpenLane:
    """A live lane with the feed of a verb."""

    lane: Lane
    feed: Feed

    @property
    def spec(self) -> LaneSpec:
        """Return the specification that the lane was opened for."""
        return self.lane.spec


class LaneOpener:
    """Opens the lanes of one verb, each of them once.

    Args:
        builder: Builds lanes that do not exist yet.
        groups: The members of the fleet.
        job: The arguments of the verb.
        kind: The verb.
        existing: Lanes of an earlier verb. A lane whose spec has the same key is used again.
        changed: Members whose models may have been changed since. An existing lane reads their weights again.
        ranks: The processes that share every batch of this lane, with `strategy="data_parallel"`.
        scratch: For a trial: lanes of one member step copies of the members' models.
        stored: What the verb has stored already.
    """

    def __init__(
        self,
        builder: LaneBuilder,
        groups: Groups,
        job: Job,
        kind: Kind,
        *,
        existing: Iterable[Lane] = (),
        changed: Collection[str] = (),
        ranks: object | None = None,
        scratch: bool = False,
        stored: StoredArrays | None = None,
    ) -> None:
        self.builder, self.groups, self.job, self.kind = builder, groups, job, kind
        self.feeding = Feeding(job, groups, stored)
        self._existing = {lane.spec.key: lane for lane in existing}
        self._changed = changed
        self._ranks, self._scratch = ranks, scratch
        self._open: dict[object, OpenLane] = {}

    def open(self, spec: LaneSpec) -> OpenLane:
        """Return the lane of a spec, ready for its first step.

        Raises:
            CannotFuseError: The members can't be stepped by one program.
            InputError: The members can't take the data.
        """
        (spec,) = self.groups.on_first_device([spec])
        opened = self._open.get(spec.key)
        if opened is None:
            lane = self._lane(spec)
            opened = OpenLane(lane, self.feeding.feed(lane))
            self._check(opened)
            if self._ranks is not None:
                lane.engine.split_rows_over(self._ranks)
            lane.ready(opened.feed.first(), self.kind)
            self._open[spec.key] = opened
        opened.lane.spec = spec
        return opened

    def is_open(self, spec: LaneSpec) -> bool:
        """Return True if the lane of a spec is there from an earlier verb, or open."""
        (spec,) = self.groups.on_first_device([spec])
        return spec.key in self._existing or spec.key in self._open

    def open_all(self, specs: Sequence[LaneSpec]) -> list[OpenLane]:
        """Return the lanes of several specs."""
        return [self.open(spec) for spec in specs]

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error says that the device of an open lane is out of memory."""
        return any(opened.lane.engine.out_of_memory(error) for opened in self._open.values())

    def part_of_feed(self, spec: LaneSpec, parent: OpenLane) -> Feed:
        """Return the feed of some members of a lane that is open."""
        positions = parent.lane.positions
        return parent.feed.select([positions[name] for name in spec.members])

    def _lane(self, spec: LaneSpec) -> Lane:
        lane = self._existing.get(spec.key)
        if lane is None:
            return self.builder.build(self.groups, spec, scratch=self._scratch)
        lane.gather([name for name in lane.names if name in self._changed])
        return lane

    def _check(self, opened: OpenLane) -> None:
        if self.kind == "predict":
            opened.lane.engine.output_shape(opened.feed.first(), opened.lane.names[0])
        else:
            self.feeding.check(opened.lane, opened.feed)
