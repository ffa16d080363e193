"""Models of JAX that are more than dicts of float32 arrays, against plain Optax loops."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import modelfleet as mf

X, Y = (np.random.default_rng(seed).normal(size=(16, size)).astype(np.float32) for seed, size in ((0, 4), (1, 2)))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed + 7).normal(size=shape) / 2, jnp.float32)


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A node of one's own, with something beside its arrays."""

    def __init__(self, array: Any, factor: float) -> None:
        self.array, self.factor = array, factor

    def tree_flatten(self) -> Any:
        return (self.array,), self.factor

    @classmethod
    def tree_unflatten(cls, factor: float, children: Any) -> "Scaled":
        return cls(children[0], factor)


class Named(NamedTuple):
    kernel: Any
    bias: Any


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


def _forward(x: jax.Array) -> Any:
    return jnp.sin(x), x


def _backward(x: jax.Array, gradient: jax.Array) -> Any:
    return (jnp.clip(gradient, -0.01, 0.01) * x,)


clipped.defvjp(_forward, _backward)


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def step(carry: jax.Array, kernel: jax.Array) -> Any:
        return jnp.tanh(carry @ kernel), carry.sum()

    final, sums = jax.lax.scan(step, x, params["kernels"])
    return final @ params["head"] + 0.1 * sums.sum()


def complexes(params: Any, x: jax.Array) -> jax.Array:
    return jnp.real((x.astype(jnp.complex64) @ params["w"]) * jnp.exp(1j * params["phase"]))


PAIRS: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Any]]] = {
    "complex": (
        lambda seed: {"w": normal(seed, 4, 2) + 1j * normal(seed + 50, 4, 2), "phase": normal(seed, 2)},
        complexes,
    ),
    "none": (
        lambda seed: {"w": normal(seed, 4, 2), "bias": None, "more": [None, normal(seed, 2)]},
        lambda params, x: x @ params["w"] + params["more"][1],
    ),
    "node": (
        lambda seed: {"w": Scaled(normal(seed, 4, 2), 0.5), "rest": Named(normal(seed, 2, 2), normal(seed, 2))},
        lambda params, x: (
            jnp.tanh(x @ params["w"].array * params["w"].factor) @ params["rest"].kernel + params["rest"].bias
        ),
    ),
    "scan": (lambda seed: {"kernels": normal(seed, 3, 4, 4), "head": normal(seed, 4, 2)}, scanned),
    "custom_vjp": (lambda seed: {"w": normal(seed, 4, 2)}, lambda params, x: clipped(x @ params["w"])),
}
OPTIMIZERS = {"sgd": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.1)}


def compiled(models: list[Any], optimizer: str) -> mf.Fleet:
    fleet = mf.Fleet(models)
    own: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    fleet.compile(optimizer, "mse", lr=0.1, **own)
    fleet.fit((X, Y), epochs=3, batch_size=8, shuffle=False, progress=False)
    return fleet


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", PAIRS)
def test_odd_pairs_train_as_in_a_plain_loop(kind: str, optimizer: str) -> None:
    make, apply = PAIRS[kind]
    fleet = compiled([(make(seed), apply) for seed in range(2)], optimizer)
    for seed, name in enumerate(fleet.names):
        params, own = make(seed), OPTIMIZERS[optimizer]
        slots = own.init(params)

        @jax.jit
        def step(params: Any, slots: Any, x: Any, y: Any, own: Any = own) -> Any:
            gradient = jax.grad(lambda p: jnp.mean((apply(p, x) - y) ** 2))(params)
            updates, slots = own.update(gradient, slots, params)
            return optax.apply_updates(params, updates), slots

        for _ in range(3):
            for start in (0, 8):
                params, slots = step(params, slots, X[start : start + 8], Y[start : start + 8])
        found = fleet[name][0]
        assert jax.tree.structure(found) == jax.tree.structure(params)
        for (path, value), expected in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(params), strict=True):
            assert value.dtype == expected.dtype
            np.testing.assert_allclose(value, expected, 2e-5, 2e-5, err_msg=jax.tree_util.keystr(path))


class Tied(nnx.Module):
    """One layer under two names, and one weight in two layers."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.first
        self.other = nnx.Linear(4, 4, rngs=rngs)
        self.other.kernel = self.first.kernel
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.other(jnp.tanh(self.again(jnp.tanh(self.first(x)))))))


def test_tied_modules_train_as_in_a_plain_loop_and_stay_tied() -> None:
    fleet = compiled([Tied(seed) for seed in range(2)], "adam")
    for seed, name in enumerate(fleet.names):
        model = Tied(seed)
        optimizer = nnx.Optimizer(model, OPTIMIZERS["adam"], wrt=nnx.Param)
        for _ in range(3):
            for start in (0, 8):
                x, y = X[start : start + 8], Y[start : start + 8]
                optimizer.update(model, nnx.grad(lambda m, x=x, y=y: jnp.mean((m(x) - y) ** 2))(model))
        found: Any = fleet[name]
        assert found.again is found.first
        assert found.other.kernel is found.first.kernel
        pairs = zip(jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(model)), strict=True)
        for value, expected in pairs:
            np.testing.assert_allclose(value, expected, 2e-5, 2e-5)


def test_python_numbers_among_params_are_refused() -> None:
    with pytest.raises(mf.FleetError, match=r"'scale' is 0\.5, a Python number; params are arrays"):
        mf.Fleet([({"w": normal(0, 4, 2), "scale": 0.5}, lambda p, x: x @ p["w"] * p["scale"])])
