"""On an accelerator, members get the numbers that they get alone and on the CPU, whatever the strategy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.device import GPU, KIND
from tests.gpu.models import CASES, Recurrent, drawing, typed
from tests.helpers import all_weights
from tests.standin.models import LABELS, TOKENS, X, Y, close, dropping, fitted, fleet_on
from torch import nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.types import Strategy

pytestmark = GPU
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def trained(devices: str, build: Callable[[], nn.Module], data: Any, strategy: Strategy = "fused") -> mf.Fleet:
    """A fleet of three after two epochs."""
    return fitted(devices, data, {"strategy": strategy}, build=build)


def difference(fleet: mf.Fleet, other: mf.Fleet) -> float:
    return max(testing.largest_difference(fleet[name].cpu(), other[name].cpu())[0] for name in fleet.names)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
def test_in_a_fleet_as_alone(case: str, dtype: torch.dtype, one: str) -> None:
    build, x, y = CASES[case]
    data = typed(x, dtype), typed(y, dtype)

    def made() -> nn.Module:
        return build().to(dtype)

    # torch has other cells of recurrent layers on accelerators, which the stand-in does not have.
    lacking = KIND == "standin" and case == "lstm"
    start = fleet_on(one, made)["1"].to("cpu" if lacking else one)
    recipe = {"optimizer": "sgd", "loss": "cross_entropy", "lr": 0.1, "momentum": 0.9}
    expected = testing.alone(start, "1", data, seed=3, epochs=2, batch_size=8, **recipe)
    for strategy in ("fused",) if lacking else ("fused", "interleaved"):
        there = trained(one, made, data, strategy)
        found, where = testing.largest_difference(there["1"], expected.cpu())
        assert found < TOLERANCE[dtype], f"{strategy}: {where}"


@pytest.mark.parametrize("kind", ["dropout", "channels", "alpha", "alpha of channels", "rrelu", "functions"])
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_draws_are_those_of_the_cpu(kind: str, strategy: Strategy, one: str) -> None:
    def made() -> nn.Module:
        return drawing(kind).double()

    data = typed(X, torch.float64), typed(Y, torch.float64)
    assert difference(*(trained(device, made, data, strategy) for device in ("cpu", one))) < 1e-10


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_draws_between_recurrent_layers_are_those_of_the_cpu(
    layer: Callable[..., nn.Module], strategy: Strategy, one: str
) -> None:
    if KIND == "standin" and strategy == "interleaved" and layer is not nn.RNN:
        pytest.skip("the stand-in lacks these cells")

    def made() -> nn.Module:
        return Recurrent(layer).double()

    data = typed(TOKENS, torch.float64), typed(LABELS, torch.float64)
    assert difference(*(trained(device, made, data, strategy) for device in ("cpu", one))) < 1e-10


UNLIKE: dict[str, Any] = {"build": dropping, "width": mf.each([6, 7, 8, 9]), "members": 4}
"""Hidden widths: with a strategy of lanes, a lane for each."""


@pytest.mark.parametrize("strategy", ["threads", "auto"])
def test_threads_do_not_race(strategy: Strategy, one: str) -> None:
    on_cpu = fitted("cpu", (X, Y), {"epochs": 4}, **UNLIKE)
    for _ in range(3 if one.startswith("cuda") else 1):  # a race shows only now and then
        close(fitted(one, (X, Y), {"strategy": strategy, "epochs": 4}, **UNLIKE), on_cpu)


@pytest.mark.parametrize("strategy", ["auto", "threads", "interleaved"])
def test_two_devices_get_the_weights_of_one(strategy: Strategy, both: str) -> None:
    there, on_cpu = (fitted(devices, (X, Y), {"strategy": strategy}, **UNLIKE) for devices in (both, "cpu"))
    close(there, on_cpu)
    lanes = there.plan((X, Y), batch_size=8, strategy=strategy).lanes
    assert {lane.device for lane in lanes} == set(both.split(","))


@pytest.mark.parametrize("strategy", ["processes", "data_parallel"])
def test_workers_on_two_devices_get_the_weights_of_one(strategy: Strategy, both: str) -> None:
    second = both.partition(",")[2]

    def build() -> nn.Module:
        return dropping().to(second)

    there = fitted(both, (X, Y), {"strategy": strategy}, build=build)
    close(there, fitted("cpu", (X, Y), {"strategy": "fused"}, build=dropping))
    for own in all_weights(there).values():
        assert {tensor.device for tensor in own.values()} == {torch.device(second)}


def test_a_run_that_is_broken_off_goes_on_from_its_checkpoint(one: str, tmp_path: Path) -> None:
    class Break(mf.Callback):
        """Breaks a fit off at a step."""

        at = 7

        def on_step_end(self, run: Any) -> None:
            if run.step == self.at:
                raise RuntimeError("broken off")

    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "strategy": "fused", "progress": False}
    whole = fleet_on(one, dropping)
    whole.fit((X, Y), **options)
    callbacks = [mf.Checkpoint(tmp_path / "run", every_steps=2), Break()]
    with pytest.raises(RuntimeError, match="broken off"):
        fleet_on(one, dropping).fit((X, Y), callbacks=callbacks, **options)
    Break.at = 0
    resumed = fleet_on(one, dropping)
    resumed.fit((X, Y), callbacks=callbacks, **options)
    close(resumed, whole)


def test_a_chain_over_two_devices_is_one_model(both: str) -> None:
    def stages() -> dict[str, nn.Module]:
        torch.manual_seed(0)
        return {"first": nn.Sequential(nn.Linear(4, 6), nn.Tanh()), "second": nn.Linear(6, 3)}

    models = []
    for devices in ("cpu", both):
        own = stages()
        chain = mf.Chain(own, devices=devices)
        chain.compile("adamw", "cross_entropy", lr=0.01)
        chain.fit((X, Y), epochs=2, batch_size=8, progress=False)
        models.append(nn.Sequential(*own.values()).cpu())
    assert testing.largest_difference(*models)[0] < 1e-4


def test_replicas_answer_as_the_model(both: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():  # eighths: no sum of them is rounded, whatever batch a row is in
        for parameter in model.parameters():
            parameter.copy_((8 * parameter).round() / 8)
    x = np.round(8 * X) / 8
    expected = model(torch.from_numpy(x)).detach().numpy()
    model.to(both.partition(",")[2])
    found = mf.map(model, mf.each({"ada": x, "bob": x[:7]}), devices=both, batch_size=8)
    np.testing.assert_array_equal(found["ada"], expected)
    np.testing.assert_array_equal(found["bob"], expected[:7])


_sizes: list[int] = []


class Counting(nn.Module):
    """Notes the sizes of its batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _sizes.append(len(x))
        return 2 * x


def test_replicas_get_batches_of_few_sizes(one: str) -> None:
    _sizes.clear()
    x = np.arange(63, dtype=np.float32).reshape(21, 3)
    found = mf.map(Counting(), mf.each({"ada": x}), devices=one, batch_size=12)
    np.testing.assert_array_equal(found["ada"], 2 * x)
    assert set(_sizes) <= {1, 2, 4, 6, 8, 12}
    assert 12 in _sizes
