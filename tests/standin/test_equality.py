"""Fleets on an accelerator get the weights that they get on the CPU, bit for bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.standin.models import DATA, ROUNDED, X, Y, close, convolution, differing, dropping, fitted, fleet_on
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.types import Strategy


@pytest.mark.parametrize("build", DATA, ids=lambda build: build.__name__.lower())
@pytest.mark.parametrize("strategy", ["fused", "interleaved", "threads"])
def test_weights_are_those_of_the_cpu(build: Callable[..., nn.Module], strategy: Strategy) -> None:
    on_cpu, there = (
        fitted(device, DATA[build], {"strategy": strategy}, build=build) for device in ("cpu", "standin:0")
    )
    assert differing(there, on_cpu) == []


@pytest.mark.parametrize("build", ROUNDED, ids=lambda build: build.__name__.lower())
def test_other_kernels_round_otherwise(build: Callable[..., nn.Module]) -> None:
    on_cpu, there = (
        fitted(device, ROUNDED[build], {"strategy": "fused"}, build=build) for device in ("cpu", "standin:0")
    )
    close(there, on_cpu)


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3, 0.5, 0.7])
def test_dropout_has_one_mask_on_every_device(rate: float) -> None:
    on_cpu, there = (
        fitted(device, (X, Y), {"strategy": "interleaved"}, build=dropping, rate=rate)
        for device in ("cpu", "standin:1")
    )
    assert differing(there, on_cpu) == []


def test_dropout_at_a_rate_per_member_has_one_mask_on_every_device() -> None:
    rate = mf.each([0.05, 0.15, 0.6])
    on_cpu, there = (
        fitted(device, (X, Y), {"strategy": "fused"}, build=dropping, rate=rate) for device in ("cpu", "standin:1")
    )
    assert differing(there, on_cpu) == []


def test_auto_takes_the_accelerators_that_torch_has() -> None:
    fleet = fleet_on("auto")
    assert {lane.device for lane in fleet.plan((X, Y)).lanes} <= {"standin:0", "standin:1"}
    assert all(parameter.device.type == "cpu" for parameter in fleet["0"].parameters())


def test_a_kind_without_an_index_is_its_current_device() -> None:
    with torch.accelerator.device_index(1):
        fleet = fitted("standin", (X, Y), {"strategy": "fused"})
        assert [lane.device for lane in fleet.plan((X, Y)).lanes] == ["standin:1"]
    with pytest.raises(mf.InputError, match="Known: cpu, cuda, mps, xpu, ray, standin"):
        fleet_on("stand")
    with pytest.raises(mf.InputError, match="device 'standin:2' does not exist"):
        fleet_on("standin:2").plan((X, Y))


def test_models_that_are_on_the_device_stay_there() -> None:
    def build() -> nn.Module:
        return dropping().to("standin:1")

    for devices in ("standin:1", "standin:0"):
        there = fitted(devices, (X, Y), {"strategy": "fused"}, build=build)
        on_cpu = fitted("cpu", (X, Y), {"strategy": "fused"}, build=dropping)
        assert differing(there, on_cpu) == []
        assert all(parameter.device == torch.device("standin:1") for parameter in there["0"].parameters())


@pytest.mark.parametrize("build", [dropping, convolution])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(build: Callable[..., nn.Module], precision: str) -> None:
    fleet, alone = (
        fitted("standin:0", DATA[build], {"strategy": strategy}, build=build, precision=precision)
        for strategy in ("fused", "interleaved")
    )
    for name in fleet.names:
        for mine, other in zip(fleet[name].parameters(), alone[name].parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0.05, atol=0.02)


def test_members_that_stop_early_narrow_the_lane() -> None:
    fleets = [
        fitted(device, (X, Y), {"strategy": "fused", "epochs": mf.each([1, 1, 1, 4])}, members=4, build=dropping)
        for device in ("cpu", "standin:0")
    ]
    assert differing(*fleets) == []


def test_saved_and_loaded_fleets_go_on(tmp_path: Any) -> None:
    fleets = []
    for device in ("cpu", "standin:0"):
        fleet = fitted(device, (X, Y), {"strategy": "fused"}, build=dropping)
        fleet.save(tmp_path / device.partition(":")[0])
        loaded = mf.load(tmp_path / device.partition(":")[0], factory=dropping)
        loaded.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
        loaded.fit((X, Y), batch_size=8, progress=False, strategy="fused")
        fleets.append(loaded)
    assert differing(*fleets) == []


def test_evaluating_and_predicting() -> None:
    on_cpu, there = (fitted(device, (X, Y), {}, build=dropping) for device in ("cpu", "standin:0,standin:1"))
    for _ in range(3):  # the third may go another way
        for name, values in there.evaluate((X, Y)).items():
            assert values == pytest.approx(on_cpu.evaluate((X, Y))[name], rel=1e-5)
        mine, other = there.predict(X), on_cpu.predict(X)
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=1e-5, atol=1e-6)


def test_what_a_model_draws_in_training_only_now_and_then_is_its_own() -> None:
    class Choosy(nn.Module):
        """Draws in ways that its code does not name."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.draw = nn.Linear(4, 3), torch.rand_like

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + getattr(self, "draw")(x)) if self.training else self.layer(x)  # noqa: B009

    fleets = [fitted(device, (X, Y), {"strategy": "interleaved"}, build=Choosy) for device in ("cpu", "standin:0")]
    assert differing(*fleets) == []
