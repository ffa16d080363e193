"""The shared suite of what every engine must hold, for JAX and torch; for Keras see `keras/`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from modelfleet.frameworks import jax as adapter
from modelfleet.frameworks import torch as torch_adapter
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.lane_context import alike
from modelfleet.frameworks.torch.base import on_host
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.testing import engines


def apply(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["first"].astype(x.dtype)) * params["on"]
    return hidden @ params["last"].astype(x.dtype) + params["shift"]


def pair(seed: int) -> Any:
    generator = np.random.default_rng(seed)
    return {
        "first": jnp.asarray(generator.normal(size=(4, 6)) / 2, jnp.bfloat16),
        "last": jnp.asarray(generator.normal(size=(6, 2)) / 2, jnp.float16),
        "on": jnp.asarray([True, False, True, True, True, seed == 0]),
        "shift": jnp.asarray(seed, jnp.int32),
    }, apply


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 6, rngs=rngs, param_dtype=jnp.bfloat16)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(self.first(x).astype(jnp.float32)))


def weights(model: Any) -> dict[str, np.ndarray]:
    tree = nnx.state(model) if isinstance(model, nnx.Module) else model[0]
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def batch(slots: Sequence[int]) -> Any:
    x, y = (np.random.default_rng(seed).normal(size=(3, 5, size)) for seed, size in ((0, 4), (1, 2)))
    return x[list(slots)].astype(np.float32), y[list(slots)].astype(np.float32)


def case(model: Any) -> engines.Case:
    def members() -> Sequence[Member]:
        return [Member(str(seed), model(seed), seed, adapter) for seed in range(engines.WIDTH)]

    def engine(members: Sequence[Member]) -> Engine:
        recipe = Recipe("sgd", "mse", hyperparameters={"lr": 0.1, "momentum": 0.9})
        task = adapter.prepare(recipe, members, "train").tasks[0]
        return adapter.make_engine(alike(members, task, {}, jax.devices("cpu")[0], fused=True))

    return engines.Case(members, engine, batch, weights)


class Odd(nn.Module):
    """Layers that are stored transposed, a buffer, a frozen weight, and a weight in bfloat16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(4, 6, bias=False)  # before BatchNorm its gradient would be rounding
            self.norm = nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 2)
            self.scale = nn.Parameter(torch.rand(2, dtype=torch.bfloat16))
            self.still = nn.Parameter(torch.rand(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.scale.float() + self.still


def torch_weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: on_host(tensor).copy() for name, tensor in model.state_dict().items()}


def torch_batch(slots: Sequence[int]) -> Any:
    return tuple(torch.from_numpy(array) for array in batch(slots))


def torch_case(optimizer: str, width: int, **hyperparameters: float) -> engines.Case:
    recipe = Recipe(optimizer, "mse", hyperparameters=hyperparameters)
    known: dict[str, Any] = {}

    def members() -> Sequence[Member]:
        return [Member(str(seed), Odd(seed), seed, torch_adapter) for seed in range(width)]

    def engine(members: Sequence[Member]) -> Engine:
        prepared = torch_adapter.prepare(recipe, members, "train")
        task, device, programs = prepared.tasks[0], torch.device("cpu"), known.get("programs")
        context = alike(members, task, prepared.columns, device, fused=True, programs=programs)
        made = torch_adapter.make_engine(context)
        known["programs"] = made.programs  # traced once, as lanes hand them on
        return made

    hyper = torch_adapter.prepare(recipe, members(), "train").columns
    return engines.Case(members, engine, torch_batch, torch_weights, hyper, width)


CASES = {
    "pairs": case(pair),
    "nnx": case(Net),
    "torch": torch_case("adam", engines.WIDTH, lr=0.1),
    "plain torch": torch_case("adam", 1, lr=0.1),
    "plain torch with momentum": torch_case("sgd", 1, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("framework", CASES)
@pytest.mark.parametrize("check", engines.CHECKS)
def test_engine(framework: str, check: engines.Check) -> None:
    case = CASES[framework]
    if case.width == 1 and check in engines.OF_SEVERAL:
        pytest.skip("it takes one member")
    check(case)
