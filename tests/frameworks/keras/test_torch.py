"""Keras on torch: layers, optimizers and metrics that are fused, and what can't be."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import modelfleet as mf
from modelfleet import testing

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="for Keras on torch")

layers, optimizers = keras.layers, keras.optimizers
GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(12, 4, 4, 2)).astype(np.float32)
SERIES = GENERATOR.normal(size=(12, 3, 4)).astype(np.float32)
TOKENS = GENERATOR.integers(0, 5, (12, 3))  # a 0 is masked
LABELS = GENERATOR.integers(0, 3, 12)


@keras.saving.register_keras_serializable("modelfleet")
class Idle(keras.Layer):
    """Has a variable that takes no part in the loss."""

    def build(self, shape: Any) -> None:
        self.idle = self.add_weight(shape=(3,), initializer="ones")

    def call(self, x: Any) -> Any:
        return x


@keras.saving.register_keras_serializable("modelfleet")
class Choosy(keras.Layer):
    """Looks at the numbers before it decides what to do with them."""

    def call(self, x: Any) -> Any:
        return x if x.is_meta or float(keras.ops.max(x)) > 1 else -x


def chain(shape: tuple[int, ...], *parts: Callable[[], Any], dtype: str = "float32") -> Callable[[], keras.Model]:
    return lambda: keras.Sequential(
        [keras.Input(shape, dtype=dtype), *(part() for part in parts), layers.Dense(3)]
    )


def convolution() -> keras.Model:
    first = [lambda: layers.Conv2D(4, 3, padding="same", activation="relu"), layers.BatchNormalization]
    return chain((4, 4, 2), *first, layers.MaxPooling2D, layers.Flatten)()


def recurrent() -> keras.Model:
    return chain((3, 4), lambda: layers.Bidirectional(layers.LSTM(4, dropout=0.2)))()


def gated() -> keras.Model:
    return chain((3, 4), lambda: layers.GRU(4, recurrent_dropout=0.2, seed=3))()


def attention() -> keras.Model:
    x = keras.Input((3, 4))
    found = layers.LayerNormalization()(layers.MultiHeadAttention(2, 3, dropout=0.1)(x, x) + x)
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(found)))


def noisy() -> keras.Model:
    noise = [
        lambda: layers.GaussianNoise(0.1),
        lambda: layers.GaussianDropout(0.1),
        lambda: layers.AlphaDropout(0.1),
    ]
    return chain((3, 4), layers.Flatten, *noise, lambda: layers.Dropout(0.3, seed=5))()


def embedded() -> keras.Model:
    masked = lambda: layers.Embedding(11, 4, mask_zero=True)  # noqa: E731
    return chain((3,), masked, lambda: layers.LSTM(4), dtype="int32")()


def words() -> keras.Model:
    return chain((3,), lambda: layers.Embedding(11, 4), layers.GlobalAveragePooling1D, dtype="int32")()


def fleet_of(build: Callable[[], keras.Model], optimizer: Callable[[], Any], **options: Any) -> mf.Fleet:
    """Two members, compiled as people compile Keras models."""
    models = []
    for seed in range(2):
        keras.utils.set_random_seed(seed)
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(**{"optimizer": optimizer(), "loss": loss, **options})
        models.append(model)
    return mf.Fleet(models)


def adam() -> Any:
    return optimizers.Adam(0.01)


def as_alone(fleet: mf.Fleet, data: Any, **options: Any) -> None:
    """Fit a fleet; its members must be what they would have been alone, their optimizers too."""
    expected = {
        name: testing.alone(fleet[name], name, data, optimizer=None, epochs=2, batch_size=6)
        for name in fleet.names
    }
    fleet.fit(data, epochs=2, batch_size=6, progress=False, **options)
    for name, model in expected.items():
        pairs = [
            (fleet[name].variables, model.variables),
            (fleet[name].optimizer.variables, model.optimizer.variables),
        ]
        for mine, other in (pair for variables in pairs for pair in zip(*variables, strict=True)):
            np.testing.assert_allclose(mine.numpy(), other.numpy(), atol=1e-5, err_msg=mine.path)


MODELS = {
    convolution: IMAGES,
    recurrent: SERIES,
    gated: SERIES,
    attention: SERIES,
    noisy: SERIES,
    embedded: TOKENS,
}


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_layers_are_fused_and_as_alone(build: Callable[[], keras.Model]) -> None:
    # By SGD: a gradient that is 0 but for rounding, as of attention's key bias, would be 1 to Adam.
    fleet = fleet_of(build, lambda: optimizers.SGD(0.05, momentum=0.9))
    as_alone(fleet, (MODELS[build], LABELS), strategy="fused")


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5),
    "nadam": lambda: optimizers.Nadam(0.01, global_clipnorm=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "lion": lambda: optimizers.Lion(0.001),
    "scheduled": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_are_fused_and_as_alone(optimizer: str) -> None:
    as_alone(fleet_of(words, OPTIMIZERS[optimizer]), (TOKENS, LABELS), strategy="fused")


def test_a_variable_without_a_gradient_is_left_alone_by_weight_decay_too() -> None:
    def build() -> keras.Model:
        return chain((3, 4), layers.Flatten, Idle)()

    fleet = fleet_of(build, lambda: optimizers.AdamW(0.01, weight_decay=0.5))
    as_alone(fleet, (SERIES, LABELS), strategy="fused")
    assert (fleet["0"].layers[1].idle.numpy() == 1).all()


def test_metrics_are_those_of_keras() -> None:
    one_hot = np.eye(3, dtype=np.float32)[LABELS]
    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(average="macro", name="f1")]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    fleet = fleet_of(words, adam, loss=loss, metrics=metrics)
    fleet.fit((TOKENS, one_hot), batch_size=5, progress=False, strategy="fused")
    found = fleet.evaluate((TOKENS, one_hot), batch_size=5)
    for name in fleet.names:
        expected = fleet[name].evaluate(TOKENS, one_hot, batch_size=5, verbose=0, return_dict=True)
        assert found[name] == pytest.approx(expected, rel=1e-5)


def test_what_branches_on_numbers_takes_turns_and_is_as_alone() -> None:
    fleet = fleet_of(chain((3, 4), layers.Flatten, Choosy), adam)
    as_alone(fleet, (SERIES, LABELS))
    reasons = [lane.reason for lane in fleet.plan((SERIES, LABELS), batch_size=6).lanes]
    assert len(reasons) == 2
    assert all("branches on the value of a tensor" in reason for reason in reasons)


def test_keras_draws_by_its_own_seeds_again_after_a_fit() -> None:
    before = keras.ops.convert_to_numpy(keras.random.uniform((4,), seed=3))
    fleet_of(noisy, adam).fit((SERIES, LABELS), batch_size=6, progress=False)
    assert (keras.ops.convert_to_numpy(keras.random.uniform((4,), seed=3)) == before).all()


def test_several_inputs_outputs_and_sample_weights() -> None:
    def build() -> keras.Model:
        first, second = keras.Input((4,), name="first"), keras.Input((4,), name="second")
        both = layers.Dense(5, activation="tanh")(layers.Concatenate()([first, second]))
        return keras.Model(
            [first, second],
            {"label": layers.Dense(3, name="label")(both), "size": layers.Dense(1, name="size")(both)},
        )

    losses = {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    fleet = fleet_of(build, adam, loss=losses, loss_weights={"label": 1.0, "size": 0.5})
    x = {"first": SERIES[:, 0], "second": SERIES[:, 1]}
    y = {"label": LABELS, "size": SERIES[:, 2, :1]}
    weights = np.linspace(0, 1, 12, dtype=np.float32)
    as_alone(fleet, (x, y, {"label": weights, "size": weights}), strategy="fused")


def test_labels_without_an_output_are_refused() -> None:
    with pytest.raises(mf.InputError, match="the target in row 0 is 7, but the model has 3 outputs"):
        fleet_of(words, adam).fit((TOKENS, np.full(12, 7)), progress=False)


class Annealed(keras.losses.Loss):
    """A loss with a factor that its owner changes."""

    factor = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1) * self.factor


@pytest.mark.parametrize("form", ["closure", "object", "class"])
@pytest.mark.parametrize("sizes", [(4,), (4, 4), (4, 3)])
def test_what_a_callback_anneals_is_read_in_the_next_epoch(form: str, sizes: tuple[int, ...]) -> None:
    """Keras on torch runs its Python at every step."""
    x, y = GENERATOR.normal(size=(12, 4)).astype(np.float32), GENERATOR.normal(size=(12, 3)).astype(np.float32)

    def loss_of() -> tuple[Any, Callable[[float], None]]:
        settings = {"factor": 1.0}

        def loss(y: Any, outputs: Any) -> Any:
            return keras.ops.mean((y - outputs) ** 2, axis=-1) * settings["factor"]

        if form == "closure":
            return loss, lambda value: settings.update(factor=value)
        made = Annealed()
        return made, lambda value: setattr(made if form == "object" else Annealed, "factor", value)

    def made(number: int, loss: Any) -> keras.Model:
        keras.utils.set_random_seed(number)
        model = chain((4,))()
        model.compile(optimizers.SGD(0.1), loss)
        return model

    class Anneal(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            turn(0.25)

    loss, turn = loss_of()
    fleet = mf.Fleet([made(number, loss) for number in range(len(sizes))])
    batch = mf.each({str(number): size for number, size in enumerate(sizes)})
    fleet.fit((x, y), epochs=2, batch_size=batch, shuffle=False, progress=False, callbacks=[Anneal()])
    for number, size in enumerate(sizes):
        turn(1.0)
        loss, turn = loss_of()
        model = made(number, loss)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        turn(0.25)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        for own, expected in zip(fleet[str(number)].get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    Annealed.factor = 1.0
