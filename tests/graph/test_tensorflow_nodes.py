"""TensorFlow's own models as nodes of graphs: they predict, and are refused all else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import modelfleet as mf
from modelfleet.errors import InputError, StrategyError

X = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")


class Scale(tf.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor: Any = tf.Variable(tf.constant(factor))

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32)])
    def __call__(self, x: Any) -> Any:
        return self.factor * x


@pytest.mark.parametrize("devices", ["cpu", "cpu:0,cpu:1"])
def test_modules_functions_and_saved_models_predict_in_one_chain(devices: str, tmp_path: Path) -> None:
    module = Scale(3.0)
    tf.saved_model.save(module, str(tmp_path), module.__call__.get_concrete_function())
    stages = [
        Scale(2.0),
        tf.saved_model.load(str(tmp_path)),
        tf.function(lambda x: {"all": x + 1, "first": x[:, 0]}),
    ]
    found = mf.Chain(stages, devices=devices).predict(X, batch_size=30)
    np.testing.assert_allclose(found["all"], 6 * X + 1, rtol=1e-6)
    np.testing.assert_allclose(found["first"], 6 * X[:, 0], rtol=1e-6)


def test_a_dataset_is_predicted_batch_by_batch() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, np.zeros(100))).batch(8)
    found = mf.Chain([Scale(2.0), Scale(5.0)], devices="cpu:0,cpu:1").predict(dataset)
    np.testing.assert_allclose(found, 10 * X, rtol=1e-6)


def test_torch_models_predict_beside_them() -> None:
    import torch

    linear = torch.nn.Linear(4, 2)
    found = mf.Chain([Scale(2.0), linear], devices="cpu:0,cpu:1").predict(X)
    np.testing.assert_allclose(found, linear(torch.from_numpy(2 * X)).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_what_they_cannot_do_is_refused() -> None:
    chain = mf.Chain([Scale(2.0), Scale(5.0)])
    with pytest.raises(InputError, match="can predict, but can't be compiled"):
        chain.compile("adam", "mse")
    with pytest.raises(InputError, match="call compile before fit"):
        chain.fit((X, X))
    with pytest.raises(InputError, match="can't be trained"):
        chain.plan((X, X))
    with pytest.raises(StrategyError, match="in threads of one process"):
        chain.predict(X, strategy="processes")
