"""The shared suite of what every engine must hold, for JAX; in several dtypes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modelfleet.frameworks import jax as adapter
from modelfleet.frameworks.protocol import Engine
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
    def make() -> tuple[Engine, Sequence[Member]]:
        members = [Member(str(seed), model(seed), seed, adapter) for seed in range(engines.WIDTH)]
        recipe = Recipe("sgd", "mse", hyperparameters={"lr": 0.1, "momentum": 0.9})
        task = adapter.prepare(recipe, members, "train").tasks[0]
        return adapter.Engine(members, task, {}, jax.devices("cpu")[0], fused=True), members

    return engines.Case(make, batch, weights)


CASES = {"pairs": case(pair), "nnx": case(Net)}


@pytest.mark.parametrize("framework", CASES)
@pytest.mark.parametrize("check", engines.CHECKS)
def test_engine(framework: str, check: engines.Check) -> None:
    check(CASES[framework])
