"""The Keras models of the contests and their data. Imported only where Keras is."""

import keras
import numpy as np
from keras import layers

Data = tuple[np.ndarray, np.ndarray]

BATCH = 32
STEPS = 64  # of an epoch


def three() -> dict[str, tuple[keras.Model, Data, int]]:
    """Three unlike models, compiled, each with its own data and number of epochs."""
    random = np.random.default_rng(0)
    rows = BATCH * STEPS

    def labels(classes: int) -> np.ndarray:
        return random.integers(0, classes, rows)

    dense = keras.Sequential(
        [
            layers.Input((32,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    dense.compile(keras.optimizers.Adam(1e-3), classes, metrics=["accuracy"])
    convolutional = keras.Sequential(
        [
            layers.Input((16, 4)),
            layers.Conv1D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(5),
        ]
    )
    convolutional.compile(keras.optimizers.SGD(0.01, momentum=0.9), classes)
    inputs = layers.Input((12,))
    hidden = layers.Dense(48, activation="tanh")(inputs)
    hidden = layers.Dropout(0.1)(hidden)
    regression = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([inputs, hidden])))
    regression.compile(keras.optimizers.RMSprop(1e-3), "mse", metrics=["mae"])

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal((rows, *shape), dtype=np.float32)

    return {
        "dense": (dense, (floats(32), labels(10)), 12),
        "convolutional": (convolutional, (floats(16, 4), labels(5)), 9),
        "regression": (regression, (floats(12), floats(1)), 15),
    }


def mlp(rate: float = 1e-3) -> keras.Model:
    """One of the equal MLPs, compiled with a learning rate of its own."""
    model = keras.Sequential(
        [
            layers.Input((32,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def equal_data() -> Data:
    """The data that the equal MLPs share."""
    random = np.random.default_rng(0)
    rows = BATCH * STEPS
    return random.standard_normal((rows, 32), dtype=np.float32), random.integers(0, 10, rows)


def rates(members: int) -> list[float]:
    """A learning rate for each."""
    return np.logspace(-4, -2, members).tolist()
