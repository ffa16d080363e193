"""One member's pure steps against Keras's own `train_on_batch` and `evaluate`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

from modelfleet.errors import InputError
from modelfleet.frameworks.keras.steps import Steps

optimizers = keras.optimizers
BACKEND = keras.backend.backend()


def gradients(loss: Callable[[Any], Any], params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What `loss` gives beside its number, and the gradients, by the backend's own means."""
    if BACKEND == "jax":
        import jax

        found, rest = jax.grad(loss, has_aux=True)(params)
        return rest, found
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(params)
            value, rest = loss(params)
        return rest, tape.gradient(value, params)
    import torch

    own = {key: value.detach().clone().requires_grad_() for key, value in params.items()}
    value, rest = loss(own)
    found = dict(zip(own, torch.autograd.grad(value, list(own.values())), strict=True))
    return keras.tree.map_structure(torch.Tensor.detach, rest), found


def step(steps: Steps, state: dict[str, Any], batch: Any, weights: Any = None) -> dict[str, Any]:
    batch = keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
    weights = None if weights is None else keras.ops.convert_to_tensor(weights)

    def loss(params: dict[str, Any]) -> Any:
        return steps.loss(params, state["buffers"], state["metrics"], state["optimizer"], batch, weights)

    (_, buffers, metrics), found = gradients(loss, state["params"])
    params, slots = steps.apply(state["params"], state["optimizer"], found)
    new = {"params": params, "buffers": buffers, "optimizer": slots, "metrics": metrics}
    return keras.tree.map_structure(keras.ops.stop_gradient, new)


def host(state: dict[str, Any]) -> dict[str, Any]:
    return keras.tree.map_structure(keras.ops.convert_to_numpy, state)


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5),
    "nadam": lambda: optimizers.Nadam(0.01),
    "lion": lambda: optimizers.Lion(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.01),
    "global clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.01),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=2),
}


def compiled(model: keras.Model, optimizer: Any = None, **options: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or optimizers.Adam(0.01), **{"loss": loss, "metrics": ["accuracy"], **options})
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_as_in_keras(name: str) -> None:
    template, model, expected = (compiled(models.mlp(norm=True), OPTIMIZERS[name]()) for _ in range(3))
    expected.run_eagerly = True  # as the steps are here: it is quicker than to trace them
    steps, batch = Steps(template), models.data(8)
    steps.build(batch)
    before, state = models.numbers(template), steps.state(model)
    for _ in range(3):
        state = step(steps, state, batch)
        expected.train_on_batch(*batch)
    steps.write_back(model, host(state))
    models.same(model, expected, tolerance=2e-5)
    for old, new in zip(before, models.numbers(template), strict=True):
        np.testing.assert_array_equal(old, new)  # a step leaves the model that it is made of alone


def test_dropout_regularizers_sample_weights_and_metrics_are_as_in_keras() -> None:
    def make() -> keras.Model:
        model = models.mlp(rate=0.0 if BACKEND == "torch" else 0.4, norm=True)
        model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
        model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
        return compiled(model, weighted_metrics=["accuracy"])

    model, expected = make(), make()
    x, y = models.data(16)
    weight = np.linspace(0.1, 2, 16, dtype=np.float32)
    steps = Steps(model)
    steps.build((x, y, weight))
    state = steps.state(model)
    for start in (0, 8):
        state = step(steps, state, (x[start : start + 8], y[start : start + 8], weight[start : start + 8]))
    history = models.fit(expected, x, y, sample_weight=weight, batch_size=8, shuffle=False)
    found = {name: float(value) for name, value in steps.results(state["metrics"]).items()}
    assert found.keys() == history.keys()
    for name, value in found.items():
        assert value == pytest.approx(history[name][0], rel=1e-5), name
    steps.write_back(model, host(state))
    models.same(model, expected)


def test_evaluate_and_predict_are_as_in_keras() -> None:
    model = compiled(models.mlp(norm=True, rate=0.3))
    x, y = models.data(10)
    steps = Steps(model)
    steps.build((x, y))
    state = steps.state(model)
    metrics, _ = steps.evaluate(state["params"], state["buffers"], steps.fresh_metrics(), (x[:6], y[:6]))
    metrics, _ = steps.evaluate(state["params"], state["buffers"], metrics, (x[6:], y[6:]))
    found = {name: float(value) for name, value in steps.results(metrics).items()}
    outputs = keras.ops.convert_to_numpy(steps.predict(state["params"], state["buffers"], x)[0])
    model.run_eagerly = True
    expected = model.evaluate(x, y, batch_size=6, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(outputs, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_rows_of_weight_0_leave_no_trace() -> None:
    model = compiled(models.mlp(), weighted_metrics=["accuracy"])
    x, y = models.data(8)
    steps = Steps(model)
    steps.build((x, y))
    assert steps.can_mask_rows
    state = steps.state(model)
    padded = step(steps, state, (x, y), np.array([1, 1, 1, 1, 1, 0, 0, 0], dtype=np.float32))
    alone = step(steps, state, (x[:5], y[:5]))
    pairs = zip(keras.tree.flatten(host(padded)), keras.tree.flatten(host(alone)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_models_whose_padding_would_be_felt_are_not_maskable() -> None:
    for change in ({"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")},):
        steps = Steps(compiled(models.mlp(), **change))
        steps.build(models.data(4))
        assert not steps.can_mask_rows


def test_keys_do_not_depend_on_the_numbers_in_names() -> None:
    first, second = (Steps(compiled(models.mlp(norm=True))) for _ in range(2))
    assert first.keys == second.keys
    assert first.keys["params"][0] == "000.kernel"


def test_several_outputs_log_what_keras_logs() -> None:
    model = models.two_outputs()
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss={"left": "mse", "right": sparse}, loss_weights={"left": 0.5, "right": 2.0})
    x, labels = models.data(8)
    batch = (x, {"left": x[:, :1], "right": labels})
    steps = Steps(model)
    steps.build(batch)
    state = step(steps, steps.state(model), batch)
    found = {name: float(value) for name, value in steps.results(state["metrics"]).items()}
    model.run_eagerly = True
    assert found == pytest.approx(model.train_on_batch(*batch, return_dict=True), rel=1e-5)


def test_a_metric_that_gives_an_array_is_refused() -> None:
    steps = Steps(compiled(models.mlp(), metrics=[keras.metrics.F1Score()], loss="mse"))
    x, _ = models.data(4)
    with pytest.raises(InputError, match="'f1_score' gives an array"):
        steps.build((x, x[:, :3]))
