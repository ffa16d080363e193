"""The shared suite of what every adapter must hold, for torch and for JAX. Keras's cases are in `keras/`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.testing import conformance


def compile(fleet: mf.Fleet, lr: Any) -> None:
    fleet.compile("adam", "cross_entropy", lr=lr)


def alone(model: Any, name: str, data: Any, **options: Any) -> Any:
    return testing.alone(model, name, data, optimizer="adam", loss="cross_entropy", **options)


# --- torch


def torch_model(kind: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        extra = {
            "dropout": [nn.Dropout(0.3)],
            "batchnorm": [nn.BatchNorm1d(6)],
            "unlike": [nn.Linear(6, 6), nn.ReLU()],
        }
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *extra.get(kind, []), nn.Linear(6, 3))


def torch_weights(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def torch_outputs(model: nn.Module, x: Any) -> Any:
    model.eval()
    with torch.no_grad():
        found = model(torch.from_numpy(x)).numpy()
    model.train()
    return found


# --- JAX: Flax NNX


class Net(nnx.Module):
    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)
        if kind == "dropout":
            self.between = nnx.Dropout(0.3, rngs=rngs)
        elif kind == "batchnorm":
            self.between = nnx.BatchNorm(6, rngs=rngs)
        else:
            self.between = nnx.Linear(6, 6, rngs=rngs) if kind == "unlike" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.first(x))
        return self.last(x if self.between is None else self.between(x))


def nnx_weights(model: Net) -> dict[str, Any]:
    state = nnx.state(model, (nnx.Param, nnx.BatchStat))
    return {str(path): np.array(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def nnx_outputs(model: Net, x: Any) -> Any:
    own = nnx.clone(model)
    own.eval()
    return own(jnp.asarray(x))


# --- JAX: pairs


def forward(params: Any, x: jax.Array, *, rng: jax.Array, train: bool) -> jax.Array:
    x = jnp.tanh(x @ params["first"])
    if "rate" in params and train:
        x = x * jax.random.bernoulli(rng, 0.7, x.shape) / 0.7
    if "scale" in params:
        x = (x - x.mean(0)) * params["scale"] if train else x
    if "between" in params:
        x = jnp.tanh(x @ params["between"])
    return x @ params["last"] + params["bias"]


def pair(kind: str, seed: int) -> Any:
    first, last, between = jax.random.split(jax.random.key(seed), 3)
    params = {
        "first": jax.random.normal(first, (4, 6)) / 2,
        "last": jax.random.normal(last, (6, 3)) / 2,
        "bias": jnp.zeros(3),
    }
    extra = {
        "dropout": {"rate": jnp.zeros(())},
        "batchnorm": {"scale": jnp.ones(6)},
        "unlike": {"between": jax.random.normal(between, (6, 6)) / 2},
    }
    return {**params, **extra.get(kind, {})}, forward


def pair_weights(model: Any) -> dict[str, Any]:
    return {name: np.array(value) for name, value in model[0].items()}


def pair_outputs(model: Any, x: Any) -> Any:
    params, apply = model
    return apply(params, jnp.asarray(x), rng=jax.random.key(0), train=False)


CASES = {
    "torch": conformance.Case(torch_model, compile, alone, torch_weights, torch_outputs),
    "nnx": conformance.Case(
        lambda kind, seed: Net(kind, nnx.Rngs(seed)), compile, alone, nnx_weights, nnx_outputs
    ),
    "pairs": conformance.Case(pair, compile, alone, pair_weights, pair_outputs, in_place=False),
}


@pytest.mark.parametrize("framework", CASES)
@pytest.mark.parametrize("check", conformance.CHECKS)
def test_adapter(framework: str, check: conformance.Check) -> None:
    check(CASES[framework])
