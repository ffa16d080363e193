"""What JAX models read and change in Python: a program never goes on with values of before."""

import random
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
SCALE = 1.0


def helper(x: jax.Array) -> jax.Array:
    return x * SCALE


def reading(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(helper(x)) @ params["w"]


def params(seed: int) -> dict[str, Any]:
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(4, 2)), jnp.float32)}


def batches() -> list[Any]:
    return [(X[start : start + BATCH], Y[start : start + BATCH]) for start in range(0, len(X), BATCH)]


def plainly(own: Any, apply: Any, epochs: int = 1, rate: float = 0.1) -> Any:
    update = optax.sgd(rate)
    state = update.init(own)
    for _ in range(epochs):
        for x, y in batches():
            gradients = jax.grad(lambda p, x=x, y=y: ((apply(p, jnp.asarray(x)) - y) ** 2).mean())(own)
            updates, state = update.update(gradients, state, own)
            own = optax.apply_updates(own, updates)
    return own


def fit(fleet: mf.Fleet, **options: Any) -> mf.History:
    return fleet.fit((X, Y), batch_size=BATCH, shuffle=False, progress=False, **options)


def fleet_of(apply: Any, count: int = 2, **options: Any) -> mf.Fleet:
    fleet = mf.Fleet([(params(seed), apply) for seed in range(count)])
    fleet.compile("sgd", options.pop("loss", "mse"), lr=0.1, **options)
    return fleet


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found["w"], expected["w"], rtol=2e-6, atol=2e-6)


def test_a_global_that_is_set_anew_is_read_by_the_next_fleet_and_the_next_fit(monkeypatch: Any) -> None:
    fleet = fleet_of(reading)
    fit(fleet)
    first = plainly(params(0), reading)
    close(fleet["0"][0], first)
    monkeypatch.setattr(__import__("sys").modules[__name__], "SCALE", 3.0)
    other = fleet_of(reading)
    fit(other)
    close(other["0"][0], plainly(params(0), reading))
    fit(fleet)
    close(fleet["0"][0], plainly(first, reading))


class Anneal(mf.Callback):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_epoch_end(self, run: Any) -> None:
        self.change()


def test_what_a_callback_anneals_is_read_in_the_next_epoch() -> None:
    settings = {"weight": 1.0}

    def objective(model: Any, batch: Any) -> jax.Array:
        own, apply = model
        return settings["weight"] * ((apply(own, batch[0]) - batch[1]) ** 2).mean()

    fleet = fleet_of(reading, loss=None, objective=objective)
    fit(fleet, epochs=3, callbacks=[Anneal(lambda: settings.update(weight=settings["weight"] / 2))])
    expected = params(1)
    for rate in (0.1, 0.05, 0.025):
        expected = plainly(expected, reading, rate=rate)
    close(fleet["1"][0], expected)


class Scaled(nnx.Module):
    shift = 0.0

    def __init__(self, seed: int) -> None:
        self.layer = nnx.Linear(4, 2, rngs=nnx.Rngs(seed))
        self.scale = 1.0
        self.calls = 0

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x * self.scale + self.shift)


class Counting(Scaled):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return self.layer(x / self.calls)


def module_plainly(model: Any, change: Any = lambda: None, epochs: int = 1) -> None:
    optimizer: Any = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(epochs):
        for x, y in batches():
            gradients = nnx.grad(lambda m, x=x, y=y: ((m(x) - y) ** 2).mean())(model)
            optimizer.update(model, gradients)
        change()


def test_attributes_of_modules_and_classes_are_read_as_they_are(monkeypatch: Any) -> None:
    models, expected = ([Scaled(seed) for seed in range(2)] for _ in range(2))
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=0.1)

    def change(models: Any) -> None:
        for model in models:
            model.scale *= 2

    fit(fleet, epochs=2, callbacks=[Anneal(lambda: change(models))])
    module_plainly(expected[1], lambda: change(expected[1:]), epochs=2)
    np.testing.assert_allclose(models[1].layer.kernel[...], expected[1].layer.kernel[...], rtol=2e-6, atol=2e-6)
    monkeypatch.setattr(Scaled, "shift", 0.5)
    fit(fleet)
    module_plainly(expected[1])
    np.testing.assert_allclose(models[1].layer.kernel[...], expected[1].layer.kernel[...], rtol=2e-6, atol=2e-6)


def test_a_member_that_becomes_unlike_the_others_in_a_fit_trains_as_alone() -> None:
    models, expected = ([Scaled(seed) for seed in range(2)] for _ in range(2))
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=0.1)
    change = Anneal(lambda: setattr(models[1], "scale", 0.5))
    assert not fit(fleet, epochs=3, callbacks=[change], strategy="fused").failed
    module_plainly(expected[0], epochs=3)
    module_plainly(expected[1], lambda: setattr(expected[1], "scale", 0.5), epochs=3)
    for model, own in zip(models, expected, strict=True):
        np.testing.assert_allclose(model.layer.kernel[...], own.layer.kernel[...], rtol=2e-6, atol=2e-6)


def test_a_module_that_counts_in_python_runs_as_it_is() -> None:
    models, expected = ([Counting(seed) for seed in range(2)] for _ in range(2))
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=0.1)
    fit(fleet, epochs=2)
    for model, own in zip(models, expected, strict=True):
        module_plainly(own, epochs=2)
        assert model.calls == own.calls == 6
        np.testing.assert_allclose(model.layer.kernel[...], own.layer.kernel[...], rtol=2e-6, atol=2e-6)
    reasons = [lane.reason or "" for lane in fleet.plan((X, Y), batch_size=BATCH).lanes]
    assert all("a call changes what Python holds (calls)" in reason for reason in reasons)


def test_a_function_that_counts_in_its_closure_runs_as_it_is() -> None:
    def counting() -> Any:
        count = 0

        def apply(own: Any, x: jax.Array) -> jax.Array:
            nonlocal count
            count += 1
            return x @ own["w"] / count

        return apply

    fleet = mf.Fleet([(params(seed), counting()) for seed in range(2)])
    fleet.compile("sgd", "mse", lr=0.1)
    fit(fleet, epochs=2)
    for seed in range(2):
        close(fleet[str(seed)][0], plainly(params(seed), counting(), epochs=2))


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_a_function_that_draws_from_pythons_generators_draws_at_every_step(draw: Any) -> None:
    def noisy(own: Any, x: jax.Array) -> jax.Array:
        return (x * draw()) @ own["w"]

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)

    fleet = fleet_of(noisy, count=1)
    seed()
    fit(fleet)
    seed()
    close(fleet["0"][0], plainly(params(0), noisy))


def branching(own: Any, x: jax.Array) -> jax.Array:
    return x @ own["w"] * 2 if x.sum() > 0 else x @ own["w"]


@pytest.mark.parametrize("strategy", ["auto", "threads", "processes"])
def test_a_model_that_branches_on_values_trains_as_alone(strategy: str) -> None:
    fleet = fleet_of(branching)
    history = fit(fleet, strategy=strategy)
    assert not history.failed
    for seed in range(2):
        close(fleet[str(seed)][0], plainly(params(seed), branching))
