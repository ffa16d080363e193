"""The plan: what will run where, and why."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fit, fleet_of, mlp, toy
from torch import Tensor, nn

import modelfleet as mf
from modelfleet import live_lanes, testing
from modelfleet.lanes import DevicePool, Groups

X, Y = toy(24)


class Wide(nn.Module):
    """What can't be fused, around a linear layer: `forward` is given the output of the layer."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.middle(x)


def by_value(x: Tensor) -> Tensor:
    return torch.ones(()) if x.mean().item() > 1e6 else torch.full((), 0.5)


def by_count(x: Tensor) -> Tensor:
    return x.new_ones(()) / torch.nonzero(x).shape[0]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag((x.abs() * 2).long().clamp(max=6)))


UNFUSABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "item": (lambda: Wide(by_value), "value of a tensor"),
    "nonzero": (lambda: Wide(by_count), ""),
    "EmbeddingBag": (Bag, "batching rule"),
    "BatchNorm without momentum": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)),
        "",
    ),
}


def test_a_plan_says_what_each_lane_holds() -> None:
    fleet = mf.Fleet({"a": mlp(), "b": mlp(), "wide": mlp(9)})
    fleet.compile("adam", "cross_entropy")
    first, second = fleet.plan((X, Y), epochs=mf.each([1, 3, 2]), batch_size=8).lanes
    assert (first.members, first.device, first.fused, first.steps) == (("a", "b"), "cpu", True, 9)
    assert first.parameters == sum(p.numel() for p in mlp().parameters())
    assert first.state_bytes >= 2 * 3 * 4 * first.parameters  # two members: weights and Adam's two moments
    assert first.reason == "2 of one structure, fused"
    assert (second.members, second.steps) == (("wide",), 6)
    assert second.reason.startswith("'wide' differs from 'a': parameter 0.weight is (9, 4), not (6, 4)")


def test_a_plan_can_be_printed_and_kept_as_json() -> None:
    fleet = mf.Fleet({"a[0]": mlp(), "b": mlp(9)})
    fleet.compile("sgd", "cross_entropy")
    plan = fleet.plan((X, Y))
    text = str(plan)
    assert "2 members in 2 lanes, interleaved" in text
    assert "a[0]" in text
    assert "differs" in text
    stored = json.loads(json.dumps(plan.to_dict()))
    assert stored["lanes"][1]["members"] == ["b"]
    assert stored["lanes"][0]["device"] == "cpu"


def test_a_plan_of_many_names_the_first_and_the_last() -> None:
    fleet = fleet_of(5)
    assert "0 … 4 (5)" in str(fleet.plan())


def test_a_plan_trains_nothing() -> None:
    fleet, other = fleet_of(2, dropout=0.5), fleet_of(2, dropout=0.5)
    before = fleet["0"][0].weight.clone()
    fleet.plan((X, Y), epochs=3)
    assert torch.equal(fleet["0"][0].weight, before)
    for each in (fleet, other):
        fit(each, (X, Y))
    assert torch.equal(fleet["0"][0].weight, other["0"][0].weight)


@pytest.mark.parametrize("kind", UNFUSABLE)
def test_what_cannot_be_fused_takes_turns_and_the_plan_says_why(kind: str) -> None:
    make, why = UNFUSABLE[kind]
    fleet = mf.Fleet.build(lambda: make(), ["a", "b"])
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
    starts = {name: copy.deepcopy(fleet[name]) for name in fleet.names}
    with pytest.raises(mf.StrategyError, match=r"member 'a' and those like it can't be fused.*take turns"):
        fit(fleet, (X, Y), strategy="fused")
    plan = fleet.plan((X, Y))
    assert [lane.members for lane in plan.lanes] == [("a",), ("b",)]
    assert not any(lane.fused for lane in plan.lanes)
    assert all(lane.reason.startswith("not fused: ") and why in lane.reason for lane in plan.lanes)

    first, second = fit(fleet, (X, Y), batch_size=8), fit(fleet, (X, Y), batch_size=8)
    assert len(first["a"]["loss"]) == len(second["b"]["loss"]) == 1
    for name, start in starts.items():
        expected = testing.alone(
            start,
            name,
            (X, Y),
            optimizer="sgd",
            loss="cross_entropy",
            lr=0.1,
            momentum=0.9,
            epochs=2,
            batch_size=8,
        )
        assert testing.largest_difference(fleet[name], expected)[0] < 1e-5, name
    assert set(fleet.evaluate((X, Y))) == set(fleet.predict(X)) == {"a", "b"}
    with pytest.raises(mf.StrategyError):  # still refused, after they have taken turns
        fit(fleet, (X, Y), strategy="fused")


def test_one_member_that_cannot_be_traced_trains_on_and_on() -> None:
    fleet = mf.Fleet({"a": Wide(by_value)})
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
    start = copy.deepcopy(fleet["a"])
    for _ in range(2):
        assert "loss" in fit(fleet, (X, Y), batch_size=8)["a"]
    expected = testing.alone(
        start,
        "a",
        (X, Y),
        optimizer="sgd",
        loss="cross_entropy",
        lr=0.1,
        momentum=0.9,
        epochs=2,
        batch_size=8,
    )
    assert testing.largest_difference(fleet["a"], expected)[0] < 1e-5
    assert fleet.plan((X, Y)).lanes[0].program == "plain torch"


def test_insisting_on_fusing_unlike_members_is_refused_with_the_difference() -> None:
    fleet = mf.Fleet({"m00": mlp(), "m07": nn.Sequential(*mlp(), nn.ReLU())})
    fleet.compile("sgd", "cross_entropy")
    with pytest.raises(mf.StrategyError) as refusal:
        fit(fleet, (X, Y), strategy="fused")
    assert str(refusal.value) == (
        "not all members can be fused: 'm07' differs from 'm00': has a module 3, the other has none. "
        'Remove the difference, or drop strategy="fused" and let them take turns.'
    )


def test_taking_turns_gives_the_same_numbers() -> None:
    fused, turns = fleet_of(2, dropout=0.5, momentum=0.9), fleet_of(2, dropout=0.5, momentum=0.9)
    fit(fused, (X, Y), epochs=2, strategy="fused")
    fit(turns, (X, Y), strategy="interleaved")
    assert [lane.reason for lane in turns.plan().lanes] == ["2 of one structure, fused"]
    fit(turns, (X, Y), strategy="interleaved")
    for name in fused.names:
        assert testing.largest_difference(turns[name], fused[name])[0] < 1e-5
    assert np.allclose(turns.predict(X)["1"], fused.predict(X)["1"], atol=1e-5)


def test_lanes_of_other_devices_are_given_up_though_making_new_ones_is_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fleet_of(2)
    fit(fleet, toy(8))
    (before,) = fleet._lanes
    looks, interrupts = iter([True]), iter([KeyboardInterrupt])

    def interrupted(*args: Any) -> Groups:
        for interrupt in interrupts:
            raise interrupt
        return Groups(*args)

    monkeypatch.setattr(DevicePool, "refresh", lambda self: next(looks, False))  # a cluster with other nodes now
    monkeypatch.setattr(live_lanes, "Groups", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(fleet, toy(8))
    fit(fleet, toy(8))
    (after,) = fleet._lanes
    assert after is not before
    assert after.epochs.tolist() == [2, 2]
