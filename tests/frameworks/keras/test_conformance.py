"""The shared suite of what every adapter must hold, for Keras on the backend of this process."""

from typing import Any

import keras
import numpy as np
import pytest

import modelfleet as mf
from modelfleet import testing
from modelfleet.testing import conformance
from modelfleet.testing import keras as plain


def make(kind: str, seed: int) -> keras.Model:
    layers = keras.layers
    extra = {
        "dropout": [lambda: layers.Dropout(0.3, seed=seed)],
        "batchnorm": [layers.BatchNormalization],
        "unlike": [lambda: _dense(6, seed + 2, "relu")],
    }
    return keras.Sequential(
        [
            keras.Input((4,)),
            _dense(6, seed, "tanh"),
            *(layer() for layer in extra.get(kind, [])),
            _dense(3, seed + 1),
        ]
    )


def _dense(units: int, seed: int, activation: str | None = None) -> keras.Layer:
    # Without biases: half the variables take TensorFlow half the time to trace, and the other tests have biases.
    first = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(units, activation=activation, use_bias=False, kernel_initializer=first)


def compile(fleet: mf.Fleet, lr: Any) -> None:
    fleet.compile("adam", "cross_entropy", lr=lr)


def alone(model: keras.Model, name: str, data: Any, **options: Any) -> keras.Model:
    return testing.alone(model, name, data, optimizer="adam", loss="cross_entropy", **options)


def weights(model: keras.Model) -> dict[str, Any]:
    return {name: np.array(value) for name, value in plain.weights(model).items()}  # copied: see `Case.weights`


def outputs(model: keras.Model, x: Any) -> Any:
    return keras.ops.convert_to_numpy(model(x, training=False))


case = conformance.Case(make=make, compile=compile, alone=alone, weights=weights, outputs=outputs, tolerance=3e-5)


@pytest.mark.parametrize("check", conformance.CHECKS)
def test_keras(check: conformance.Check) -> None:
    check(case)
