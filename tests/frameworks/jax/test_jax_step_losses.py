"""The loss of every step of JAX members, on request."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import modelfleet as mf

ROWS = {"a": 41, "b": 10, "c": 41}  # more steps than a call takes
EPOCHS = {"a": 2, "b": 2, "c": 1}


def apply(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def branching(params: Any, x: Any) -> Any:
    """Can't be traced."""
    return apply(params, x) if float(x.sum()) < 1e9 else x[:, :3]


def make(seed: int, call: Any) -> Any:
    generator = np.random.default_rng(seed)
    shapes = {"first": (4, 5), "last": (5, 3)}
    return {name: jnp.asarray(generator.normal(size=shape) / 2) for name, shape in shapes.items()}, call


def toy() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(41, 4))
    return x, np.argmax(x[:, :3], axis=1)


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(apply(params, x)), y[:, None], 1).mean()


def plain(params: Any, rows: int, epochs: int) -> tuple[list[float], list[int]]:
    """A plain loop: the loss of each step, and its rows."""
    losses, sizes = [], []
    x, y = (jnp.asarray(array[:rows]) for array in toy())
    step = jax.jit(jax.value_and_grad(loss_of))
    for _ in range(epochs):
        for start in range(0, rows, 2):
            loss, gradients = step(params, x[start : start + 2], y[start : start + 2])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
            losses.append(float(loss))
            sizes.append(len(x[start : start + 2]))
    return losses, sizes


@pytest.mark.parametrize(
    ("strategy", "call"), [("fused", apply), ("interleaved", apply), ("interleaved", branching)]
)
def test_the_losses_are_those_of_a_plain_loop(strategy: Any, call: Any) -> None:
    with jax.enable_x64(True):
        models = {name: make(seed, call) for seed, name in enumerate(ROWS)}
        expected = {name: plain(models[name][0], ROWS[name], EPOCHS[name]) for name in ROWS}
        fleet = mf.Fleet(models)
        fleet.compile("sgd", "cross_entropy", lr=0.1)
        x, y = (jnp.asarray(array) for array in toy())
        history = fleet.fit(
            mf.each({name: (x[:rows], y[:rows]) for name, rows in ROWS.items()}),
            epochs=mf.each(EPOCHS),
            batch_size=2,
            shuffle=False,
            strategy=strategy,
            record_steps=True,
            progress=False,
        )
    for name, (losses, sizes) in expected.items():
        found = history.steps(name)["loss"]
        np.testing.assert_allclose(found, losses, rtol=1e-10)
        steps = len(losses) // EPOCHS[name]
        for epoch, value in enumerate(history[name]["loss"]):
            own = slice(epoch * steps, (epoch + 1) * steps)
            # The sums of an epoch are float32.
            assert np.average(found[own], weights=sizes[own]) == pytest.approx(value, rel=1e-6)


def test_a_member_that_fails_within_a_call_of_many_steps_has_the_steps_it_took() -> None:
    models = {name: make(seed, apply) for seed, name in enumerate("ab")}
    x, y = toy()
    sick = x.copy()
    sick[9] = np.nan  # in the fifth step
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    history = fleet.fit(
        mf.each({"a": (x, y), "b": (sick, y)}), batch_size=2, shuffle=False, record_steps=True, progress=False
    )
    assert history.failed["b"].step == 5
    assert np.isfinite(history.steps("b")["loss"]).tolist() == [True] * 4 + [False]
    assert np.isfinite(history.steps("a")["loss"]).tolist() == [True] * 21
