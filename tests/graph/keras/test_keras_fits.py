"""Chains and graphs of Keras models train like the undivided model, on JAX; elsewhere they say that they don't."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from tests.graph.keras.stages import ROWS, X, Y, assert_equal, stages, train, whole

import modelfleet as mf
from modelfleet.errors import AllFailedError, InputError, StoreError, StrategyError

on_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="Keras nodes train on JAX")
LR = (1e-3, 1e-2)


@pytest.fixture
def double() -> Iterator[None]:
    import jax

    kinds = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with jax.enable_x64(True):
        yield
    keras.config.set_floatx(kinds[0])
    keras.config.set_dtype_policy(kinds[1])


def adams() -> list[keras.Optimizer]:
    return [keras.optimizers.Adam(rate) for rate in LR]


def compiled(models: Any, **arguments: Any) -> mf.Chain:
    chain = mf.Chain(models, devices=arguments.pop("devices", "cpu:0,cpu:1"))
    chain.compile("adam", arguments.pop("loss", "cross_entropy"), lr=mf.each(LR), **arguments)
    return chain


def fit(chain: mf.Chain, data: Any = (X, Y), **arguments: Any) -> list[float]:
    given: dict[str, Any] = {"epochs": 5, "batch_size": ROWS, "shuffle": False, "progress": False, **arguments}
    return chain.fit(data, **given)["chain"]["loss"]


@on_jax
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"micro_batches": 1},
        {"micro_batches": 3, "pipeline": "gpipe"},  # of 5, 5 and 6 rows
        {"pipeline": "zero-bubble"},
        {"recompute": True},
    ],
    ids=["1f1b", "one", "uneven", "zero-bubble", "recompute"],
)
def test_a_chain_trains_like_the_undivided_model_with_its_dropout(how: dict[str, Any]) -> None:
    models, others = stages(), stages()
    losses = fit(compiled(models), **how)
    np.testing.assert_allclose(losses, train(others, adams()), rtol=1e-4)
    assert_equal(models, others)


@on_jax
def test_a_model_that_was_split_trains_as_when_it_was_whole() -> None:
    model, other = whole(), whole()
    chain = mf.Chain(mf.split(model, 2, X[:8]), devices="cpu:0,cpu:1")
    chain.compile("adam", "cross_entropy", lr=1e-2)
    losses = fit(chain)
    np.testing.assert_allclose(losses, train([other], [keras.optimizers.Adam(1e-2)]), rtol=1e-4)
    assert_equal([model], [other])
    assert chain.last_plan is not None
    assert chain.last_plan.measured is not None
    assert chain.last_plan.measured.peak_bytes is not None


@on_jax
def test_replicas_share_the_micro_batches() -> None:
    models, others = stages(), stages()
    losses = fit(compiled(models, devices=[["cpu:0", "cpu:1"], ["cpu:2"]]))
    np.testing.assert_allclose(losses, train(others, adams()), rtol=1e-4)
    assert_equal(models, others)


@on_jax
def test_the_gradient_of_all_stages_is_clipped_as_one() -> None:
    models, others = stages(), stages()
    losses = fit(compiled(models, clip_norm=0.1))
    np.testing.assert_allclose(losses, train(others, adams(), clip_norm=0.1), rtol=1e-4)
    assert_equal(models, others)


@on_jax
@pytest.mark.parametrize("devices", ["cpu:0,cpu:1", [["cpu:0", "cpu:1"], ["cpu:2"]]], ids=["two", "row"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_numbers_of_64_bits_are_not_rounded(double: None, clip_norm: float | None, devices: Any) -> None:
    models, others = stages(dropout=0.0), stages(dropout=0.0)
    data = X[:42].astype(np.float64), Y[:42]  # the last batch has 10 rows, whose inverse is no short number
    weights = np.linspace(0.1, 2.0, 42)
    chain = mf.Chain(models, devices=devices)
    chain.compile("adam", "cross_entropy", lr=0.01, clip_norm=clip_norm)
    losses = fit(chain, (*data, weights), epochs=3)
    net = keras.Sequential([layers.Input((6,)), *others])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(0.01, global_clipnorm=clip_norm), loss)
    expected = net.fit(*data, sample_weight=weights, batch_size=ROWS, epochs=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(losses, expected.history["loss"], rtol=1e-10)
    for one, other in zip(models, others, strict=True):
        for own, wanted in zip(one.weights, other.weights, strict=True):
            np.testing.assert_allclose(np.asarray(own), np.asarray(wanted), rtol=1e-10, atol=1e-12)


@on_jax
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_stages_stay_as_they_are(frozen: int) -> None:
    models, others = stages(), stages()
    for own in (models, others):
        own[frozen].trainable = False
    before = [np.array(v) for v in models[frozen].weights]
    losses = fit(compiled(models))
    np.testing.assert_allclose(losses, train(others, adams()), rtol=1e-4)
    assert_equal(models, others)
    for variable, value in zip(models[frozen].weights, before, strict=True):
        np.testing.assert_array_equal(np.asarray(variable), value)


@on_jax
def test_sample_weights_count() -> None:
    models, others = stages(), stages()
    weights = np.random.default_rng(2).uniform(0, 2, len(X)).astype("float32")
    losses = fit(compiled(models), (X, Y, weights))
    np.testing.assert_allclose(losses, train(others, adams(), weights=weights), rtol=1e-4)
    assert_equal(models, others)


@on_jax
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_losses_of_any_reduction_add_up(reduction: str) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    models, others = stages(), stages()
    losses = fit(compiled(models, loss=loss))
    np.testing.assert_allclose(losses, train(others, adams(), loss=loss), rtol=1e-4)
    assert_equal(models, others)


@on_jax
def test_batch_norm_sees_micro_batches_and_the_plan_says_so() -> None:
    models, others = stages(norm=True), stages(norm=True)
    chain = compiled(models)
    assert "BatchNorm" in str(chain.plan((X, Y), batch_size=ROWS))
    assert "BatchNorm" not in str(compiled(stages()).plan((X, Y), batch_size=ROWS))
    losses = fit(chain, micro_batches=1)  # as the undivided model
    np.testing.assert_allclose(losses, train(others, adams()), rtol=1e-4)
    assert_equal(models, others)


@on_jax
def test_metrics_and_validation_are_those_of_keras() -> None:
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    models = stages()
    history = compiled(models, metrics=metrics).fit((X, Y), validation=(X, Y), epochs=1, progress=False)
    whole = keras.Sequential([layers.Input((6,)), *models])
    whole.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
    expected = whole.evaluate(X, Y, verbose=0, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(history["chain"][f"val_{name}"], [value], rtol=1e-4)


@on_jax
def test_a_graph_with_two_losses_and_two_inputs_trains() -> None:
    def nodes() -> dict[str, keras.Model]:
        keras.utils.set_random_seed(1)
        a, b = layers.Input((4,)), layers.Input((4,))
        return {
            "left": keras.Sequential([layers.Input((6,)), layers.Dense(4)]),
            "right": keras.Sequential([layers.Input((6,)), layers.Dense(4, "tanh")]),
            "sum": keras.Model([a, b], layers.Dense(3)(layers.Add()([a, b]))),
        }

    edges = [("left", "sum"), ("right", "sum")]
    target = np.random.default_rng(3).normal(size=(len(X), 4)).astype("float32")
    histories, models = [], []
    for devices, micro_batches in (("cpu", 1), ("cpu:0,cpu:1", 4)):
        models.append(nodes())
        graph = mf.Graph(models[-1], edges, outputs="sum", devices=devices)
        graph.compile("sgd", {"sum": "cross_entropy", "left": "mse"}, lr=0.1)
        data = X, {"sum": Y, "left": target}
        history = graph.fit(data, epochs=3, batch_size=ROWS, micro_batches=micro_batches, progress=False)
        histories.append(history["graph"]["loss"])
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-4)
    assert histories[0][-1] < histories[0][0]
    assert_equal(list(models[0].values()), list(models[1].values()))


@on_jax
def test_a_second_fit_and_a_checkpoint_go_on_where_the_first_ended(tmp_path: Path) -> None:
    models, others, resumed = stages(), stages(), stages()
    fit(compiled(others), epochs=4)
    chain = compiled(models)
    fit(chain, epochs=2)
    fit(chain, epochs=2)
    assert_equal(models, others)
    with pytest.raises(ZeroDivisionError):
        fit(compiled(resumed), epochs=4, callbacks=[mf.Checkpoint(tmp_path), Break()])
    kept = [mf.Checkpoint(tmp_path), mf.Callback()]
    fit(compiled(resumed_again := stages()), epochs=4, callbacks=kept, micro_batches=2)
    assert_equal(resumed_again, others)


class Break(mf.Callback):
    """Raises after the second epoch."""

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == 2:
            raise ZeroDivisionError


@on_jax
@pytest.mark.parametrize("other", [{"loss": "mse"}, {"metrics": ["accuracy"]}, {"lr": 0.5}], ids=str)
def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(compiled(stages()), epochs=4, callbacks=[mf.Checkpoint(tmp_path), Break()])
    chain = mf.Chain(stages(), devices="cpu:0,cpu:1")
    given: dict[str, Any] = {"loss": "cross_entropy", "lr": mf.each(LR), **other}
    chain.compile("adam", **given)
    data = X, np.eye(3)[Y] if "loss" in other else Y
    with pytest.raises(StoreError, match="a checkpoint of another run: its optimizer and loss"):
        fit(chain, data, epochs=4, callbacks=[mf.Checkpoint(tmp_path), mf.Callback()])


@on_jax
def test_a_saved_chain_goes_on_as_it_would_have(tmp_path: Path) -> None:
    models, others = stages(), stages()
    chain = compiled(models)
    fit(chain, epochs=2)
    chain.save(tmp_path / "chain")
    loaded = mf.Chain.load(tmp_path / "chain", others, devices="cpu")
    assert_equal(models, others)
    fit(chain, epochs=2)
    fit(loaded, epochs=2)
    assert_equal(models, others)


@on_jax
def test_a_step_that_is_not_finite_is_left_out() -> None:
    models = stages()
    before = [np.array(v) for model in models for v in model.weights]
    with pytest.raises(AllFailedError, match="loss"):
        fit(compiled(models), (np.full_like(X, np.nan), Y))
    for variable, value in zip([v for model in models for v in model.weights], before, strict=True):
        np.testing.assert_array_equal(np.asarray(variable), value)


@on_jax
def test_the_models_own_compile_is_neither_used_nor_changed() -> None:
    models = stages()
    models[-1].compile("sgd", "mse")
    optimizer = models[-1].optimizer
    with pytest.raises(InputError, match="themselves are compiled does not count"):
        mf.Chain(models).fit((X, Y))
    fit(compiled(models), epochs=1)
    assert models[-1].optimizer is optimizer
    assert not optimizer.built
    assert models[-1].loss == "mse"


@on_jax
def test_what_a_graph_would_lose_is_refused() -> None:
    regular = keras.Sequential([layers.Input((6,)), layers.Dense(3, kernel_regularizer="l2")])
    with pytest.raises(InputError, match="weight_decay"):
        fit(mf_chain_of_one(regular))
    active = keras.Sequential([layers.Input((6,)), layers.Dense(3, activity_regularizer="l2")])
    with pytest.raises(InputError, match="adds to the loss"):
        fit(mf_chain_of_one(active))
    with pytest.raises(InputError, match="labels are 0 to 2"):
        fit(compiled(stages()), (X, Y + 1))
    with pytest.raises(InputError, match=r"node '0': Input 0 .* value 8, but"):
        fit(compiled(stages()[::-1]))
    with pytest.raises(StrategyError, match="use_ema"):
        mf.Chain(stages()).compile(keras.optimizers.Adam(use_ema=True), "mse")
    with pytest.raises(InputError, match="can't be added up"):
        mf.Chain(stages()).compile("adam", "mse", metrics=["r2"])


def mf_chain_of_one(model: keras.Model) -> mf.Chain:
    chain = mf.Chain([model], devices="cpu")
    chain.compile("adam", "cross_entropy")
    return chain


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="on JAX they train")
def test_other_backends_say_that_nodes_do_not_train() -> None:
    with pytest.raises(StrategyError, match=r"do not train\. Set KERAS_BACKEND=jax"):
        fit(compiled(stages()))
