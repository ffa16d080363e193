"""Width classes: members of unequal widths share a lane, padded to the widest, where it pays.

One lane for all would multiply many zeros; a lane for each width would launch every operation once per width. What
lies between is found by weighing both: the members sorted by size, cut into classes of the least total cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from modelfleet.lanes import Groups, LaneSpec
from modelfleet.lanes.spec import join_reasons
from modelfleet.planning.printing import milliseconds

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

MAX_WIDTHS = 256  # that are weighed one by one; of more, neighbours are put together first
# Assumed if nothing was measured:
PLAIN_SECONDS = 0.5e-3  # a step of one member by itself takes at least
LANE_FACTOR = 3  # and that of a lane of several, so many times as long
FLOPS_PER_SECOND = 30e9
UNKNOWN_PER_NUMBER = 6 * 32 / FLOPS_PER_SECOND  # for batches of unknown size
PREPARE_SECONDS = 0.6  # to trace a lane's steps
RECORD_SECONDS = 0.02  # and for each width in it, if there are several


@dataclass(frozen=True)
class Costs:
    """What the lanes of a run cost, in seconds."""

    steps: int
    """Steps of the run."""
    plain: float = PLAIN_SECONDS
    """Time of a step of one member by itself, besides what grows with its parameters."""
    per_number: float = 0.0
    """Time of a step for each parameter of each member."""

    def of(self, numbers: int, members: int, widths: int, own_numbers: int) -> float:
        """Return what members cost that are padded to `numbers` parameters and have `own_numbers` together.

        They may still be stepped one by one, if that costs less.
        """
        prepare = PREPARE_SECONDS + (RECORD_SECONDS * widths if widths > 1 else 0.0)
        fused = self.steps * self.of_step(numbers, members) + prepare
        plain = self.steps * (self.plain * members + self.per_number * own_numbers)
        return plain if members == 1 else min(fused, plain)

    def of_step(self, numbers: int, members: int) -> float:
        """Return what one step of a lane takes."""
        lane = self.plain * (LANE_FACTOR if members > 1 else 1)
        return lane + self.per_number * numbers * members


@dataclass(frozen=True)
class _Width:
    names: tuple[str, ...]
    sizes: np.ndarray
    """All sizes of the parameters and buffers."""
    numbers: int
    """Number of their elements."""


def has_several(groups: Groups, spec: LaneSpec) -> bool:
    """Return True if the members of a lane are not equally wide."""
    return spec.fused and len(_widths(groups, spec)) > 1


def by_width(groups: Groups, spec: LaneSpec) -> list[tuple[str, ...]]:
    """Return a lane's members by width, in the order of their first members."""
    order = {name: number for number, name in enumerate(spec.members)}
    return sorted((width.names for width in _widths(groups, spec)), key=lambda names: order[names[0]])


def smallest_and_widest(groups: Groups, spec: LaneSpec) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return a member of the smallest and of the widest width, each with its number of parameters."""
    widths = _widths(groups, spec)
    first, last = widths[0], widths[-1]
    return (first.names[0], first.numbers), (last.names[0], last.numbers)


def divide(groups: Groups, spec: LaneSpec, costs: Costs) -> list[LaneSpec]:
    """Return a lane of members of unequal widths in the classes that cost least."""
    widths = _widths(groups, spec)
    if len(widths) == 1:
        return [spec]
    units = _units(widths)
    cuts = cheapest_cuts([unit[-1].sizes for unit in units], _cost_of(units, costs), _widest_of(units))
    if len(cuts) == 1:
        return [spec]
    classes = [[width for unit in units[start:end] for width in unit] for start, end in cuts]
    apart = sum(costs.of_step(own[-1].numbers, _count(own)) for own in classes)
    whole = costs.of_step(widths[-1].numbers, _count(widths))
    why = None
    if apart < whole and milliseconds(apart) != milliseconds(whole):
        why = f"padded into one lane, a step of all would take {milliseconds(whole)}, not {milliseconds(apart)}"
    return _parts(groups, spec, [[name for width in own for name in width.names] for own in classes], why)


def apart(groups: Groups, spec: LaneSpec) -> list[LaneSpec]:
    """Return a lane for each width of a lane's members."""
    return _parts(groups, spec, [list(width.names) for width in _widths(groups, spec)], None)


def _parts(groups: Groups, spec: LaneSpec, parts: list[list[str]], why: str | None) -> list[LaneSpec]:
    """Return the parts of a lane, in the order of their first members, with what keeps them apart."""
    if len(parts) == 1:
        return [spec]
    order = {name: number for number, name in enumerate(spec.members)}
    found: list[LaneSpec] = []
    for names in sorted((sorted(part, key=order.__getitem__) for part in parts), key=lambda own: order[own[0]]):
        reason = spec.apart_because
        if found:
            first, framework = found[0].members[0], groups.framework(spec)
            what = framework.difference(groups.tasks[names[0]].signature, groups.tasks[first].signature)
            reason = join_reasons(spec.apart_because, f"{names[0]!r} differs from {first!r}: {what}", why)
        found.append(replace(spec, members=tuple(names), apart_because=reason))
    return found


def cheapest_cuts(
    sizes: Sequence[np.ndarray], cost: Callable[[int, int], float], widest: Sequence[np.ndarray]
) -> list[tuple[int, int]]:
    """Return how to cut a sorted list into classes of the least total cost.

    Args:
        sizes: The sizes of the last width of each unit.
        cost: Returns what a class of the units from the first to before the second number costs.
        widest: The largest of all sizes in each unit.

    Returns:
        The classes, as the first unit and the one after the last. The last width of each class is the widest.
    """
    count = len(sizes)
    best = [0.0] + [np.inf] * count
    start = [0] * (count + 1)
    for end in range(1, count + 1):
        most = widest[end - 1]
        for first in range(end - 1, -1, -1):
            most = np.maximum(most, widest[first])
            if first < end - 1 and (most > sizes[end - 1]).any():
                break  # no width of this class is the widest in every size, nor of a longer one
            total = best[first] + cost(first, end)
            if total < best[end]:
                best[end], start[end] = total, first
    found, end = [], count
    while end:
        found.append((start[end], end))
        end = start[end]
    return found[::-1]


def _widths(groups: Groups, spec: LaneSpec) -> list[_Width]:
    """Return the widths of a lane's members, the smallest first."""
    shapes_of = getattr(groups.framework(spec), "shapes", None)
    if shapes_of is None:
        return [_Width(spec.members, np.zeros(0), 1)]
    found: dict[Shapes, list[str]] = {}
    known: dict[int, Shapes] = {}
    for names in groups.variants(spec):
        signature = groups.tasks[names[0]].signature
        shapes = known.setdefault(id(signature), shapes_of(signature))
        found.setdefault(shapes, []).extend(names)
    widths = [
        _Width(
            tuple(names),
            np.array([size for _, shape in shapes for size in shape], dtype=np.int64),
            sum(int(np.prod(shape)) for _, shape in shapes),
        )
        for shapes, names in found.items()
    ]
    return sorted(widths, key=lambda width: width.numbers)


def _units(widths: list[_Width]) -> list[list[_Width]]:
    """Return the widths one by one, or, if there are very many, neighbours together."""
    each = -(-len(widths) // MAX_WIDTHS)
    return [widths[at : at + each] for at in range(0, len(widths), each)]


def _widest_of(units: Sequence[Sequence[_Width]]) -> list[np.ndarray]:
    return [np.maximum.reduce([width.sizes for width in unit]) for unit in units]


def _cost_of(units: Sequence[Sequence[_Width]], costs: Costs) -> Callable[[int, int], float]:
    members = np.cumsum([0, *(_count(unit) for unit in units)])
    widths = np.cumsum([0, *(len(unit) for unit in units)])
    own = np.cumsum([0, *(sum(width.numbers * len(width.names) for width in unit) for unit in units)])

    def cost(first: int, end: int) -> float:
        numbers = max(width.numbers for width in units[end - 1])
        members_, widths_, own_ = (int(sums[end] - sums[first]) for sums in (members, widths, own))
        return costs.of(numbers, members_, widths_, own_)

    return cost


def _count(widths: Sequence[_Width]) -> int:
    return sum(len(width.names) for width in widths)
