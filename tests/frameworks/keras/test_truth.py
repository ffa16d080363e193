"""What a user's model holds is the truth: its optimizer, its rate and how it is compiled, at every verb."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.frameworks.keras import copy_model

OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": False}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pair() -> tuple[mf.Fleet, dict[str, keras.Model]]:
    """A fleet of two models, and copies of them for Keras to train."""
    own = {name: models.mlp(seed=seed) for seed, name in enumerate("ab")}
    for model in own.values():
        model.compile(models.adam(0.1), LOSS)
    return mf.Fleet(own), {name: copy_model(model) for name, model in own.items()}


def agree(fleet: mf.Fleet, expected: dict[str, keras.Model]) -> None:
    for name, model in expected.items():
        models.same(fleet[name], model)


def test_a_fleet_trains_with_the_optimizer_that_the_model_has_now() -> None:
    fleet, expected = pair()
    x, y = models.data(16)
    fleet.predict(x)
    fleet.fit((x, y), progress=False, **OPTIONS)
    for name, model in expected.items():
        models.fit(model, x, y, **OPTIONS)
        for one in (fleet[name], model):
            one.compile(models.adam(1e-3), LOSS)  # with fresh moments and another rate
    fleet.predict(x)
    fleet.fit((x, y), progress=False, **OPTIONS)
    for model in expected.values():
        models.fit(model, x, y, **OPTIONS)
    agree(fleet, expected)
    # One trains a model by itself and changes another's rate, and then lanes are regrouped for a third.
    fleet["a"].fit(x, y, verbose=0, **OPTIONS)
    models.fit(expected["a"], x, y, **OPTIONS)
    third = models.mlp(seed=3)
    third.compile(models.adam(0.01), LOSS)
    expected["c"] = copy_model(third)
    fleet.add("c", third)
    for one in (fleet["b"], expected["b"]):
        one.optimizer.learning_rate = 0.03
    fleet.fit((x, y), progress=False, **OPTIONS)
    for model in expected.values():
        models.fit(model, x, y, **OPTIONS)
    agree(fleet, expected)
    assert float(fleet["b"].optimizer.learning_rate) == float(expected["b"].optimizer.learning_rate)


def test_a_trunk_is_thawed_after_the_head_was_trained() -> None:
    fleet, expected = pair()
    x, y = models.data(16)
    for one in (*(fleet[name] for name in fleet.names), *expected.values()):
        one.layers[0].trainable = False
        one.compile(models.adam(0.05), LOSS)
    fleet.fit((x, y), epochs=2, progress=False, **OPTIONS)
    for name, model in expected.items():
        models.fit(model, x, y, epochs=2, **OPTIONS)
        for one in (fleet[name], model):
            one.layers[0].trainable = True
            one.compile(models.adam(0.002), LOSS)
    fleet.fit((x, y), progress=False, **OPTIONS)
    for model in expected.values():
        models.fit(model, x, y, **OPTIONS)
    agree(fleet, expected)


def test_compiling_a_member_anew_is_noticed() -> None:
    fleet, expected = pair()
    x, y = models.data(16)
    fleet.fit((x, y), progress=False, **OPTIONS)
    models.fit(expected["a"], x, y, **OPTIONS)
    models.fit(expected["b"], x, y, **OPTIONS)
    hot = keras.ops.convert_to_numpy(keras.ops.one_hot(y, 3))
    changes: list[dict[str, Any]] = [
        {"loss": "mse"},  # another loss
        {"loss": "mse", "metrics": ["mae"]},  # other metrics
        {"loss": "mae", "metrics": ["mse", "mae"]},
    ]
    for change in changes:
        for name in "ab":
            for one in (fleet[name], expected[name]):
                one.compile(models.adam(0.01), **change)
        history = fleet.fit((x, hot), progress=False, **OPTIONS)
        for name, model in expected.items():
            told = models.fit(model, x, hot, **OPTIONS)
            assert history[name].keys() == told.keys()
            for metric, series in told.items():
                np.testing.assert_allclose(history[name][metric], series, rtol=1e-4, err_msg=metric)
    agree(fleet, expected)
    # Another optimizer, of one of them only; and the first compiled anew as it was.
    for one in (fleet["a"], expected["a"]):
        one.compile(models.adam(0.01), "mae", metrics=["mse", "mae"])
    for one in (fleet["b"], expected["b"]):
        one.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mae", metrics=["mse", "mae"])
    found = fleet.evaluate((x, hot), batch_size=8)
    history = fleet.fit((x, hot), progress=False, **OPTIONS)
    for name, model in expected.items():
        told = model.evaluate(x, hot, batch_size=8, verbose=0, return_dict=True)
        for metric, value in told.items():
            np.testing.assert_allclose(found[name][metric], value, rtol=1e-4, err_msg=metric)
        told = models.fit(model, x, hot, **OPTIONS)
        np.testing.assert_allclose(history[name]["loss"], told["loss"], rtol=1e-4)
    agree(fleet, expected)


@pytest.mark.parametrize("plain", [False, True])
def test_an_optimizer_is_built_by_what_would_build_it_alone(plain: bool) -> None:
    x, y = models.data()
    own, alone = {name: mlp(name, plain) for name in "abc"}, mlp("a", plain)
    fleet = mf.Fleet(own)
    fleet.plan((x, y), batch_size=8)
    fleet.predict(x, batch_size=8)
    fleet.clone("a", as_="d")
    assert not any(model.optimizer.built for model in [*own.values(), fleet["d"]])
    assert fleet["d"].optimizer.learning_rate == own["a"].optimizer.learning_rate
    own["a"].layers[0].trainable = alone.layers[0].trainable = False  # JAX minds if there are slots for it
    fleet.evaluate((x, y), batch_size=8)
    alone.evaluate(x, y, batch_size=8, verbose=0)
    assert {model.optimizer.built for model in own.values()} == {alone.optimizer.built}
    own["a"].optimizer.learning_rate = alone.optimizer.learning_rate = 0.02
    history = fleet.fit((x, y), epochs=2, batch_size=8, shuffle=False, progress=False)
    expected = models.fit(alone, x, y, epochs=2, batch_size=8, shuffle=False)
    np.testing.assert_allclose(history["a"]["loss"], expected["loss"], rtol=1e-4)
    models.same(own["a"], alone)


def mlp(name: str, plain: bool) -> keras.Model:
    model = models.mlp()
    rate = {"a": 0.01, "b": 0.02, "c": 0.03}[name]
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=plain,
    )
    return model
