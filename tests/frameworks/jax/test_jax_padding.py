"""Members of unlike row counts train as alone, though their first weights hide what rows feel of others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import modelfleet as mf

ROWS = (8, 5)


def normed(x: jax.Array) -> jax.Array:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)


def branch(params: Any, x: jax.Array) -> jax.Array:
    """A branch that a gate keeps out at first, and whose own weights keep its gradient out."""
    return x @ params["skip"] + params["gate"] * (normed(x) @ params["zero"] + 1.0)


def head(params: Any, x: jax.Array) -> jax.Array:
    """A head that reads only the first of the features, which feels no other row, at first."""
    return jnp.concatenate([x @ params["skip"], normed(x)], 1) @ params["head"]


def gamma(params: Any, x: jax.Array) -> jax.Array:
    """A scale that begins at zero."""
    return x @ params["skip"] + (normed(x) * params["gamma"]) @ params["full"]


def backward(params: Any, x: jax.Array) -> jax.Array:
    """Rows that feel each other in the gradient only."""
    y = normed(x @ params["skip"])
    return x @ params["skip"] + y - jax.lax.stop_gradient(y)


KINDS = {"branch": branch, "head": head, "gamma": gamma, "backward": backward}


def params(seed: int) -> Any:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

    first = jnp.zeros((6, 2)).at[0, 0].set(1.0).at[1, 1].set(1.0)
    return {
        "skip": normal(4, 2),
        "zero": jnp.zeros((4, 2)),
        "gate": jnp.zeros(()),
        "head": first,
        "gamma": jnp.zeros(4),
        "full": normal(4, 2),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_members_whose_weights_hide_a_norm_train_beside_padding_as_alone(kind: str) -> None:
    apply: Any = KINDS[kind]
    optimizer = optax.sgd(0.1)
    draw = np.random.default_rng(5)
    data = [tuple(draw.normal(size=(rows, size)).astype(np.float32) for size in (4, 2)) for rows in ROWS]
    fleet = mf.Fleet([(params(seed), apply) for seed in range(2)])
    fleet.compile("sgd", "mse", lr=0.1)
    fleet.fit(mf.each(data), epochs=5, batch_size=8, shuffle=False, strategy="fused", progress=False)
    for seed, (name, (x, y)) in enumerate(zip(fleet.names, data, strict=True)):
        expected: Any = params(seed)
        slots = optimizer.init(expected)
        for _ in range(5):
            gradient = jax.grad(lambda p, x=x, y=y: jnp.mean((apply(p, x) - y) ** 2))(expected)
            updates, slots = optimizer.update(gradient, slots)
            expected = optax.apply_updates(expected, updates)
        for found, value in zip(jax.tree.leaves(fleet[name][0]), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, value, 2e-5, 2e-5)


@pytest.mark.parametrize("apply", [branch, head])
def test_outputs_of_unlike_row_counts_are_those_alone(apply: Any) -> None:
    shapes = {"skip": (4, 2), "zero": (4, 2), "gate": (), "head": (6, 2)}
    drawn = np.random.default_rng(0)
    made = [{name: jnp.array(drawn.normal(size=shape)) for name, shape in shapes.items()} for _ in range(3)]
    data = [np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32) for rows in (5, 12, 7)]
    found = mf.Fleet([(params, apply) for params in made]).predict(mf.each(data), batch_size=8)
    for number, (params, x) in enumerate(zip(made, data, strict=True)):
        alone = np.concatenate([apply(params, x[start : start + 8]) for start in range(0, len(x), 8)])
        np.testing.assert_allclose(found[str(number)], alone, rtol=1e-5, atol=1e-5)
