"""Which members of unequal widths share a lane."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from torch import nn

import modelfleet as mf
from modelfleet.lanes import Groups, LaneSpec
from modelfleet.planning.width_classes import Costs, apart, cheapest_cuts, divide


def _ways(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every way to cut a list into parts."""
    for number in range(count):
        for cuts in combinations(range(1, count), number):
            edges = [0, *cuts, count]
            yield list(pairwise(edges))


@pytest.mark.parametrize("seed", range(5))
def test_the_cuts_are_the_cheapest_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = np.sort(random.integers(1, 40, (7, 1)), axis=0)
    overhead = float(random.uniform(0, 100))

    def cost(first: int, end: int) -> float:
        return overhead + float(sizes[end - 1, 0]) * (end - first)

    found = cheapest_cuts(list(sizes), cost, list(sizes))
    total = min(sum(cost(*part) for part in way) for way in _ways(len(sizes)))
    assert sum(cost(*part) for part in found) == pytest.approx(total)


def test_every_class_has_a_member_that_is_widest_in_all_sizes() -> None:
    sizes = [np.array(own) for own in ([1, 1], [1, 4], [4, 1], [4, 4])]
    assert cheapest_cuts(sizes, lambda first, end: 1.0, sizes) == [(0, 4)]
    assert cheapest_cuts(sizes[:3], lambda first, end: 1.0, sizes[:3]) in ([(0, 2), (2, 3)], [(0, 1), (1, 3)])


def _groups(widths: list[int]) -> tuple[Groups, LaneSpec]:
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(32, int(width)), nn.ReLU(), nn.Linear(int(width), int(width)), nn.ReLU())

    fleet = mf.Fleet.build(make, len(widths), width=mf.each(widths))
    fleet.compile("adam", "mse")
    groups = Groups(fleet._pool, list(fleet._members.values()), fleet._recipes, "train")
    (spec,) = groups.specs
    return groups, spec


COSTS = Costs(100_000, per_number=6 * 32 / 30e9)


def test_widths_far_apart_have_lanes_of_their_own() -> None:
    groups, spec = _groups([64, 128, 256, 512] * 24)
    found = divide(groups, spec, COSTS)
    assert [len(part.members) for part in found] == [24] * 4
    assert found[0].apart_because is None
    assert "'1' differs from '0': parameter 0.weight is (128, 32), not (64, 32)" in str(found[1].apart_because)
    assert "padded into one lane, a step of all would take" in str(found[1].apart_because)


def test_many_widths_share_a_few_lanes() -> None:
    groups, spec = _groups([16 + 4 * (member // 2) for member in range(96)])
    found = divide(groups, spec, COSTS)
    assert 2 <= len(found) <= 16
    assert sorted(name for part in found for name in part.members) == sorted(spec.members)
    assert len(apart(groups, spec)) == 48


def test_a_short_run_has_fewer_lanes_than_a_long_one() -> None:
    groups, spec = _groups([16 + 4 * (member // 2) for member in range(96)])
    short = divide(groups, spec, Costs(100, per_number=COSTS.per_number))
    assert len(short) <= len(divide(groups, spec, COSTS))


def test_two_members_of_unequal_widths_are_not_worth_a_lane() -> None:
    groups, spec = _groups([16, 20])
    assert [part.members for part in divide(groups, spec, COSTS)] == [("0",), ("1",)]
