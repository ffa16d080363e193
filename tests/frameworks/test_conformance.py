"""The shared suite of what every adapter must hold, for torch. Keras's cases are in `keras/`, JAX's in `jax/`."""

from typing import Any

import pytest
import torch
from torch import nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.testing import conformance


def make(kind: str, seed: int) -> nn.Module:
    extra = {
        "dropout": [nn.Dropout(0.3)],
        "batchnorm": [nn.BatchNorm1d(6)],
        "unlike": [nn.Linear(6, 6), nn.ReLU()],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *extra.get(kind, []), nn.Linear(6, 3))


def compile(fleet: mf.Fleet, lr: Any) -> None:
    fleet.compile("adam", "cross_entropy", lr=lr)


def alone(model: nn.Module, name: str, data: Any, **options: Any) -> nn.Module:
    return testing.alone(model, name, data, optimizer="adam", loss="cross_entropy", **options)


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def outputs(model: nn.Module, x: Any) -> Any:
    model.eval()
    with torch.no_grad():
        found = model(torch.from_numpy(x)).numpy()
    model.train()
    return found


case = conformance.Case(make=make, compile=compile, alone=alone, weights=weights, outputs=outputs)


@pytest.mark.parametrize("check", conformance.CHECKS)
def test_torch(check: conformance.Check) -> None:
    check(case)
