"""Placement: groups are split and lanes packed by what they cost."""

import pytest
from tests.helpers import fit, fleet_of, mlp, toy

import modelfleet as mf
from modelfleet import testing
from modelfleet.devices import Device
from modelfleet.lanes import LaneSpec
from modelfleet.planning.lane_width import pieces
from modelfleet.planning.placement import Load, place

X, Y = toy(40)
ZERO, ONE, TWO = (Device("cpu", number) for number in range(3))


def load(name: str, width: int, cost: float, devices: int = 2, *, fused: bool = True) -> Load:
    names = tuple(f"{name}{number}" for number in range(width))
    return Load(LaneSpec(names, fused), cost, (ZERO, ONE, TWO)[:devices])


def placed(*loads: Load) -> list[tuple[int, str]]:
    return [(len(part.members), str(part.device)) for part in place(loads)]


def test_a_group_is_cut_into_its_share_of_the_devices() -> None:
    assert placed(load("a", 16, 1.0)) == [(8, "cpu:0"), (8, "cpu:1")]
    assert placed(load("a", 16, 1.0, devices=3)) == [(6, "cpu:0"), (5, "cpu:1"), (5, "cpu:2")]
    assert placed(load("a", 2, 1.0, devices=3)) == [(1, "cpu:0"), (1, "cpu:1")]
    assert placed(load("a", 1, 1.0)) == [(1, "cpu:0")]
    assert place([load("a", 16, 1.0)])[1].split == (16, 2)


def test_a_group_that_is_little_of_the_work_stays_whole() -> None:
    # Of 10 on two devices: 7 is cut in round(7 * 2 / 10) = 1, and 8 in round(1.6) = 2.
    assert placed(load("a", 4, 7.0), load("b", 4, 3.0)) == [(4, "cpu:0"), (4, "cpu:1")]
    assert placed(load("a", 4, 8.0), load("b", 4, 2.0)) == [(2, "cpu:0"), (2, "cpu:1"), (4, "cpu:0")]


def test_unlike_lanes_are_packed_the_longest_first() -> None:
    costs = {"a": 2.0, "b": 3.0, "c": 4.0, "d": 3.0, "e": 2.0}
    parts = place([load(name, 1, cost) for name, cost in costs.items()])
    where = {part.members[0][0]: str(part.device) for part in parts}
    assert where == {"c": "cpu:0", "b": "cpu:1", "d": "cpu:1", "a": "cpu:0", "e": "cpu:0"}
    assert [part.members[0][0] for part in parts] == list(costs), "the lanes keep their order"


def test_members_that_run_apart_are_not_cut_together() -> None:
    assert placed(load("a", 4, 1.0, fused=False)) == [(4, "cpu:0")]


def test_every_load_goes_where_it_may_be() -> None:
    cuda = Device("cuda", 0)
    parts = place([Load(LaneSpec(("a", "b"), True), 5.0, (cuda,)), load("c", 2, 5.0)])
    assert [str(part.device) for part in parts] == ["cuda:0", "cpu:0", "cpu:1"]


def test_work_that_costs_nothing_is_placed_too() -> None:
    assert placed(load("a", 2, 0.0), load("b", 1, 0.0)) == [(2, "cpu:0"), (1, "cpu:0")]


def test_pieces_are_even() -> None:
    assert pieces(3, "abcdefg") == [("a", "b", "c"), ("d", "e"), ("f", "g")]


def test_the_plan_shows_the_devices_and_why() -> None:
    fleet = mf.Fleet([mlp() for _ in range(16)], devices="cpu:0,cpu:1")
    fleet.compile("sgd", "cross_entropy")
    for plan in (fleet.plan(), fleet.plan((X, Y))):
        assert [(len(lane.members), lane.device) for lane in plan.lanes] == [(8, "cpu:0"), (8, "cpu:1")]
        assert plan.lanes[0].reason == "8 of 16 of one structure, split over 2 devices"
        assert plan.sharing == "threads"
    assert "cpu:1" in str(plan)
    assert "on cpu:0, cpu:1" in repr(fleet)


def test_lanes_are_placed_by_their_steps_when_these_are_known() -> None:
    fleet = mf.Fleet({"a": mlp(6), "b": mlp(7), "c": mlp(8), "d": mlp(9)}, devices="cpu:0,cpu:1")
    fleet.compile("sgd", "cross_entropy")
    plan = fleet.plan((X, Y), epochs=mf.each([100, 1, 1, 1]))
    assert [lane.device for lane in plan.lanes] == ["cpu:0", "cpu:1", "cpu:1", "cpu:1"]
    plan = fleet.plan((X, Y), epochs=mf.each([1, 1, 1, 100]))
    assert [lane.device for lane in plan.lanes] == ["cpu:1", "cpu:1", "cpu:1", "cpu:0"]


def test_one_device_is_planned_as_ever() -> None:
    lanes = [fleet_of(4).plan((X, Y)).lanes]
    fleet = mf.Fleet.build(mlp, 4, devices="cpu:0")
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    lanes.append(fleet.plan((X, Y)).lanes)
    assert [[(lane.members, lane.reason) for lane in own] for own in lanes] == [
        [(("0", "1", "2", "3"), "4 of one structure, fused")]
    ] * 2
    assert fleet._lanes[0].device == "cpu:0"


def test_what_does_not_fit_goes_in_waves_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = mf.Fleet.build(mlp, 8, devices="cpu:0,cpu:1")
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    whole = fleet_of(8)
    plan = fleet.plan((X, Y))
    need = plan.lanes[0].state_bytes + (plan.lanes[0].working_bytes or 0)
    monkeypatch.setenv("MODELFLEET_MEMORY", str(need // 2))
    plan = fleet.plan((X, Y))
    waves = [(lane.device, lane.wave) for lane in plan.lanes]
    assert {("cpu:0", 0), ("cpu:0", 1), ("cpu:1", 0), ("cpu:1", 1)} <= set(waves)
    assert sum(len(lane.members) for lane in plan.lanes) == 8
    fit(whole, (X, Y), epochs=2)
    fit(fleet, (X, Y), epochs=2)
    for name in fleet.names:
        assert testing.largest_difference(fleet[name], whole[name])[0] < 1e-5
