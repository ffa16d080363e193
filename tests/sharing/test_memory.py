"""Lanes that are too wide for their device: known before, or found out."""

from typing import Any

import pytest
import torch
from tests.helpers import fit, fleet_of, toy

import modelfleet as mf
from modelfleet import testing
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.plain.engine import PlainEngine

X, Y = toy(40)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path))


def test_a_lane_that_does_not_fit_is_cut_into_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fleet = fleet_of(8), fleet_of(8)
    plan = fleet.plan((X, Y))
    need = plan.lanes[0].state_bytes + (plan.lanes[0].working_bytes or 0)
    assert plan.lanes[0].working_bytes
    fit(whole, (X, Y), epochs=2)
    monkeypatch.setenv("MODELFLEET_MEMORY", str(need // 2))
    plan = fleet.plan((X, Y))
    assert [len(lane.members) for lane in plan.lanes] in ([4, 4], [3, 3, 2])
    assert [lane.wave for lane in plan.lanes][:2] == [0, 1]
    assert "do not fit into memory" in plan.lanes[0].reason
    fit(fleet, (X, Y), epochs=2)
    for name in fleet.names:
        assert testing.largest_difference(fleet[name], whole[name])[0] < 1e-5
    monkeypatch.setenv("MODELFLEET_MEMORY", "much")
    with pytest.raises(mf.InputError, match="expected a size such as 6GB"):
        fleet.plan((X, Y))


@pytest.mark.parametrize(
    "more",
    [
        {"epochs": 3},
        {"epochs": 4, "initial_epoch": 1, "steps_per_epoch": mf.each([1, 2, 3, 1, 2, 3, 1, 2])},
    ],
)
def test_out_of_memory_halves_the_lane_and_goes_on(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fleet = (fleet_of(8, schedule="linear") for _ in range(2))
    told = fit(whole, (X, Y), validation=(X, Y), batch_size=16, **more)
    train, tried = FusedEngine.train, []

    def small_device(self: FusedEngine, hyper: Any, active: torch.Tensor, *rest: Any, **options: Any) -> None:
        tried.append(len(active))
        if len(active) > 2:
            with torch.no_grad():
                next(iter(self.state["params"].values())).add_(1.0)  # a step that breaks off leaves a mess
            raise torch.OutOfMemoryError("pretended")
        train(self, hyper, active, *rest, **options)

    monkeypatch.setattr(FusedEngine, "train", small_device)
    history = fit(fleet, (X, Y), validation=(X, Y), batch_size=16, **more)
    assert not history.failed
    assert {8, 4, 2} <= set(tried)
    for name in fleet.names:
        assert testing.largest_difference(fleet[name], whole[name])[0] < 1e-5
        assert history[name]["loss"] == pytest.approx(told[name]["loss"], rel=1e-5)
    tried.clear()
    fit(fleet, (X, Y), batch_size=16)
    assert max(tried) <= 2, "the width that fits is remembered"


def test_members_that_do_not_fit_at_all_fail_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(3)

    def no_room(self: FusedEngine, *args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("pretended")

    monkeypatch.setattr(FusedEngine, "train", no_room)
    monkeypatch.setattr(PlainEngine, "train", no_room)
    with pytest.raises(mf.AllFailedError, match="the device ran out of memory") as caught:
        fit(fleet, (X, Y))
    assert set(caught.value.history.failed) == {"0", "1", "2"}
    assert "ran out of memory" in caught.value.history.failed["1"].reason
