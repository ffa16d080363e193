"""Placement: which lane is on which device.

A group with more work than one device's share is cut into even pieces of its members. Then all lanes are placed,
the longest first, each on the device with the least work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelfleet.devices import Device
from modelfleet.lanes import Groups, LaneSpec
from modelfleet.planning.lane_width import pieces
from modelfleet.planning.width_classes import apart


@dataclass(frozen=True)
class Load:
    """Members of one lane, or of several, and their cost, in a unit that all loads share."""

    spec: LaneSpec
    cost: float
    devices: tuple[Device, ...]
    """Devices that the members may run on."""


def place(loads: Sequence[Load]) -> list[LaneSpec]:
    """Return one or more placed lanes for every load. Equal loads are always placed in the same way."""
    devices = list(dict.fromkeys(device for load in loads for device in load.devices))
    total = sum(load.cost for load in loads)
    cut: list[tuple[Load, LaneSpec, float]] = []
    for load in loads:
        wanted = int(load.cost * len(devices) / total + 0.5) if total > 0 else 1
        width = load.spec.width
        count = max(1, min(wanted, len(load.devices), width if load.spec.fused else 1))
        split = (width, count) if count > 1 else None
        for names in pieces(count, load.spec.members):
            cut.append((load, replace(load.spec, members=names, split=split), load.cost * len(names) / width))
    busy = dict.fromkeys(devices, 0.0)
    placed: dict[int, LaneSpec] = {}
    for number in sorted(range(len(cut)), key=lambda number: -cut[number][2]):
        load, spec, cost = cut[number]
        least = min(load.devices, key=lambda device: busy[device])  # the first of equal ones
        busy[least] += cost
        placed[number] = replace(spec, device=str(least))
    return [placed[number] for number in range(len(cut))]


def place_by_size(groups: Groups, specs: Sequence[LaneSpec]) -> list[LaneSpec]:
    """Place lanes by their numbers of members, before anything is known about their steps."""
    if not groups.several_devices:
        return groups.on_first_device(specs)
    return place([Load(spec, spec.width, groups.devices(spec)) for spec in specs])


def place_whole(groups: Groups, specs: Sequence[LaneSpec]) -> list[LaneSpec]:
    """Place lanes without cutting any."""
    if not groups.several_devices:
        return groups.on_first_device(specs)
    loads = [Load(replace(spec, fused=False), spec.width, groups.devices(spec)) for spec in specs]
    return [replace(placed, fused=spec.fused) for placed, spec in zip(place(loads), specs, strict=True)]


def undo_cuts(groups: Groups, specs: Sequence[LaneSpec]) -> list[tuple[LaneSpec, list[int]]]:
    """Return lanes as they were before placing: whole groups of one width, each with the numbers of its pieces."""
    whole = [part for spec in groups.specs for part in apart(groups, spec)]
    group_of = {name: number for number, group in enumerate(whole) for name in group.members}
    found: dict[tuple[int, str], list[int]] = {}
    for number, spec in enumerate(specs):
        group = group_of[spec.members[0]]
        found.setdefault((group, "" if spec.fused else spec.members[0]), []).append(number)
    merged = []
    for (group, _), numbers in found.items():
        first = specs[numbers[0]]
        names = {name for number in numbers for name in specs[number].members}
        kept = tuple(name for name in whole[group].members if name in names)
        reason = whole[group].apart_because if first.fused else first.apart_because
        merged.append((LaneSpec(kept, first.fused, reason), numbers))
    return merged
