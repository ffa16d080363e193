"""Members whose steps are not functions of their variables: they run as their own `fit` would run them."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.errors import FleetError, StrategyError
from modelfleet.frameworks.keras import copy_model
from modelfleet.frameworks.keras.plain import PlainEngine

layers = keras.layers
BACKEND = keras.backend.backend()
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@keras.saving.register_keras_serializable()
class Sampling(layers.Layer):
    """Adds noise whenever it is called, as the layer of a variational autoencoder does, and counts its calls."""

    def __init__(self, seed: int = 0, noise: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(seed)
        self.seed, self.noise = seed, noise
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x + self.noise * keras.random.normal(keras.ops.shape(x), seed=self.seeds)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "seed": self.seed, "noise": self.noise}


@keras.saving.register_keras_serializable()
class Doubled(keras.Sequential):
    """Takes every step twice."""

    def train_step(self, *args: Any) -> Any:
        if BACKEND == "jax":
            _, state = super().train_step(*args)
            return super().train_step(state, args[1])
        super().train_step(*args)
        return super().train_step(*args)


@keras.saving.register_keras_serializable()
class Telling(keras.Sequential):
    """Tells of more than its metrics."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "largest": keras.ops.max(y_pred)}


def dense(units: int, seed: int, **options: Any) -> keras.layers.Layer:
    return layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed), **options)


def parts(seed: int, *between: Any) -> list[Any]:
    return [keras.Input((4,)), dense(5, seed + 10, activation="tanh"), *between, dense(3, seed + 20)]


def sampler(seed: int = 0, noise: float = 1.0) -> keras.Model:
    return compiled(keras.Sequential(parts(seed, Sampling(seed, noise))))


def compiled(model: keras.Model, optimizer: Any = None, **options: Any) -> keras.Model:
    model.compile(optimizer or models.adam(0.01), LOSS, metrics=["accuracy"], **options)
    return model


def recurrent() -> keras.Model:
    cells = layers.LSTM(3, stateful=True, kernel_initializer=keras.initializers.GlorotUniform(seed=3))
    return keras.Sequential([keras.Input(batch_shape=(8, 4)), layers.Reshape((4, 1)), cells, dense(3, 4)])


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for metric, value in expected.items():
        np.testing.assert_allclose(found[metric], value, rtol=2e-4, atol=1e-5, err_msg=metric)


def test_what_is_no_function_of_its_variables_is_as_in_its_own_fit() -> None:
    averaged = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    own = {
        "doubled": compiled(Doubled(parts(1))),
        "telling": compiled(Telling(parts(2))),
        "averaged": compiled(keras.Sequential(parts(3)), averaged),
        "eager": compiled(keras.Sequential(parts(4)), run_eagerly=True),
        "stateful": compiled(recurrent()),
        "spectral": compiled(
            keras.Sequential([keras.Input((4,)), layers.SpectralNormalization(dense(4, 5)), dense(3, 6)])
        ),
    }
    if BACKEND == "torch":
        del own["stateful"]  # Keras's own fit raises there (3.15)
    else:
        own["sampler"] = sampler()  # on torch, a member draws from its own stream
    expected = {name: copy_model(model) for name, model in own.items()}
    fleet = mf.Fleet(own)
    x, y = models.data(16)
    validation = models.data(16, seed=5)
    history = fleet.fit((x, y), validation=validation, progress=False, **OPTIONS)
    reasons = {lane.members[0]: lane.reason for lane in fleet.plan((x, y), batch_size=8).lanes}
    plain = own.keys() - {"sampler", "spectral"}
    assert all(isinstance(engine(fleet, name), PlainEngine) for name in plain)
    assert isinstance(engine(fleet, "spectral"), PlainEngine) == (BACKEND != "jax")  # where Keras assigns weights
    assert "Doubled overrides train_step" in reasons["doubled"]
    assert "compute_metrics" in reasons["telling"]
    assert "run_eagerly" in reasons["eager"]
    outputs, told = fleet.predict(x, batch_size=8), fleet.evaluate((x, y), batch_size=8)
    for name, model in expected.items():
        model.run_eagerly = name == "eager"
        logs = model.fit(x, y, validation_data=validation, validation_batch_size=8, verbose=0, **OPTIONS).history
        close(history[name], logs)
        np.testing.assert_allclose(outputs[name], model.predict(x, batch_size=8, verbose=0), rtol=2e-4, atol=1e-5)
        close(told[name], model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True))
        own = name != "averaged"  # on JAX (Keras 3.15), evaluate deletes the optimizer's averages
        for a, b in zip(
            models.numbers(fleet[name], optimizer=own), models.numbers(model, optimizer=own), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)


def engine(fleet: mf.Fleet, name: str) -> Any:
    return next(lane.engine for lane in fleet._lanes or () if name in lane.names)


def test_noise_is_drawn_anew_for_every_batch() -> None:
    fleet = mf.Fleet({"a": sampler(0), "b": sampler(1)})
    expected = {name: copy_model(fleet[name]) for name in "ab"}
    same = np.tile(models.data(1)[0], (16, 1))
    found = fleet.predict(same, batch_size=4)
    for name in "ab":
        assert len(np.unique(found[name].round(5), axis=0)) == 16
    if BACKEND != "torch":
        assert engine(fleet, "a") is engine(fleet, "b")  # fused
        for name, model in expected.items():
            np.testing.assert_allclose(found[name], model.predict(same, batch_size=4, verbose=0), atol=1e-5)
        own = {"a": models.data(10), "b": models.data(7, seed=3)}
        options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False}
        history = fleet.fit(mf.each(own), validation=mf.each(own), strategy="fused", progress=False, **options)
        told = fleet.evaluate(mf.each(own), batch_size=4)
        for name, model in expected.items():
            logs = model.fit(*own[name], validation_data=own[name], verbose=0, **options).history
            close(history[name], logs)
            close(told[name], model.evaluate(*own[name], batch_size=4, verbose=0, return_dict=True))
            models.same(fleet[name], model)
    else:  # because of the counter
        with pytest.raises(StrategyError, match=r"evaluate and predict change its 'sampling"):
            fleet.fit(models.data(8), batch_size=8, strategy="fused", progress=False)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="JAX refuses it in Keras's own fit; torch draws from streams")
def test_noise_without_a_seed_goes_on() -> None:
    class Noisy(layers.Layer):
        def call(self, x: Any) -> Any:
            return x + keras.random.normal(keras.ops.shape(x))

    own = {name: compiled(keras.Sequential(parts(0, Noisy()))) for name in "ab"}
    for model in own.values():
        model.optimizer.learning_rate = 0.0
    same = np.tile(models.data(1)[0], (8, 1))
    fleet = mf.Fleet(own)
    history = fleet.fit((same, np.zeros(8, np.int32)), epochs=3, batch_size=8, progress=False)
    assert len(set(history["a"]["loss"] + history["b"]["loss"])) == 6
    plan = fleet.plan((same, np.zeros(8, np.int32)), batch_size=8)
    assert all("which is not part of the model" in (lane.reason or "") for lane in plan.lanes)


def test_a_step_that_is_not_finite_is_undone() -> None:
    fleet = mf.Fleet({"bad": compiled(Doubled(parts(1))), "good": compiled(Doubled(parts(1)))})
    x, y = models.data(16)
    wrong = x.copy()
    wrong[8:] = np.nan
    history = fleet.fit(
        mf.each({"bad": (wrong, y), "good": (x, y)}), epochs=2, batch_size=8, shuffle=False, progress=False
    )
    assert history.failed.keys() == {"bad"}
    assert all(np.isfinite(array).all() for array in fleet["bad"].get_weights())
    assert len(history["good"]["loss"]) == 2
    with pytest.raises(FleetError, match=r"'bad' can't take this batch: \(8, 7\)"):
        fleet.fit((np.ones((8, 7), np.float32), y[:8]), batch_size=8, progress=False)


def test_accumulated_gradients_with_averaged_weights_are_as_in_keras() -> None:
    def make() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=3, use_ema=True), "mse")
        return model

    x = np.random.default_rng(0).standard_normal((12, 3)).astype("float32")
    expected, model = make(), make()
    expected.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
    mf.Fleet([model]).fit((x, x[:, :1]), batch_size=4, shuffle=False, progress=False)
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def averaged(kind: str) -> keras.Model:
    """A model whose optimizer averages the weights: by itself, within another one, or for one layer."""
    model = keras.Sequential(parts(3))
    optimizer: Any = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    if kind == "scaled":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    elif kind == "by layer":
        chosen = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.SGD(0.5))
        chosen[f"^{model.layers[0].name}/"] = optimizer
        optimizer = keras.optimizers.MultiOptimizer(chosen)
    return compiled(model, optimizer)


@pytest.mark.parametrize("patience", [1, 9, None])
@pytest.mark.parametrize("kind", ["itself", "scaled", "by layer"])
def test_best_weights_are_put_back_after_the_average_as_in_keras(kind: str, patience: int | None) -> None:
    model, expected = averaged(kind), averaged(kind)
    x, y = models.data(16)
    validation = models.data(16, seed=5)
    options: Any = {"epochs": 6, "batch_size": 8, "shuffle": False}

    def stop() -> list[Any]:
        restore = patience is not None
        return [keras.callbacks.EarlyStopping("val_loss", patience=patience or 9, restore_best_weights=restore)]

    history = expected.fit(x, y, validation_data=validation, callbacks=stop(), verbose=0, **options).history
    assert np.argmin(history["val_loss"]) < len(history["val_loss"]) - 1  # the best weights are not the last
    found = mf.Fleet({"a": model}).fit((x, y), validation=validation, callbacks=stop(), progress=False, **options)
    close(found["a"], history)
    models.same(model, expected, tolerance=1e-4)


@pytest.mark.parametrize("patience", [1, 9])
def test_best_weights_of_a_resumed_run_are_not_averaged(patience: int, tmp_path: Path) -> None:
    x, y = models.data(16)
    validation = models.data(16, seed=5)

    class Weights(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            weights.append(run.sync("a").get_weights())

    weights: list[list[np.ndarray]] = []
    for _ in range(2):  # the second time, nothing is left to train
        model = averaged("itself")
        given = [Weights(), mf.EarlyStopping(patience=patience, restore_best=True), mf.Checkpoint(tmp_path)]
        history = mf.Fleet({"a": model}).fit(
            (x, y), validation=validation, callbacks=given, epochs=6, batch_size=8, shuffle=False, progress=False
        )
        assert history.kept["a"] < len(history["a"]["loss"]) == len(weights)
        for found, best in zip(model.get_weights(), weights[history.kept["a"] - 1], strict=True):
            np.testing.assert_array_equal(found, best)


@pytest.mark.skipif(keras.config.backend() == "jax", reason="Keras's own step on JAX loses metrics' masks")
def test_a_weighted_metric_of_masked_rows_is_as_in_keras() -> None:
    def make() -> Any:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.Dense(5)]
        model = keras.Sequential([keras.layers.Input((7,), dtype="int32"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05), loss, weighted_metrics=["sparse_categorical_crossentropy"])
        return model

    random = np.random.default_rng(0)
    x, y, weights = random.integers(0, 5, (8, 7)), random.integers(0, 5, (8, 7)), random.random((8, 7))
    weights = weights.astype("float32")
    expected, model = make(), make()
    log = expected.fit(x, y, sample_weight=weights, batch_size=4, shuffle=False, verbose=0).history
    history = mf.Fleet([model]).fit((x, y, weights), batch_size=4, shuffle=False, progress=False)
    for name, values in log.items():
        np.testing.assert_allclose(history["0"][name], values, rtol=1e-5)
