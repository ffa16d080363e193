"""Stored plans: the lanes of a run that a checkpoint keeps. A run that is resumed has the same lanes."""

from dataclasses import dataclass, replace

from modelfleet.lanes import Groups, LaneSpec
from modelfleet.planning.placement import place_whole
from modelfleet.types import SharingName


@dataclass(frozen=True)
class StoredPlan:
    """The lanes of a run, and how they shared their devices."""

    lanes: list[tuple[tuple[str, ...], bool]]
    """The members of every lane, and whether it was fused."""
    sharing: SharingName
    places: list[int]
    """By lane, the number of its device."""
    devices: int
    """How many devices there were."""

    @property
    def members(self) -> set[str]:
        """Return the names of all members."""
        return {name for names, _ in self.lanes for name in names}

    def specs(self, groups: Groups) -> list[LaneSpec]:
        """Return the lanes again: each on its device if there are as many as before, or placed again.

        If the models have changed since, the groups of now: resuming will then say what is different.
        """
        specs = [LaneSpec(names, fused, "as in the checkpoint") for names, fused in self.lanes]
        known = [set(spec.members) for spec in groups.specs]
        if not all(any(group.issuperset(spec.members) for group in known) for spec in specs):
            return groups.specs
        if not groups.several_devices or any(len(groups.devices(spec)) != self.devices for spec in specs):
            return place_whole(groups, specs)
        return [
            replace(spec, device=str(groups.devices(spec)[place]))
            for spec, place in zip(specs, self.places, strict=True)
        ]
