"""Chains and graphs of Keras models predict and evaluate, on every backend."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from tests.graph.keras.stages import X, Y, outputs, stages, whole

import modelfleet as mf
from modelfleet.errors import InputError, StrategyError

BACKEND = keras.backend.backend()


@pytest.mark.parametrize("devices", ["cpu", "cpu:0,cpu:1", [["cpu:0", "cpu:1"], ["cpu:2"]]])
@pytest.mark.parametrize("batch_size", [None, 10])  # the last batch of 10 is short
def test_a_chain_predicts_as_its_models_one_after_the_other(devices: Any, batch_size: int | None) -> None:
    models = stages(norm=True)
    found = mf.Chain(models, devices=devices).predict(X, batch_size=batch_size)
    np.testing.assert_allclose(found, outputs(models, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_a_model_that_was_split_predicts_as_when_it_was_whole(count: int) -> None:
    model = whole()
    chain = mf.Chain(mf.split(model, count, X[:8]), devices="cpu:0,cpu:1")
    np.testing.assert_allclose(chain.predict(X), outputs([model], X), rtol=1e-5, atol=1e-6)


def test_predict_sees_weights_that_have_changed_since_the_last_call() -> None:
    models = stages()
    chain = mf.Chain(models, devices="cpu:0,cpu:1")
    before = chain.predict(X)
    models[1].set_weights([2 * weight for weight in models[1].get_weights()])
    np.testing.assert_allclose(chain.predict(X), 2 * before, rtol=1e-5)


def test_a_chain_evaluates_like_the_undivided_model() -> None:
    models = stages()
    chain = mf.Chain(models, devices="cpu:0,cpu:1")
    chain.compile("adam", "cross_entropy", metrics=["accuracy"])
    whole = keras.Sequential([layers.Input((6,)), *models])
    whole.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    expected = whole.evaluate(X, Y, verbose=0, return_dict=True)
    assert chain.evaluate((X, Y), batch_size=10) == pytest.approx(expected, rel=1e-4)


def test_outputs_may_be_dicts_and_edges_parts_of_them() -> None:
    x = layers.Input((6,))
    encoder = keras.Model(x, {"mean": layers.Dense(4)(x), "scale": layers.Dense(2)(x)})
    a, b = layers.Input((4,), name="a"), layers.Input((2,), name="b")
    head = keras.Model({"a": a, "b": b}, layers.Concatenate()([a, b]))
    edges = [("encoder.mean", "head.a"), ("encoder.scale", "head.b")]
    graph = mf.Graph({"encoder": encoder, "head": head}, edges, outputs=["encoder", "head"], devices="cpu:0,cpu:1")
    found = graph.predict(X, batch_size=16)
    expected = {name: keras.ops.convert_to_numpy(value) for name, value in encoder(X).items()}
    for name, value in expected.items():
        np.testing.assert_allclose(found["encoder"][name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        found["head"], np.concatenate([expected["mean"], expected["scale"]], 1), rtol=1e-5, atol=1e-6
    )


def test_data_may_be_a_keras_dataset() -> None:
    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            rows = slice(16 * index, 16 * index + 16)
            return X[rows], Y[rows]

    models = stages()
    found = mf.Chain(models, devices="cpu:0,cpu:1").predict(Rows())
    np.testing.assert_allclose(found, outputs(models, X), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(BACKEND == "torch", reason="one of the others is enough")
def test_data_may_be_a_tf_dataset() -> None:
    import tensorflow as tf

    models = stages()
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(10)
    found = mf.Chain(models, devices="cpu:0,cpu:1").predict(dataset)
    np.testing.assert_allclose(found, outputs(models, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", ["cpu", "cpu:0,cpu:1"])
def test_torch_and_keras_models_predict_in_one_chain_but_do_not_train(devices: str) -> None:
    import torch

    torch.manual_seed(0)
    encoder, (head, last) = torch.nn.Linear(6, 6), stages()
    tail = torch.nn.Linear(3, 2)
    chain = mf.Chain([encoder, head, last, tail], devices=devices)
    with torch.no_grad():
        inner = outputs([head, last], encoder(torch.from_numpy(X)).numpy())
        expected = tail(torch.from_numpy(inner)).numpy()
    np.testing.assert_allclose(chain.predict(X, batch_size=10), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(StrategyError, match="node '0' is a torch model and node '1' a keras model"):
        chain.compile("adam", "mse")


def test_a_mask_does_not_go_over_an_edge() -> None:
    embedding = keras.Sequential([layers.Input((5,)), layers.Embedding(7, 4, mask_zero=True)])
    pooling = keras.Sequential([layers.Input((5, 4)), layers.GlobalAveragePooling1D()])
    with pytest.raises(InputError, match="has a mask"):
        mf.Chain([embedding, pooling])
    together = keras.Sequential([layers.Input((5,)), embedding, pooling])
    mf.Chain([together, keras.Sequential([layers.Input((4,)), layers.Dense(1)])])


def test_processes_are_refused() -> None:
    with pytest.raises(StrategyError, match="in threads of one process"):
        mf.Chain(stages(), devices="cpu:0,cpu:1").predict(X, strategy="processes")


def test_models_without_weights_yet_are_refused() -> None:
    with pytest.raises(InputError, match="no weights yet"):
        mf.Chain([keras.Sequential([layers.Dense(3)])])
