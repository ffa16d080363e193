"""Small Keras models and data for these tests."""

from typing import Any

import keras
import numpy as np

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


def same(model: keras.Model, other: keras.Model, *, tolerance: float = 3e-5) -> None:
    pairs = list(zip(numbers(model), numbers(other), strict=True))
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
