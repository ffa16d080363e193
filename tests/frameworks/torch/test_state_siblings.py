"""Layers that change themselves as they run, shared parts, and caches: fused and equal, or plain with a reason."""

import cProfile
import functools
import sys
from typing import Any

import pytest
import torch
from tests.frameworks.torch import comparing
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import modelfleet as mf


def ordinary(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def old_spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    prune.l1_unstructured(model[0], "weight", 0.4)
    first: Any = model[0]
    vars(first)["weight"] = first.weight.detach()  # which can be copied
    return model


def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


@functools.lru_cache
def positions(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float64)


class Cached(nn.Module):
    """Reads a tensor from a function's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + positions(x.shape[1]))


@pytest.mark.parametrize("make", [spectral, old_spectral, weight_normed, pruned, orthogonal, Cached])
def test_a_layer_that_makes_its_weight_anew_trains_as_alone(make: Any) -> None:
    data, models = comparing.rows(), comparing.build(make, 2)
    expected = comparing.plainly(models, ordinary, data)
    fleet = comparing.compiled(models, loss="cross_entropy")
    comparing.fit(fleet, data)
    comparing.assert_equal(models, expected, 1e-10)
    assert comparing.reason(fleet, data) != "no reason given"
    for place, (model, other) in enumerate(zip(models, expected, strict=True)):
        # What is left in the model is as good as in a plain run: it can be called, and copied.
        output = other.eval()(data[0])
        assert (model.eval()(data[0]) - output).abs().max() < 1e-10, place
        for part in model.modules():
            assert not any(type(value).__name__ == "FakeTensor" for value in vars(part).values())
    assert type(positions(4)) is Tensor


def test_members_that_change_apart_in_a_fit_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), 1

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    data, models = comparing.rows(), comparing.build(Scaled, 2)

    class Change(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            vars(models[1])["scale"] = 2

    fleet = comparing.compiled(models, loss="cross_entropy")
    with pytest.raises(mf.StrategyError, match=r"'1' no longer has the structure of '0': scale is 2, not 1"):
        comparing.fit(fleet, data, callbacks=[Change()])


def test_a_fit_can_be_profiled() -> None:
    fleet = mf.Fleet([nn.Linear(2, 1) for _ in range(2)])
    fleet.compile("sgd", "mse", lr=0.1)
    with cProfile.Profile() as profile:
        fleet.fit((torch.ones(4, 2), torch.ones(4, 1)), batch_size=2, progress=False)
    assert "epoch_values" in {getattr(entry.code, "co_name", "") for entry in profile.getstats()}


def test_a_profiler_that_python_cannot_set_again_is_off_afterwards_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CProfiler:
        """Like the state of profilers that are set from C: not callable."""

    fleet = mf.Fleet([nn.Linear(2, 1) for _ in range(2)])
    fleet.compile("sgd", "mse", lr=0.1)
    monkeypatch.setattr(sys, "getprofile", CProfiler)
    with pytest.warns(UserWarning, match="the profiler 'CProfiler' is off from now on"):
        history = fleet.fit((torch.ones(4, 2), torch.ones(4, 1)), batch_size=2, progress=False)
    assert not history.failed
