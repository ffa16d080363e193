"""Small Keras models and data for these tests."""

from functools import cache
from typing import Any

import keras
import numpy as np

import modelfleet as mf
from modelfleet.frameworks.keras import copy_model

layers = keras.layers


def mlp(
    *,
    units: int = 6,
    rate: float = 0.0,
    norm: bool = False,
    seed: int = 0,
    activation: Any = "tanh",
    outputs: int = 3,
) -> keras.Model:
    first, second = (keras.initializers.GlorotUniform(seed=2 * seed + number) for number in (1, 2))
    parts = [
        keras.Input((4,)),
        layers.Dense(units, activation=activation, kernel_initializer=first),
        *([layers.BatchNormalization()] if norm else []),
        *([layers.Dropout(rate, seed=seed + 1)] if rate else []),
        layers.Dense(outputs, kernel_initializer=second),
    ]
    return keras.Sequential(parts)


class Gained(keras.Model):
    """A model of one's own, with a plain attribute that decides what it computes."""

    def __init__(self, units: int = 5, gain: float = 1.0) -> None:
        super().__init__()
        self.hidden = layers.Dense(units, activation="relu")
        self.top = layers.Dense(3)
        self.gain = gain

    def call(self, x: Any) -> Any:
        return self.top(self.hidden(x)) * self.gain


def gained(**options: Any) -> Gained:
    model = Gained(**options)
    model(np.zeros((2, 4), dtype=np.float32))
    return model


@cache
def _fleet() -> tuple[mf.Fleet, dict[str, keras.Model], dict[str, list[np.ndarray]]]:
    own = {name: mlp(seed=seed) for seed, name in enumerate("ab")}
    for model in own.values():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(adam(0.0), loss, metrics=["accuracy"])
    copies = {name: copy_model(model) for name, model in own.items()}
    return mf.Fleet(own), copies, {name: model.get_weights() for name, model in own.items()}


def fresh(**rates: float) -> tuple[mf.Fleet, dict[str, keras.Model]]:
    """A fleet of two untrained models with these learning rates, and copies of the models.

    They are the same objects for every test, so that their steps are traced once. Who shuffles needs a fleet
    of their own: the epochs of this one go on.
    """
    fleet, copies, first = _fleet()
    for name, rate in rates.items():
        for model in (fleet[name], copies[name]):
            model.set_weights(first[name])
            for variable in model.optimizer.variables:
                variable.assign(keras.ops.zeros_like(variable.value))
            model.optimizer.learning_rate = rate
    return fleet, copies


def adam(rate: float) -> keras.optimizers.Adam:
    """Not with Adam's own epsilon: it would make much of gradients that are nothing but rounding."""
    return keras.optimizers.Adam(rate, epsilon=1e-3)


def two_outputs(name: str = "left") -> keras.Model:
    x = keras.Input((4,))
    hidden = layers.Dense(5, activation="tanh")(x)
    return keras.Model(x, [layers.Dense(1, name=name)(hidden), layers.Dense(3, name="right")(hidden)])


def data(rows: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)).astype(np.float32), rng.integers(0, 3, rows).astype(np.int32)


def numbers(model: keras.Model, *, optimizer: bool = True) -> list[np.ndarray]:
    """All that a model and its optimizer hold."""
    own = [*model.variables, *(model.optimizer.variables if optimizer else [])]
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in own]


def fit(model: keras.Model, *data: Any, **options: Any) -> dict[str, list[float]]:
    """The history of the model's own `fit`, untraced: Keras takes longer to trace than for these few steps."""
    model.run_eagerly = True
    return model.fit(*data, verbose=0, **options).history


def same(model: keras.Model, other: keras.Model, *, tolerance: float = 3e-5) -> None:
    pairs = list(zip(numbers(model), numbers(other), strict=True))
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
