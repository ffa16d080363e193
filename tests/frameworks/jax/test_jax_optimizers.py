"""Optax's transformations in a fleet, against plain Optax loops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import modelfleet as mf

X = np.random.default_rng(0).normal(size=(24, 4))
Y = np.random.default_rng(1).normal(size=(24, 2))
BATCH, STEPS = 8, 6


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["a"].astype(x.dtype)) @ params["b"].astype(x.dtype)


def make(seed: int, dtype: Any = jnp.float32) -> Any:
    generator = np.random.default_rng(seed)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return {
        "a": jnp.asarray(generator.normal(size=(4, 6)) / 2, dtype),
        "b": jnp.asarray(generator.normal(size=(6, 2)) / 2, wide),
    }, apply


def fleet_of(count: int, dtype: Any, optimizer: Any, **hyperparameters: Any) -> mf.Fleet:
    fleet = mf.Fleet([make(seed, dtype) for seed in range(count)])
    fleet.compile(optimizer, "mse", **hyperparameters)
    fleet.fit((X, Y), epochs=2, batch_size=BATCH, shuffle=False, progress=False, strategy="fused")
    return fleet


def plainly(seed: int, dtype: Any, transformation: Any, extra: bool = False) -> Any:
    """Train with Optax as its guide does."""
    params, _ = make(seed, dtype)
    state = transformation.init(params)
    x, y = (jnp.asarray(part, jnp.float64 if dtype == jnp.float64 else jnp.float32) for part in (X, Y))
    for step in range(STEPS):
        start = step % 3 * BATCH

        def loss(params: Any, start: int = start) -> jax.Array:
            return ((apply(params, x[start : start + BATCH]) - y[start : start + BATCH]) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        given = {"value": value, "grad": gradients, "value_fn": loss} if extra else {}
        updates, state = transformation.update(gradients, state, params, **given)
        params = optax.apply_updates(params, updates)
    return params


def same(params: Any, expected: Any, tolerance: float) -> None:
    for name, value in expected.items():
        assert params[name].dtype == value.dtype
        found, wanted = (np.asarray(side, np.float64) for side in (params[name], value))
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_own_betas_are_not_rounded_to_the_dtype_of_the_weights(dtype: Any) -> None:
    betas = [(0.9, 0.99), (0.8, 0.999)]
    eps = 1e-3  # which float16 has
    fleet = fleet_of(2, dtype, optax.adam, lr=0.02, betas=mf.each(betas), eps=eps)
    for seed, (b1, b2) in enumerate(betas):
        same(fleet[str(seed)][0], plainly(seed, dtype, optax.adam(0.02, b1=b1, b2=b2, eps=eps)), 2e-6)


def test_in_float64_a_fleet_is_what_each_is_alone() -> None:
    with jax.enable_x64(True):
        rates, decays = [0.02, 0.05], [0.1, 0.01]
        fleet = fleet_of(2, jnp.float64, optax.adamw, lr=mf.each(rates), weight_decay=mf.each(decays))
        for seed, (rate, decay) in enumerate(zip(rates, decays, strict=True)):
            expected = plainly(seed, jnp.float64, optax.adamw(rate, weight_decay=decay))
            same(fleet[str(seed)][0], expected, 1e-12)


TRANSFORMATIONS = {
    "MultiSteps": optax.MultiSteps(optax.adam(0.02), 2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.05, 0.01, 5)),
    "masked": optax.chain(optax.masked(optax.scale_by_adam(), {"a": True, "b": False}), optax.scale(-0.02)),
    "multi_transform": optax.multi_transform({"x": optax.adam(0.02), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}),
    "schedule_free": optax.contrib.schedule_free_adamw(0.02),
    "muon": optax.contrib.muon(0.02),
    "prodigy": optax.contrib.prodigy(),
    "mechanic": optax.contrib.mechanize(optax.adam(0.02)),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "lbfgs": optax.lbfgs(),
    "polyak": optax.polyak_sgd(),
    "finite": optax.apply_if_finite(optax.adam(0.02), 3),
    "scheduled": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_of_optax_does_what_it_does_alone(name: str) -> None:
    transformation = TRANSFORMATIONS[name]
    with jax.enable_x64(True):
        fleet = fleet_of(2, jnp.float64, transformation)
        for seed in range(2):
            extra = name in ("lbfgs", "polyak", "mechanic")
            # Optax's schedules count in float32.
            tolerance = 1e-7 if name in ("injected", "scheduled") else 1e-9
            same(fleet[str(seed)][0], plainly(seed, jnp.float64, transformation, extra), tolerance)


def test_torch_data_in_bfloat16_are_taken() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.tensor(X, dtype=torch.bfloat16), torch.tensor(Y, dtype=torch.bfloat16)
    fleet = mf.Fleet([make(0)])
    fleet.compile("sgd", "mse", lr=0.1)
    fleet.fit((x, y), batch_size=BATCH, shuffle=False, progress=False)
    again = mf.Fleet([make(0)])
    again.compile("sgd", "mse", lr=0.1)
    wide = tuple(jnp.asarray(part.float().numpy(), jnp.bfloat16) for part in (x, y))
    again.fit(wide, batch_size=BATCH, shuffle=False, progress=False)
    same(fleet["0"][0], again["0"][0], 0)
