"""Placement: which lane is on which device.

A group whose work is more than its share of a device is cut into even pieces of its members; then all lanes are
packed, the longest first, each onto the device that has least to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelfleet.devices import Device
from modelfleet.planning.assembly import Part, Studied
from modelfleet.planning.memory import pieces


@dataclass(frozen=True)
class Load:
    """Members that make a lane, or several, and what they cost; in any unit that all loads have."""

    part: Part
    cost: float
    devices: tuple[Device, ...]
    """Where they may be."""


def place(loads: Sequence[Load]) -> list[Part]:
    """A part, or several, for every load, each with its device. The same loads are always placed the same."""
    devices = list(dict.fromkeys(device for load in loads for device in load.devices))
    total = sum(load.cost for load in loads)
    cut: list[tuple[Load, Part, float]] = []
    for load in loads:
        wanted = int(load.cost * len(devices) / total + 0.5) if total > 0 else 1
        width = len(load.part.names)
        count = max(1, min(wanted, len(load.devices), width if load.part.fused else 1))
        split = (width, count) if count > 1 else None
        for names in pieces(count, load.part.names):
            part = replace(load.part, names=names, split=split)
            cut.append((load, part, load.cost * len(names) / width))
    busy = dict.fromkeys(devices, 0.0)
    found: list[Part | None] = [None] * len(cut)
    for number in sorted(range(len(cut)), key=lambda number: -cut[number][2]):
        load, part, cost = cut[number]
        least = min(load.devices, key=lambda device: busy[device])  # of equals the first
        busy[least] += cost
        found[number] = replace(part, device=least)
    return [part for part in found if part is not None]


def spread_out(studied: Studied, parts: Sequence[Part]) -> list[Part]:
    """Parts placed by nothing but their numbers of members: before anything is known of their steps.

    On one device they stay as they are.
    """
    if not studied.scattered:
        return list(parts)
    return place([Load(part, len(part.names), studied.devices(part)) for part in parts])


def packed(studied: Studied, parts: Sequence[Part]) -> list[Part]:
    """Parts placed without being cut."""
    if not studied.scattered:
        return list(parts)
    loads = [Load(replace(part, fused=False), len(part.names), studied.devices(part)) for part in parts]
    return [replace(placed, fused=part.fused) for placed, part in zip(place(loads), parts, strict=True)]


def whole(studied: Studied, parts: Sequence[Part]) -> list[tuple[Part, list[int]]]:
    """Parts as they were before they were placed: every group again whole, with the numbers of its pieces."""
    group_of = {name: number for number, group in enumerate(studied.groups) for name in group.names}
    found: dict[tuple[int, str], list[int]] = {}
    for number, part in enumerate(parts):
        group = group_of[part.names[0]]
        found.setdefault((group, "" if part.fused else part.names[0]), []).append(number)
    merged = []
    for (group, _), numbers in found.items():
        first = parts[numbers[0]]
        names = {name for number in numbers for name in parts[number].names}
        kept = tuple(name for name in studied.groups[group].names if name in names)
        reason = studied.groups[group].reason if first.fused else first.reason
        merged.append((Part(kept, first.fused, reason), numbers))
    return merged
