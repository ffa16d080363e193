"""Packed states: all parameters of a lane in one buffer, updated at once while all members are fine."""

from typing import Any

import pytest
import torch
from tests.helpers import mlp, toy
from torch import nn

import modelfleet as mf
from modelfleet.frameworks.torch.fused import packing
from modelfleet.frameworks.torch.fused.engine import FusedEngine

X, Y = (torch.tensor(array) for array in toy(24))
DATA = X.double(), Y


def net(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(*mlp(5, dropout), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)).double()


def fleet_of(recipe: dict[str, Any], members: int = 3) -> mf.Fleet:
    fleet = mf.Fleet.build(net, members, seed=1)
    fleet.compile(loss="cross_entropy", metrics=["accuracy"], **recipe)
    return fleet


def engine_of(fleet: mf.Fleet) -> FusedEngine:
    (lane,) = fleet._lanes
    assert isinstance(lane.engine, FusedEngine)
    return lane.engine


def kinds(fleet: mf.Fleet) -> set[str]:
    return {str(family[0]) for family in engine_of(fleet).programs._programs}


def fit(fleet: mf.Fleet, epochs: Any = 2, **options: Any) -> mf.History:
    return fleet.fit(DATA, epochs=epochs, batch_size=8, progress=False, strategy="fused", **options)


def weights(fleet: mf.Fleet, name: str) -> list[torch.Tensor]:
    return [value.clone() for value in fleet[name].state_dict().values()]


@pytest.mark.parametrize(
    "recipe",
    [
        {"optimizer": "adam", "lr": mf.each([0.01, 0.02, 0.03]), "clip_norm": mf.each([0.1, None, 0.5])},
        {"optimizer": "sgd", "lr": 0.1, "momentum": mf.each([0.9, 0.3, 0.5]), "nesterov": True},
        {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine"},
        {"optimizer": "rmsprop", "lr": 0.01, "centered": True},
        {"optimizer": "lion", "lr": 0.01},
    ],
)
def test_an_update_of_all_members_equals_a_masked_one(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, masked = fleet_of(recipe), fleet_of(recipe)
    history = fit(fleet)
    monkeypatch.setattr(packing, "buffers_of", lambda state: None)
    expected = fit(masked)
    assert "packed_apply" in kinds(fleet)
    assert "packed_apply" not in kinds(masked)
    for name in fleet.names:
        for metric, values in expected[name].items():
            assert history[name][metric] == pytest.approx(values, abs=1e-12)
        for mine, theirs in zip(weights(fleet, name), weights(masked, name), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_an_optimizer_with_a_number_for_each_parameter_is_masked() -> None:
    fleet = fleet_of({"optimizer": "nadam", "lr": 0.01})
    fit(fleet)
    assert "packed_apply" not in kinds(fleet)


def test_a_member_that_diverges_leaves_the_others_as_they_are() -> None:
    rates = mf.each([0.01, 1e200, 0.02])
    fleet, alone = fleet_of({"optimizer": "sgd", "lr": rates}), fleet_of({"optimizer": "sgd", "lr": 0.01}, 1)
    history = fit(fleet)
    fit(alone)
    assert list(history.failed) == ["1"]
    assert "apply" in kinds(fleet)
    for mine, theirs in zip(weights(fleet, "0"), weights(alone, "0"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_narrowed_lane_is_packed_again() -> None:
    fleet = fleet_of({"optimizer": "adam", "lr": 0.01})
    seen: list[tuple[int, bool]] = []

    class Look(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            state = engine_of(fleet).state
            seen.append((len(state["member"]["seed"]), packing.buffers_of(state) is not None))

    fit(fleet, epochs=mf.each([3, 1, 1]), callbacks=[Look()])
    assert seen == [(3, True), (1, True), (1, True)]


def test_tensors_of_two_dtypes_are_not_packed() -> None:
    state = {
        "params": {"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.float64)},
        "optimizer": {"step/a": torch.zeros(2), "step/b": torch.zeros(2)},
    }
    packed = packing.pack(state)
    assert packed["params"] == state["params"]
    assert packing.buffers_of(packed) is None


def test_a_buffer_has_the_tensors_one_after_the_other() -> None:
    tensors = {"a": torch.randn(2, 3, 2), "b": torch.randn(2), "c": torch.randn(2, 4)}
    packed = packing.pack({"params": tensors, "optimizer": {}})
    buffers = packing.buffers_of(packed)
    assert buffers is not None
    assert torch.equal(buffers[""], packing.join(tensors))
    packed["params"]["b"].add_(1)
    assert torch.equal(packing.split(buffers[""], tensors)["b"], tensors["b"] + 1)
    assert packing.buffers_of({"params": tensors, "optimizer": {}}) is None


class LongOrShort(nn.Module):
    """Uses one of its layers for long rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.long = nn.Linear(2, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = self.every(x).tanh()
        return (self.long(each) if x.shape[1] > 3 else each).mean(1)


@pytest.mark.parametrize("lengths", [(5, 2, 5, 2), (2, 5, 2, 5), (5, 4, 2, 3)])
def test_forms_of_batches_may_use_other_parameters(lengths: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(6, length, 2, generator=random, dtype=torch.float64) for length in lengths]
    batches = [(x, torch.arange(6) % 3) for x in rows]
    fused, plain = (mf.Fleet.build(LongOrShort, 3, seed=1) for _ in range(2))
    for fleet, strategy in ((fused, "fused"), (plain, "interleaved")):
        fleet.compile("adamw", "cross_entropy", lr=0.05, weight_decay=0.1)
        fleet.fit(batches, epochs=2, progress=False, strategy=strategy)
    for name in fused.names:
        for found, expected in zip(weights(fused, name), weights(plain, name), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
