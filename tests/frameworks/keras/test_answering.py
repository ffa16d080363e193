"""evaluate and predict of Keras models, of some members and by every strategy: the numbers of `predict` alone."""

import keras
import numpy as np
import pytest

import modelfleet as mf
from modelfleet.types import Strategy

layers = keras.layers
X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 40)


def model(width: int) -> keras.Model:
    inner = [layers.Dense(width, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.5)]
    made = keras.Sequential([keras.Input((4,)), *inner, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile("sgd", loss, metrics=["accuracy"])
    return made


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "threads", "processes"])
def test_every_strategy_gives_the_numbers_of_predict_alone(strategy: Strategy) -> None:
    keras.utils.set_random_seed(0)
    models = {"a": model(6), "b": model(6), "wide": model(9)}
    fleet = mf.Fleet(models)
    for members in (None, ["wide", "a"]):
        names = list(models) if members is None else members
        outputs = fleet.predict(X, strategy=strategy, members=members)
        values = fleet.evaluate((X, Y), strategy=strategy, members=members)
        assert list(outputs) == list(values) == names
        for name in names:
            np.testing.assert_allclose(outputs[name], models[name].predict(X, verbose=0), rtol=1e-4, atol=1e-5)
            expected = models[name].evaluate(X, Y, verbose=0, return_dict=True)
            assert values[name] == pytest.approx(expected, rel=1e-4)
