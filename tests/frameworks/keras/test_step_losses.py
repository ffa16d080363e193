"""The loss of every step of Keras members, on request."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.frameworks.keras import copy_model

ROWS = {"a": 41, "b": 10}  # more steps than a call takes
RATES = {"a": 0.01, "b": 0.02}


def plain(model: keras.Model, rows: int) -> list[float]:
    """The loss of each step of two epochs of Keras's own steps."""
    x, y = (array[:rows] for array in models.data(41))
    return [
        model.train_on_batch(x[start : start + 2], y[start : start + 2], return_dict=True)["loss"]
        for _ in range(2)
        for start in range(0, rows, 2)
    ]


@keras.saving.register_keras_serializable(name="telling steps")
class Telling(keras.Sequential):
    """Tells of more than its metrics, so that an epoch's numbers are its last logs."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "largest": keras.ops.max(y_pred)}


def eager() -> tuple[mf.Fleet, dict[str, keras.Model]]:
    """A fleet of models that train by Keras's own steps, and copies of the models."""
    own = {name: models.mlp(seed=seed) for seed, name in enumerate(RATES)}
    for name, model in own.items():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(models.adam(RATES[name]), loss, metrics=["accuracy"], run_eagerly=True)
    return mf.Fleet(own), {name: copy_model(model) for name, model in own.items()}


@pytest.mark.parametrize("kind", ["fused", "interleaved", "eager"])
def test_the_losses_are_those_of_keras(kind: str) -> None:
    fleet, expected = eager() if kind == "eager" else models.fresh(**RATES)
    x, y = models.data(41)
    strategy: Any = "fused" if kind == "fused" else "interleaved"
    history = fleet.fit(
        mf.each({name: (x[:rows], y[:rows]) for name, rows in ROWS.items()}),
        epochs=2,
        batch_size=2,
        shuffle=False,
        strategy=strategy,
        record_steps=True,
        progress=False,
    )
    for name, rows in ROWS.items():
        found = history.steps(name)["loss"]
        np.testing.assert_allclose(found, plain(expected[name], rows), rtol=2e-4, atol=1e-6)
        sizes = [min(2, rows - start) for start in range(0, rows, 2)]
        for epoch, value in enumerate(history[name]["loss"]):
            own = slice(epoch * len(sizes), (epoch + 1) * len(sizes))
            assert np.average(found[own], weights=sizes) == pytest.approx(value, rel=1e-5)


def test_recording_leaves_the_numbers_of_an_epoch_as_they_are() -> None:
    histories = []
    for recorded in (False, True):
        keras.utils.set_random_seed(0)
        model = Telling([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        histories.append(
            mf.Fleet({"a": model}).fit(
                models.data(16), epochs=2, batch_size=8, shuffle=False, record_steps=recorded, progress=False
            )
        )
    alone, recorded = histories
    assert recorded["a"] == alone["a"]
    assert "largest" in recorded["a"]
    losses = recorded.steps("a")["loss"]
    assert np.mean(losses[:2]) == pytest.approx(recorded["a"]["loss"][0], rel=1e-6)
