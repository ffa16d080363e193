"""Keras models in a fleet: what comes out is what each model's own `fit` gives."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.frameworks.keras import copy_model
from modelfleet.types import Strategy

BACKEND = keras.backend.backend()
RATES = {"a": 0.001, "b": 0.03}
# On torch, dropout is drawn from modelfleet's streams, and so differs from that of Keras's `fit`.
RATE = 0.0 if BACKEND == "torch" else 0.3


def compiled(make: Callable[..., keras.Model], **options: Any) -> dict[str, keras.Model]:
    found = {}
    for seed, (name, rate) in enumerate(RATES.items()):
        found[name] = make(seed=seed)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found[name].compile(models.adam(rate), **{"loss": loss, "metrics": ["accuracy"], **options})
    return found


def copies(own: dict[str, keras.Model]) -> dict[str, keras.Model]:
    return {name: copy_model(model) for name, model in own.items()}


def normed(seed: int) -> keras.Model:
    return models.mlp(seed=seed, rate=RATE, norm=True)


# The last batches are short, and the numbers not of the models' type.
X, Y = models.data(22)[0].astype(np.float64), models.data(22)[1]
VALIDATION = models.data(13, seed=5)
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False}


@cache
def fitted() -> tuple[dict[str, keras.Model], dict[str, dict[str, list[float]]]]:
    """What Keras's own `fit`, traced, makes of models, and what it tells."""
    own = compiled(normed)
    more = {"validation_data": VALIDATION, "validation_batch_size": 8, "verbose": 0}
    return own, {name: model.fit(X, Y, **more, **OPTIONS).history for name, model in own.items()}


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_a_fleet_fits_as_keras_does(strategy: Strategy) -> None:
    own = compiled(normed)
    expected, told = fitted()
    fleet = mf.Fleet(own)
    history = fleet.fit((X, Y), validation=VALIDATION, strategy=strategy, progress=False, **OPTIONS)
    for name, model in expected.items():
        assert history[name].keys() == told[name].keys()
        for metric, series in told[name].items():
            np.testing.assert_allclose(history[name][metric], series, rtol=0, atol=2e-6, err_msg=metric)
        assert fleet[name] is own[name]  # plain in, plain out
        models.same(fleet[name], model, tolerance=2e-6)
    last = {metric: told["b"][f"val_{metric}"][-1] for metric in ("loss", "accuracy")}
    assert fleet.evaluate(VALIDATION, batch_size=8)["b"] == pytest.approx(last, rel=1e-4)
    np.testing.assert_allclose(fleet.predict(X)["a"], expected["a"].predict(X, verbose=0), rtol=1e-4, atol=1e-5)


def test_a_second_fit_goes_on_as_keras_does_even_after_a_fit_of_the_model() -> None:
    fleet, expected = models.fresh(**RATES)
    x, y = models.data(16)
    options = {"batch_size": 8, "shuffle": False}
    fleet.fit((x, y), progress=False, **options)
    fleet["a"].optimizer.learning_rate = 0.5
    fleet["b"].fit(x, y, verbose=0, **options)
    fleet.fit((x, y), progress=False, **options)
    models.fit(expected["a"], x, y, **options)
    expected["a"].optimizer.learning_rate = 0.5
    models.fit(expected["a"], x, y, **options)
    models.fit(expected["b"], x, y, epochs=3, **options)
    for name, model in expected.items():
        models.same(fleet[name], model)


def test_own_data_of_unlike_lengths() -> None:
    fleet, expected = models.fresh(**RATES)
    data = {"a": models.data(16, 1), "b": models.data(5, 2)}
    history = fleet.fit(mf.each(data), epochs=2, batch_size=8, shuffle=False, progress=False)
    for name, model in expected.items():
        told = models.fit(model, *data[name], epochs=2, batch_size=8, shuffle=False)
        np.testing.assert_allclose(history[name]["loss"], told["loss"], rtol=1e-4)
        models.same(fleet[name], model)


def test_several_outputs_loss_weights_and_sample_weights() -> None:
    def make(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        return models.two_outputs()

    options = {
        "loss": {"left": "mse", "right": "mse"},
        "loss_weights": {"left": 0.5, "right": 2.0},
        "metrics": None,
    }
    own = compiled(make, **options)
    expected, fleet = copies(own), mf.Fleet(own)
    x, _ = models.data(16)
    y = [x[:, :1], x[:, :3]]
    weight = np.linspace(0.5, 2, 16).astype(np.float32)
    history = fleet.fit((x, y, weight), epochs=2, batch_size=8, shuffle=False, progress=False)
    for name, model in expected.items():
        told = models.fit(model, x, y, sample_weight=weight, epochs=2, batch_size=8, shuffle=False)
        assert history[name].keys() == told.keys()
        for metric, series in told.items():
            np.testing.assert_allclose(history[name][metric], series, rtol=1e-4, err_msg=metric)
        models.same(fleet[name], model)


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_sample_weights_of_each_member(strategy: Strategy) -> None:
    fleet, expected = models.fresh(**RATES)
    x, y = models.data(13)
    weights = {"a": np.linspace(0, 2, 13), "b": np.linspace(3, 1, 13)}
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False}
    history = fleet.fit((x, y), sample_weight=mf.each(weights), strategy=strategy, progress=False, **options)
    for name, model in expected.items():
        told = models.fit(model, x, y, sample_weight=weights[name], **options)
        np.testing.assert_allclose(history[name]["loss"], told["loss"], rtol=1e-4)
        models.same(fleet[name], model)


def test_a_metric_that_raises_is_named_before_the_first_step() -> None:
    def mine(y_true: Any, y_pred: Any) -> Any:
        raise ValueError("no such thing")

    own = compiled(lambda seed: models.mlp(seed=seed), metrics=["accuracy", mine])
    before = [np.array(array) for array in own["a"].get_weights()]
    with pytest.raises(InputError, match=r"the metric 'mine' raised ValueError: no such thing at test_fit\.py"):
        mf.Fleet(own).fit(models.data(8), progress=False)
    assert all(map(np.array_equal, before, own["a"].get_weights()))


def test_class_weights() -> None:
    fleet, expected = models.fresh(**RATES)
    x, y = models.data(16)
    weights = {0: 3.0, 2: 0.5}
    fleet.fit((x, y), class_weight=weights, epochs=2, batch_size=8, shuffle=False, progress=False)
    for name, model in expected.items():
        models.fit(model, x, y, class_weight=weights, epochs=2, batch_size=8, shuffle=False)
        models.same(fleet[name], model)


def test_models_of_ones_own_with_a_loss_of_their_own() -> None:
    class Own(models.Gained):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
        ) -> Any:
            return keras.ops.mean(keras.ops.square(y_pred - x[:, :3]))

    def make(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        model = Own()
        model(np.zeros((2, 4), dtype=np.float32))
        return model

    own = compiled(make, loss=None, metrics=None)
    twins = compiled(make, loss=None, metrics=None)
    fleet = mf.Fleet(own)
    x, y = models.data(16)
    fleet.fit((x, y), batch_size=8, shuffle=False, progress=False)
    for name, model in twins.items():
        models.fit(model, x, y, batch_size=8, shuffle=False)
        models.same(fleet[name], model)


def test_members_of_one_seed_begin_alike_and_leave_generators_alone() -> None:
    import random

    np.random.seed(7)
    random.seed(7)
    expected = (np.random.random(), random.random())
    np.random.seed(7)
    random.seed(7)
    first = mf.Fleet.build(_plain, 2, seed=3)
    assert (np.random.random(), random.random()) == expected
    second = mf.Fleet.build(_plain, 3, seed=3)
    for name in first.names:
        for a, b in zip(
            models.numbers(first[name], optimizer=False),
            models.numbers(second[name], optimizer=False),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first["0"].get_weights()[0], first["1"].get_weights()[0])


def _plain() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dropout(0.1)])


def test_save_and_load(tmp_path: Any) -> None:
    fleet = mf.Fleet.build(_plain, 2, seed=3)
    fleet.save(tmp_path / "fleet")
    loaded = mf.load(tmp_path / "fleet", factory=_plain)
    for name in fleet.names:
        for a, b in zip(fleet[name].get_weights(), loaded[name].get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_bad_numbers_set_a_member_aside_and_the_rest_go_on() -> None:
    fleet, expected = models.fresh(**RATES)
    x, y = models.data(16)
    poisoned = x.copy()
    poisoned[9] = np.nan
    data = {"a": (x, y), "b": (poisoned, y)}
    history = fleet.fit(mf.each(data), epochs=2, batch_size=8, shuffle=False, progress=False)
    assert set(history.failed) == {"b"}
    models.fit(expected["a"], x, y, epochs=2, batch_size=8, shuffle=False)
    models.fit(expected["b"], x[:8], y[:8], batch_size=8, shuffle=False)
    for name, model in expected.items():  # their optimizers, too
        models.same(fleet[name], model, tolerance=2e-6)


def test_unbuilt_and_uncompiled_models_are_refused() -> None:
    with pytest.raises(InputError, match="member '0' has no weights yet"):
        mf.Fleet([keras.Sequential([keras.layers.Dense(3)])])
    fleet = mf.Fleet([models.mlp()])
    x, y = models.data(8)
    with pytest.raises(InputError, match="member '0' is not compiled"):
        fleet.fit((x, y), progress=False)
    assert fleet.predict(x)["0"].shape == (8, 3)


def test_labels_without_an_output_are_refused() -> None:
    fleet, _ = models.fresh(**RATES)
    x, y = models.data(8)
    with pytest.raises(InputError, match=r"is 7, but the model has 3 outputs"):
        fleet.fit((x, np.where(np.arange(8) == 3, 7, y)), progress=False)


def test_data_that_do_not_fit_are_refused_by_name() -> None:
    fleet, _ = models.fresh(**RATES)
    _, y = models.data(8)
    with pytest.raises(InputError, match=r"member 'a' can't take this batch"):
        fleet.fit((np.zeros((8, 5), dtype=np.float32), y), progress=False)


def test_a_saved_model_goes_on_alone(tmp_path: Any) -> None:
    fleet, expected = models.fresh(**RATES)
    x, y = models.data(16)
    options = {"batch_size": 8, "shuffle": False}
    fleet.fit((x, y), progress=False, **options)
    fleet["b"].save(tmp_path / "b.keras")
    alone = keras.models.load_model(tmp_path / "b.keras")
    models.fit(alone, x, y, **options)
    models.fit(expected["b"], x, y, epochs=2, **options)
    models.same(alone, expected["b"])


def test_map_gives_what_the_model_predicts() -> None:
    layers = [keras.layers.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    users = {str(n): np.random.default_rng(n).normal(size=(3 + 5 * n, 4)).astype("float32") for n in range(3)}
    weighted = [(users["2"][start : start + 5], np.zeros(5), np.ones(5)) for start in range(0, 10, 5)]
    answers = mf.map(model, {**users, "weighted": weighted}, devices="cpu", batch_size=8)
    users["weighted"] = users["2"][:10]
    for user, rows in users.items():
        np.testing.assert_allclose(answers[user], model.predict(rows, verbose=0), rtol=1e-4, atol=1e-5)


def test_an_adapted_layer_is_kept(tmp_path: Path) -> None:
    def make() -> keras.Model:
        parts = [keras.Input((4,)), keras.layers.Normalization(), keras.layers.Dense(2, kernel_initializer="ones")]
        return keras.Sequential(parts)

    fleet = mf.Fleet.build(make, 2)
    x, _ = models.data(16)
    for name in fleet.names:
        fleet[name].layers[0].adapt(100 * x + float(name))
    fleet.save(tmp_path / "kept")
    found = mf.load(tmp_path / "kept", make).predict(x)
    for name, expected in fleet.predict(x).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)
        np.testing.assert_allclose(found[name], fleet[name].predict(x, verbose=0), rtol=1e-5)


def test_measuring_copies_no_model_and_changes_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path))
    monkeypatch.setattr("modelfleet.planning.measurements.SHORT_RUN", 1)
    monkeypatch.setattr("modelfleet.frameworks.keras.copy_model", None)
    own = {"a": models.mlp(seed=0), "b": models.mlp(seed=1, norm=True)}
    for model in own.values():
        model.compile(models.adam(0.01), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = {name: models.numbers(model) for name, model in own.items()}
    plan = mf.Fleet(own).plan((X, Y), epochs=2, batch_size=8)
    assert all(lane.predicted_seconds_per_step for lane in plan.lanes)
    for name, model in own.items():
        for now, then in zip(models.numbers(model), before[name], strict=True):
            np.testing.assert_array_equal(now, then)
