"""Members of unlike row counts train as by their own `fit`, though their weights hide what rows feel of others."""

from typing import Any

import keras
import numpy as np
import pytest

import modelfleet as mf
from modelfleet.feeds import Batch
from modelfleet.frameworks import keras as adapter
from modelfleet.frameworks.keras import copy_model
from modelfleet.frameworks.lane_context import alike
from modelfleet.members import Member

layers = keras.layers


@keras.saving.register_keras_serializable()
class Centered(layers.Layer):
    """Takes the mean over the rows away, and has nothing that would tell of it."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0, keepdims=True)


@keras.saving.register_keras_serializable()
class Gate(layers.Layer):
    def build(self, shape: Any) -> None:
        self.gate: Any = self.add_weight(shape=(), initializer="zeros")

    def call(self, x: Any) -> Any:
        return self.gate * x


def model(norm: type[layers.Layer]) -> keras.Model:
    """A branch that a gate keeps out at first, and whose own weights keep its gradient out."""
    given = keras.Input((4,))
    branch = layers.Dense(2, kernel_initializer="zeros", bias_initializer="ones")(norm()(given))
    made = keras.Model(given, layers.Dense(2)(given) + Gate()(branch))
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


@pytest.mark.parametrize("norm", [Centered, layers.BatchNormalization])
def test_members_whose_weights_hide_a_norm_train_beside_padding_as_alone(norm: type[layers.Layer]) -> None:
    draw = np.random.default_rng(5)
    data = [tuple(draw.normal(size=(rows, size)).astype(np.float32) for size in (4, 2)) for rows in (8, 5)]
    models = [model(norm) for _ in data]
    alone = [copy_model(one) for one in models]
    fleet = mf.Fleet(models)
    options: dict[str, Any] = {"epochs": 5, "batch_size": 8, "shuffle": False}
    fleet.fit(mf.each(data), strategy="fused", progress=False, **options)
    for one, own, (x, y) in zip(models, alone, data, strict=True):
        own.fit(x, y, verbose=0, **options)
        for found, expected in zip(one.get_weights(), own.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, 2e-5, 2e-5)


def test_embeddings_bear_padding() -> None:
    draw = np.random.default_rng(5)
    data: Any = draw.integers(0, 7, (2, 8, 3)).astype(np.int32), draw.normal(size=(2, 8, 2)).astype(np.float32)
    own = []
    for name in "ab":
        parts = [layers.Embedding(7, 4), layers.Flatten(), layers.LayerNormalization(), layers.Dense(2)]
        made = keras.Sequential([keras.Input((3,), dtype="int32"), *parts])
        made.compile("sgd", "mse")
        own.append(Member(name, made, 0, adapter))
    task, device = adapter.prepare(None, own, "train").tasks[0], adapter.native(adapter.choose(None)[0])
    if keras.backend.backend() == "torch":
        import torch

        data = tuple(map(torch.from_numpy, data))
    batch = Batch(data, False, np.array([8, 5]))
    engine = adapter.make_engine(alike(own, task, {}, device, fused=True))
    engine.check(batch, "a")
    assert engine.can_mask_padding(batch)


def test_outputs_of_unlike_row_counts_are_those_alone() -> None:
    models = [keras.Sequential([keras.Input((4,)), layers.Dense(2), Centered()]) for _ in range(3)]
    data = [np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32) for rows in (5, 12, 7)]
    found = mf.Fleet(models).predict(mf.each(data), batch_size=8)
    for number, (made, x) in enumerate(zip(models, data, strict=True)):
        alone = made.predict(x, batch_size=8, verbose=0)
        np.testing.assert_allclose(found[str(number)], alone, rtol=1e-5, atol=1e-5)
