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
from modelfleet.types import Strategy

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
def test_a_model_that_branches_on_values_trains_as_alone(strategy: Strategy) -> None:
    fleet = fleet_of(branching)
    history = fit(fleet, strategy=strategy)
    assert not history.failed
    for seed in range(2):
        close(fleet[str(seed)][0], plainly(params(seed), branching))


# --- every way to run a step looks at what its Python reads -----------------------------------------------

SIZES = (4, 3)


class Turn(mf.Callback):
    """Runs a function at one moment of a fit."""

    def __init__(self, moment: str, act: Any) -> None:
        self.moment, self.act = moment, act

    def on_fit_start(self, run: Any) -> None:
        self._reach("start", run)

    def on_step_end(self, run: Any) -> None:
        self._reach(f"step {run.step}", run)

    def on_epoch_end(self, run: Any) -> None:
        self._reach(f"epoch {run.epoch}", run)

    @property
    def wants_steps(self) -> bool:
        return self.moment.startswith("step")

    def _reach(self, moment: str, run: Any) -> None:
        if moment == self.moment:
            self.act(run)


class Knob:
    def __init__(self) -> None:
        self.value = 1.0

    def objective(self, model: Any, batch: Any) -> jax.Array:
        output = model[1](model[0], batch[0]) if isinstance(model, tuple) else model(batch[0])
        return self.value * ((output - batch[1]) ** 2).mean()


def stepped(own: Any, objective: Any, size: int, steps: int, first: int = 0) -> Any:
    """A loop over rows of `X` in order, round and round, in batches that are cut anew at each epoch."""
    cuts = [slice(start, start + size) for start in range(0, len(X), size)]
    for step in range(first, first + steps):
        cut = cuts[step % len(cuts)]
        gradients = jax.grad(lambda p, cut=cut: objective((p, reading), (X[cut], Y[cut])))(own)
        own = jax.tree.map(lambda p, g: p - 0.1 * g, own, gradients)
    return own


@pytest.mark.parametrize("size", [4, SIZES])
@pytest.mark.parametrize(("moment", "before"), [("start", (0, 0)), ("step 2", (2, 2)), ("epoch 1", (6, 8))])
def test_a_value_changed_at_any_moment_is_read_by_the_next_step(size: Any, moment: str, before: Any) -> None:
    knob = Knob()
    fleet = fleet_of(reading, loss=None, objective=knob.objective)
    sizes = size if isinstance(size, tuple) else (size, size)
    turn = Turn(moment, lambda run: setattr(knob, "value", 0.25))
    batch = mf.each({str(number): own for number, own in enumerate(sizes)})
    fleet.fit((X, Y), batch_size=batch, epochs=2, shuffle=False, progress=False, callbacks=[turn])
    for number, own in enumerate(sizes):
        plain, done = Knob(), before[1] if own == 3 else before[0]
        expected = stepped(params(number), plain.objective, own, done)
        plain.value = 0.25
        expected = stepped(expected, plain.objective, own, 2 * len(X) // own - done, done)
        close(fleet[str(number)][0], expected)


def test_a_value_changed_between_verbs_is_read_by_evaluate_of_unlike_batches() -> None:
    knob = Knob()
    fleet = fleet_of(reading, loss=None, objective=knob.objective)
    batch = mf.each({"0": 4, "1": 3})
    once = fleet.evaluate((X, Y), batch_size=batch)
    knob.value = 3.0
    twice = fleet.evaluate((X, Y), batch_size=batch)
    for name in ("0", "1"):
        assert twice[name]["loss"] == pytest.approx(3 * once[name]["loss"], rel=1e-5)


@pytest.mark.parametrize("verb", ["validation", "evaluate", "predict"])
@pytest.mark.parametrize("size", [8, 7])
def test_a_member_that_becomes_unlike_the_others_in_a_fit_is_looked_at_as_alone(verb: str, size: int) -> None:
    models, expected = ([Scaled(seed) for seed in range(2)] for _ in range(2))
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=0.0)
    found: list[Any] = []

    def change(run: Any) -> None:
        models[1].scale = 0.5
        if verb == "evaluate":
            found.append({n: own["loss"] for n, own in run.fleet.evaluate((X, Y), batch_size=size).items()})
        elif verb == "predict":
            found.append(run.fleet.predict(X, batch_size=size))

    history = fit(fleet, epochs=2, callbacks=[Turn("epoch 1", change)], validation=(X, Y))
    expected[1].scale = 0.5
    if verb == "validation":
        found.append({name: history[name]["val_loss"][1] for name in ("0", "1")})
    for name, model in zip(("0", "1"), expected, strict=True):
        output = np.asarray(model(jnp.asarray(X)))
        value = output if verb == "predict" else ((output - Y) ** 2).mean()
        np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=1e-6)


def test_rows_that_begin_to_be_mixed_are_not_padded_any_more() -> None:
    knob = Knob()
    knob.value = 0.0

    def mixing(own: Any, x: jax.Array) -> jax.Array:
        output = x @ own["w"]
        return output - output.mean(0) if knob.value else output

    own = {"0": (X, Y), "1": (X[:6], Y[:6])}
    fleet = fleet_of(mixing)
    turn = Turn("epoch 1", lambda run: setattr(knob, "value", 1.0))
    options: Any = {"batch_size": 8, "epochs": 2, "shuffle": False, "progress": False}
    fleet.fit(mf.each(own), callbacks=[turn], **options)
    knob.value = 0.0
    expected = params(1)
    for _ in range(2):
        gradients = jax.grad(lambda p: ((mixing(p, jnp.asarray(X[:6])) - Y[:6]) ** 2).mean())(expected)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, gradients)
        knob.value = 1.0
    close(fleet["1"][0], expected)


class Branching(Counting):
    """Runs as it is, and reads an attribute that its owner changes."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return self.layer(x) * self.scale if x.sum() > 0 else self.layer(x / self.calls)


def test_a_module_that_runs_as_it_is_reads_an_attribute_changed_in_a_callback() -> None:
    models, expected = ([Branching(seed) for seed in range(2)] for _ in range(2))
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=0.1)
    fit(fleet, epochs=3, callbacks=[Turn("epoch 1", lambda run: setattr(models[1], "scale", 0.5))])
    for number, model in enumerate(expected):
        module_plainly(model)
        model.scale = 0.5 if number else 1.0
        module_plainly(model, epochs=2)
        assert (models[number].calls, models[number].scale) == (model.calls, model.scale)
        np.testing.assert_allclose(models[number].layer.kernel[...], model.layer.kernel[...], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("strategy", ["auto", "interleaved"])
def test_an_objective_that_begins_to_count_in_a_fit_is_refused_or_runs_as_it_is(strategy: Strategy) -> None:
    def make() -> Any:
        settings = {"counting": 0, "calls": 0}

        def objective(model: Any, batch: Any) -> jax.Array:
            settings["calls"] += settings["counting"]
            return ((model[1](model[0], batch[0]) - batch[1]) ** 2).mean() / (1 + settings["calls"])

        return settings, objective

    settings, objective = make()
    fleet = fleet_of(reading, 2 if strategy == "auto" else 1, loss=None, objective=objective)
    turn = Turn("epoch 1", lambda run: settings.update(counting=1))
    if strategy == "auto":
        with pytest.raises(mf.StrategyError, match=r"can't stay fused: a call changes what Python holds"):
            fit(fleet, epochs=2, callbacks=[turn])
        return
    fit(fleet, epochs=2, callbacks=[turn], strategy=strategy)
    plain, own = make()
    expected = stepped(params(0), own, BATCH, 3)
    plain["counting"] = 1
    close(fleet["0"][0], stepped(expected, own, BATCH, 3))


class Watching(Scaled):
    """Counts when it is not trained."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.dropout = nnx.Dropout(0.0, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.dropout.deterministic:
            self.calls += 1
        return self.layer(x) * (1 + self.calls)


def test_a_module_that_counts_only_as_it_validates_is_not_traced() -> None:
    models, expected = ([Watching(seed)] for seed in (0, 0))
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=0.0)
    history = fit(fleet, epochs=2, validation=(X, Y))
    expected[0].eval()
    for epoch in range(2):
        losses = [float(((expected[0](x) - y) ** 2).mean()) for x, y in batches()]
        assert history["0"]["val_loss"][epoch] == pytest.approx(np.mean(losses), rel=1e-5)
