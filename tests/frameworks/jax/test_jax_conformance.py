"""The shared suite of what every adapter must hold, for Flax NNX modules and for `(params, apply)` pairs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import modelfleet as mf
from modelfleet import testing
from modelfleet.testing import conformance


class Net(nnx.Module):
    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 6, rngs=rngs)
        extra = {
            "dropout": lambda: nnx.Dropout(0.3, rngs=rngs),
            "batchnorm": lambda: nnx.BatchNorm(6, epsilon=1e-3, use_fast_variance=False, rngs=rngs),
            "unlike": lambda: nnx.Linear(6, 6, rngs=rngs),
        }
        self.extra = nnx.List([extra[kind]()] if kind in extra else [])
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.tanh(self.first(x))
        for layer in self.extra:
            x = layer(x)
        return self.last(x)


def module(kind: str, seed: int) -> Net:
    return Net(kind, nnx.Rngs(seed))


def apply(params: dict[str, Any], x: Any, *, train: bool = False, rng: Any = None) -> Any:
    x = jnp.tanh(x @ params["first"] + params["bias"])
    if "drop" in params and train:
        x = jnp.where(jax.random.bernoulli(rng, 0.7, x.shape), x / 0.7, 0)
    if "norm" in params:  # by the statistics of the batch, in training and outside of it
        x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3) * params["norm"] if train else x * params["norm"]
    if "more" in params:
        x = jax.nn.relu(x @ params["more"])
    return x @ params["last"]


def pair(kind: str, seed: int) -> tuple[dict[str, Any], Any]:
    generator = np.random.default_rng(seed)
    shapes = {"first": (4, 6), "bias": (6,), "last": (6, 3)}
    shapes |= {"dropout": {"drop": (1,)}, "batchnorm": {"norm": (6,)}, "unlike": {"more": (6, 6)}}.get(kind, {})
    return {name: generator.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}, apply


def compile(fleet: mf.Fleet, lr: Any) -> None:
    fleet.compile("adam", "cross_entropy", lr=lr)


def alone(model: Any, name: str, data: Any, **options: Any) -> Any:
    return testing.alone(model, name, data, optimizer="adam", loss="cross_entropy", **options)


def weights(model: Any) -> dict[str, Any]:
    tree = nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))) if isinstance(model, Net) else model[0]
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in found}


def outputs(model: Any, x: Any) -> Any:
    if not isinstance(model, Net):
        return model[1](model[0], x)
    model.eval()
    found = model(x)
    model.train()
    return found


modules = conformance.Case(make=module, compile=compile, alone=alone, weights=weights, outputs=outputs)
pairs = conformance.Case(make=pair, compile=compile, alone=alone, weights=weights, outputs=outputs, in_place=False)


@pytest.mark.parametrize("check", conformance.CHECKS)
def test_modules(check: conformance.Check) -> None:
    check(modules)


# Pairs take the same way as modules, except where a model is taken apart and put together again.
OF_PAIRS = (
    "in_a_fleet_as_alone-dropout-each",
    "own_data_as_alone-batchnorm",
    "evaluate_and_predict_as_alone",
    "strategies_agree-processes",
    "plain_in_plain_out",
    "saved_and_loaded",
    "members_come_and_go",
    "resumed_as_unbroken",
)


@pytest.mark.parametrize("check", [check for check in conformance.CHECKS if check.__name__ in OF_PAIRS])
def test_pairs(check: conformance.Check) -> None:
    check(pairs)
