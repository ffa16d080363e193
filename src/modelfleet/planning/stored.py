"""Stored plans: a checkpoint keeps the lanes of its run, so that a resumed run has the same ones."""

from dataclasses import dataclass, replace

from modelfleet.lanes import Groups, LaneSpec
from modelfleet.planning.placement import place_whole
from modelfleet.types import SharingName


@dataclass(frozen=True)
class StoredPlan:
    """Lanes of a run, and how they shared their devices."""

    lanes: list[tuple[tuple[str, ...], bool]]
    """Members of every lane, and True if it was fused."""
    sharing: SharingName
    places: list[int]
    """By lane, the number of its device."""
    devices: int
    """Number of devices."""

    @property
    def members(self) -> set[str]:
        """Return the names of all members."""
        return {name for names, _ in self.lanes for name in names}

    def specs(self, groups: Groups) -> list[LaneSpec]:
        """Return the lanes: each on its device if there are as many devices as before, otherwise placed again.

        If the models have changed since, these are the current groups. Resuming will then name the difference.
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
