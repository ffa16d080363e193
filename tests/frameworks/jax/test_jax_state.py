"""What a call of a Flax module changes stays changed, as in a plain loop of nnx: weights, counters, streams."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import modelfleet as mf

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(24, 2)).astype(np.float32)
BATCH = 8


class Net(nnx.Module):
    """A linear layer in whatever wraps it, and one after it."""

    def __init__(self, wrap: Callable[[nnx.Module, nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> None:
        self.first: Any = wrap(nnx.Linear(4, 6, rngs=rngs), rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


class Noisy(nnx.Module):
    """Adds noise, counts its calls, and changes a weight itself, whether it is trained or not."""

    def __init__(self, layer: nnx.Module, rngs: nnx.Rngs) -> None:
        self.layer: Any = layer
        self.rngs = rngs.fork()
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.shift: Any = nnx.Param(jnp.ones(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        self.shift[...] = self.shift * 0.9
        return self.layer(x + self.shift + 0.1 * jax.random.normal(self.rngs.noise(), x.shape))


WRAPS: dict[str, Callable[[Any, nnx.Rngs], nnx.Module]] = {
    "spectral": lambda layer, rngs: nnx.SpectralNorm(layer, rngs=rngs),
    "weight": lambda layer, rngs: nnx.WeightNorm(layer, rngs=rngs),
    "noisy": Noisy,
}


def net(kind: str, seed: int) -> Any:
    return Net(WRAPS[kind], nnx.Rngs(seed, noise=seed + 10))


def state(model: nnx.Module) -> dict[str, np.ndarray]:
    found = {}
    for path, leaf in jax.tree.leaves_with_path(nnx.state(model)):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        found[jax.tree_util.keystr(path)] = np.array(leaf)
    return found


def same(model: nnx.Module, expected: nnx.Module, tolerance: float = 2e-6) -> None:
    found, wanted = state(model), state(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def loss_of(model: Any, batch: Any) -> jax.Array:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[start : start + BATCH], Y[start : start + BATCH]) for start in range(0, len(X), BATCH)]


def plainly(model: nnx.Module, epochs: int) -> None:
    """Train as the guide of nnx does."""
    model.train()
    optimizer: Any = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
    for _ in range(epochs):
        for batch in batches():
            gradients = nnx.grad(loss_of)(model, batch)
            optimizer.update(model, gradients)


@pytest.mark.parametrize("kind", WRAPS)
def test_what_a_forward_changes_is_trained_as_in_a_plain_loop(kind: str) -> None:
    models = [net(kind, seed) for seed in range(3)]
    expected = [net(kind, seed) for seed in range(3)]
    fleet = mf.Fleet({str(seed): model for seed, model in enumerate(models)})
    fleet.compile(optax.adam, "mse", lr=0.02)
    fleet.fit((X, Y), epochs=2, batch_size=BATCH, shuffle=False, progress=False)
    for model, own in zip(models, expected, strict=True):
        plainly(own, epochs=2)
        same(model, own)


@pytest.mark.parametrize("kind", WRAPS)
def test_evaluate_and_predict_leave_a_model_as_a_plain_run_does(kind: str) -> None:
    models = [net(kind, seed) for seed in range(2)]
    expected = [net(kind, seed) for seed in range(2)]
    fleet = mf.Fleet({str(seed): model for seed, model in enumerate(models)})
    fleet.compile("sgd", "mse", lr=0.1)
    values = fleet.evaluate((X, Y), batch_size=BATCH)
    outputs = fleet.predict(X, batch_size=BATCH)
    for name, own in enumerate(expected):
        own.eval()
        losses = [float(loss_of(own, batch)) for batch in batches()]
        assert values[str(name)]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        wanted = np.concatenate([np.asarray(own(x)) for x, _ in batches()])
        np.testing.assert_allclose(outputs[str(name)], wanted, rtol=1e-5, atol=1e-6)
        same(models[name], own)


def test_a_member_without_rows_left_is_not_changed_by_the_batches_of_the_others() -> None:
    models = [net("noisy", seed) for seed in range(2)]
    expected = [net("noisy", seed) for seed in range(2)]
    fleet = mf.Fleet({str(seed): model for seed, model in enumerate(models)})
    rows = [len(X), 11]
    outputs = fleet.predict(mf.each([X[:count] for count in rows]), batch_size=BATCH)
    for name, (own, count) in enumerate(zip(expected, rows, strict=True)):
        own.eval()
        wanted = [np.asarray(own(X[start : min(start + BATCH, count)])) for start in range(0, count, BATCH)]
        np.testing.assert_allclose(outputs[str(name)], np.concatenate(wanted), rtol=1e-5, atol=1e-6)
        same(models[name], own)


def test_validation_in_a_fit_changes_what_it_would_alone() -> None:
    models = [net("noisy", seed) for seed in range(2)]
    expected = [net("noisy", seed) for seed in range(2)]
    fleet = mf.Fleet({str(seed): model for seed, model in enumerate(models)})
    fleet.compile(optax.adam, "mse", lr=0.02)
    fleet.fit((X, Y), validation=(X, Y), epochs=2, batch_size=BATCH, shuffle=False, progress=False)
    for model, own in zip(models, expected, strict=True):
        optimizer: Any = nnx.Optimizer(own, optax.adam(0.02), wrt=nnx.Param)
        for _ in range(2):
            own.train()
            for batch in batches():
                gradients = nnx.grad(loss_of)(own, batch)
                optimizer.update(own, gradients)
            own.eval()
            for batch in batches():
                own(batch[0])
        same(model, own)


def test_a_variable_that_changes_its_dtype_is_refused() -> None:
    class Growing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(4, 2, rngs=rngs)
            self.total = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.total.set_value(self.total.get_value() + x.sum())
            return self.layer(x)

    fleet = mf.Fleet([Growing(nnx.Rngs(0))])
    fleet.compile("sgd", "mse")
    with pytest.raises(mf.InputError, match=r"'total.value' was \(\) int32, now it is \(\) float32.*cast what"):
        fleet.fit((X, Y), progress=False)
