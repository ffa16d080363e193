"""Which Keras models have one structure, and how the difference is told."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

from modelfleet.frameworks.keras.structure import difference, signature, trained_twice
from modelfleet.frameworks.keras.task import task_of

layers = keras.layers


def scaled(factor: float) -> Callable[[object], object]:
    def activation(x: object) -> object:
        return x * factor  # type: ignore[operator]

    return activation


def added(*, chained: bool) -> keras.Model:
    x = keras.Input((4,))
    a = layers.Dense(4)(x)
    b = layers.Dense(4)(a if chained else x)
    return keras.Model(x, layers.Add()([a, b]) * 2.0)


def recurrent(seed: int) -> keras.Model:
    cell = layers.LSTM(3, dropout=0.1, seed=seed)
    return keras.Sequential([keras.Input((5, 4)), layers.Bidirectional(cell), layers.Dense(1)])


def told(a: keras.Model, b: keras.Model) -> str | None:
    first, second = signature(a), signature(b)
    found = difference(first, second)
    assert (found is None) == (first == second)
    return found


def test_names_seeds_and_initializers_do_not_count() -> None:
    assert told(models.mlp(rate=0.1, seed=1), models.mlp(rate=0.1, seed=2)) is None
    assert told(added(chained=True), added(chained=True)) is None
    assert told(models.gained(), models.gained()) is None
    assert told(recurrent(1), recurrent(2)) is None
    assert told(models.mlp(activation=scaled(2.0)), models.mlp(activation=scaled(2.0))) is None


@pytest.mark.parametrize(
    "parts",
    [
        lambda: [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.MaxPooling2D(), layers.SeparableConv2D(2, 2)],
        lambda: [keras.Input((8, 3)), layers.Conv1D(4, 3), layers.LayerNormalization(), layers.GRU(3)],
        lambda: [keras.Input((5,)), layers.Embedding(10, 4, mask_zero=True), layers.Bidirectional(layers.LSTM(3))],
        lambda: [
            keras.Input((5, 4)),
            layers.TimeDistributed(layers.Dense(3)),
            layers.Rescaling(2.0),
            layers.PReLU(),
        ],
        lambda: [keras.Input((8, 8, 4)), layers.GroupNormalization(2), layers.RandomFlip(), layers.Resizing(4, 4)],
        lambda: [keras.Input((4,)), layers.Dense(2, kernel_regularizer="l2", kernel_constraint="max_norm")],
    ],
)
def test_layers_of_keras_made_alike_are_alike(parts: Callable[[], list[Any]]) -> None:
    assert told(keras.Sequential(parts()), keras.Sequential(parts())) is None


def test_neither_compiling_nor_training_counts() -> None:
    for make in (models.gained, models.mlp):
        model = make()
        model.compile("adam", "mse")
        x, _ = models.data(4)
        model.fit(x, x[:, :3], verbose=0)
        assert told(model, make()) is None


def test_the_first_difference_is_told() -> None:
    assert told(models.mlp(units=8), models.mlp()) == "layers.0.units is 8, not 6"
    assert told(models.mlp(rate=0.5), models.mlp(rate=0.2)) == "layers.1.rate is 0.5, not 0.2"
    assert (
        told(models.mlp(activation="relu"), models.mlp())
        == "layers.0.activation is the function relu, not the function tanh"
    )
    assert told(models.mlp(norm=True), models.mlp()) == "layers.1 is a BatchNormalization, not a Dense"
    assert told(models.gained(gain=2.0), models.gained()) == "gain is 2.0, not 1.0"
    assert told(models.gained(units=3), models.gained()) == "hidden.units is 3, not 5"
    assert told(models.gained(), models.mlp()) == "the model is a Gained, not a Sequential"
    assert told(added(chained=False), added(chained=True)) == "layers.2's inputs come from other layers"
    assert told(models.two_outputs("up"), models.two_outputs()) == (
        "output names are ['up', 'right'], not ['left', 'right']"
    )


def test_functions_count_by_what_they_do() -> None:
    assert told(models.mlp(activation=scaled(2.0)), models.mlp(activation=scaled(3.0))) is not None


def test_freezing_counts() -> None:
    frozen = models.mlp()
    frozen.layers[0].trainable = False
    assert told(frozen, models.mlp()) == "layers.0.trainable is False, not True"


def test_a_layer_used_twice_is_not_two_layers() -> None:
    shared = layers.Dense(4)
    twice = keras.Sequential([keras.Input((4,)), shared, shared])
    two = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(4)])
    assert told(twice, two) == "layers.1 is the layer layers.0 again, not a layer of its own"


def test_the_shapes_of_weights_count() -> None:
    wide = models.Gained()
    wide(np.zeros((2, 7), dtype=np.float32))
    found = told(wide, models.gained())
    assert found is not None
    assert "(7, 5), not (4, 5)" in found


def test_variables_trained_twice_are_found() -> None:
    first, second = models.mlp(), models.mlp()
    assert trained_twice([first, second]) is None
    third = keras.Sequential([keras.Input((4,)), first.layers[0]])
    found = trained_twice([first, second, third])
    assert found is not None
    assert found[:2] == (0, 2)


@pytest.mark.parametrize("count", [3])
def test_signatures_are_hashable(count: int) -> None:
    assert len({signature(models.mlp(rate=0.1)) for _ in range(count)}) == 1


class Regular(layers.Layer):
    """A layer whose weight is regularized and constrained by what its `__init__` was told, and by nothing else."""

    def __init__(self, strength: float, limit: float) -> None:
        super().__init__()
        self.kernel = self.add_weight(
            shape=(4, 3),
            regularizer=keras.regularizers.L2(strength),
            constraint=keras.constraints.MaxNorm(limit),
        )

    def call(self, x: Any) -> Any:
        return x @ self.kernel


class Ordered(keras.Model):
    """Calls its layers in the order of a list."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4, activation="tanh"), layers.Dense(4, activation="tanh")
        self.order = [self.second, self.first] if turned else [self.first, self.second]
        self(np.zeros((1, 4), dtype=np.float32))

    def call(self, x: Any) -> Any:
        for layer in self.order:
            x = layer(x)
        return x


def regular(strength: float = 0.1, limit: float = 2.0) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Regular(strength, limit)])


def test_what_changes_a_step_counts() -> None:
    def active(strength: float) -> keras.Model:
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(3, activity_regularizer=keras.regularizers.L2(strength))]
        )

    assert told(active(0.1), active(0.1)) is None
    assert "activity_regularizer is L2" in (told(active(0.1), active(0.2)) or "")
    assert told(regular(), regular()) is None
    assert "weight 0 has the regularizer L2" in (told(regular(0.1), regular(0.2)) or "")
    assert "weight 0 has the constraint MaxNorm" in (told(regular(0.1, 1.0), regular(0.1, 2.0)) or "")
    assert told(Ordered(turned=True), Ordered(turned=True)) is None
    assert told(Ordered(turned=True), Ordered(turned=False)) is not None
    # What a layer keeps beside the model is not in the state of a lane.
    scale = [keras.Variable(float(number)) for number in range(2)]
    models_ = [models.mlp(activation=lambda x, own=own: x * own) for own in (scale[0], scale[0], scale[1])]
    assert told(models_[0], models_[1]) is None
    assert told(models_[0], models_[2]) is not None


def test_names_that_keras_has_chosen_do_not_count() -> None:
    def two() -> keras.Model:
        x = keras.Input((4,))
        return keras.Model(x, [layers.Dense(1)(x), layers.Dense(3)(x)])

    assert told(two(), two()) is None


def test_a_loaded_model_is_like_a_fresh_one(tmp_path: Any) -> None:
    def make() -> keras.Model:
        parts = [
            keras.Input((5, 4)),
            layers.LSTM(3, dropout=0.1),
            layers.SpectralNormalization(layers.Dense(3)),
            layers.Dropout(0.1),
            layers.Dense(3),
        ]
        model = keras.Sequential(parts)
        model.compile("adam", "mse", metrics=["mae", keras.metrics.R2Score()])
        return model

    used = make()
    used.train_on_batch(np.ones((4, 5, 4), np.float32), np.ones((4, 3), np.float32))
    used.save(tmp_path / "m.keras")
    loaded: Any = keras.models.load_model(tmp_path / "m.keras")
    for model in (used, loaded):
        assert told(model, make()) is None
        assert task_of(model) is task_of(make()) is task_of(make())
