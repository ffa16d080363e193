"""Ensembles of Keras models, alone and with a torch model."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models
from torch import nn

import modelfleet as mf

X, Y = models.data(40)


def net(width: int) -> keras.Model:
    keras.utils.set_random_seed(width)
    scores = int(Y.max()) + 1
    layers = [keras.layers.Input(X.shape[1:]), keras.layers.Dense(width, "tanh"), keras.layers.Dense(scores)]
    return keras.Sequential(layers)


@pytest.mark.parametrize("combine", ["mean", "median"])
def test_keras_and_torch_models_are_combined(combine: Any) -> None:
    torch_model = nn.Linear(X.shape[1], int(Y.max()) + 1)
    fleet = mf.Fleet({"narrow": net(4), "wide": net(6), "torch": torch_model})
    outputs = list(fleet.predict(X).values())
    found = mf.Ensemble(fleet, combine).predict(X)
    np.testing.assert_allclose(found, getattr(np, combine)(outputs, axis=0), atol=1e-6)


def test_the_combined_output_is_evaluated_as_the_models_were_compiled() -> None:
    fleet = mf.Fleet({"narrow": net(4), "wide": net(6)})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fleet.compile("adam", loss, metrics=["accuracy"], lr=0.01)
    mean = np.mean(list(fleet.predict(X).values()), axis=0)
    found = mf.Ensemble(fleet).evaluate((X, Y))
    assert found["accuracy"] == pytest.approx((mean.argmax(1) == Y).mean())
    assert found["loss"] == pytest.approx(float(loss(Y, mean)), rel=1e-5)
    assert list(mf.Ensemble(fleet, "vote").evaluate((X, Y))) == ["accuracy"]
