"""Lanes of Keras models on TensorFlow: mapped and not, many steps a call and one, and XLA's form of them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet import frameworks
from modelfleet.feeds import Batch
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.keras import copy_model
from modelfleet.frameworks.stacked import by_part, by_path
from modelfleet.members import Member

if keras.backend.backend() != "tensorflow":
    pytest.skip("for Keras on TensorFlow", allow_module_level=True)

import tensorflow as tf

from modelfleet.frameworks.keras.task import task_of
from modelfleet.frameworks.keras.tensorflow import Engine
from modelfleet.frameworks.lane_context import alike
from modelfleet.frameworks.tensorflow import programs

layers = keras.layers
STEPS, ROWS = 3, 8


def mlp(*extra: Callable[[], keras.Layer], lr: float = 0.01) -> keras.Model:
    between = [layer() for layer in extra]
    return compiled(
        keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), *between, layers.Dense(3)]), lr
    )


def cnn() -> keras.Model:
    return compiled(
        keras.Sequential(
            [keras.Input((4,)), layers.Reshape((2, 2, 1)), layers.Conv2D(3, 2), layers.Flatten(), layers.Dense(3)]
        )
    )


def table() -> keras.Model:
    return compiled(
        keras.Sequential([keras.Input((4,)), layers.Embedding(9, 2), layers.Flatten(), layers.Dense(3)])
    )


def words(recurrent: Callable[..., keras.Layer] = layers.LSTM, *, unroll: bool = True) -> keras.Model:
    last = [layers.Cropping1D((2, 0)), recurrent(4, unroll=unroll), layers.Dense(3)]  # two steps show what four do
    return compiled(keras.Sequential([keras.Input((4,)), layers.Embedding(9, 5), *last]))


def series() -> keras.Model:
    return compiled(keras.Sequential([keras.Input((4,)), layers.Reshape((4, 1)), layers.GRU(4), layers.Dense(3)]))


def compiled(model: keras.Model, lr: float = 0.01) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Not Adam's own epsilon: it would make much of gradients that are nothing but rounding.
    model.compile(keras.optimizers.Adam(lr, epsilon=1e-3), loss, metrics=["accuracy"])
    return model


KINDS: dict[str, Callable[[], keras.Model]] = {
    "mlp": lambda: mlp(layers.BatchNormalization, lambda: layers.Dropout(0.4)),
    "cnn": cnn,
    "table": table,
    "words": words,
    "series": series,
}


def twin(model: keras.Model) -> keras.Model:
    found = keras.models.clone_model(model)
    for own, other in zip(found.variables, model.variables, strict=True):
        own.assign(other)
    return compiled(found, float(model.optimizer.learning_rate))


def rows(count: int, steps: int = STEPS, size: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Data of so many members, `(step, member, row, …)`; none below 0, so that an embedding takes them, too."""
    generator = np.random.default_rng(7)
    x = generator.uniform(0, 3, size=(steps, count, size, 4)).astype(np.float32)
    return x, generator.integers(0, 3, size=(steps, count, size))


def engine(own: Sequence[keras.Model], programs: Any = None) -> Engine:
    task = task_of(own[0])
    return Engine(alike(members(own), task, {}, "CPU:0", fused=len(own) > 1, programs=programs))


def members(own: Sequence[keras.Model]) -> list[Member]:
    keras_adapter = frameworks.adapter("keras")
    return [Member(f"m{number}", model, number, keras_adapter) for number, model in enumerate(own)]


def opened(given: Sequence[keras.Model], x: np.ndarray, y: np.ndarray) -> tuple[Engine, Any]:
    """An engine that is ready to train, and who is active."""
    own = engine(given)
    batch = Batch((x[0], y[0]), False, np.full(len(given), x.shape[2]))
    own.check(batch, "m0")
    active = own.tensor(np.ones(len(given), dtype=bool))
    own.ready("train", {}, active, batch)
    return own, active


def train(own: Engine, active: Any, x: np.ndarray, y: np.ndarray, *, several: bool, pace: Any = (1, None)) -> None:
    if several:
        own.train({}, active, Batch((x, y), False, np.full(x.shape[1], x.shape[2]), len(x)), pace)
        return
    for step in range(len(x)):
        own.train({}, active, Batch((x[step], y[step]), False, np.full(x.shape[1], x.shape[2])), pace)


def graphs(own: Engine) -> list[programs.Graph]:
    backend: Any = own.programs.backend
    return backend.graphs


def largest_difference(a: keras.Model, b: keras.Model) -> float:
    pairs = [
        *zip(a.weights, b.weights, strict=True),
        *zip(a.optimizer.variables, b.optimizer.variables, strict=True),
    ]
    return max(float(np.abs(np.asarray(p, np.float64) - np.asarray(q, np.float64)).max()) for p, q in pairs)


@pytest.fixture(scope="module")
def pair() -> tuple[Engine, Any]:
    """An engine of two networks that is traced already, for tests to train, and who is active."""
    return opened([mlp() for _ in range(2)], *rows(2))


@pytest.mark.parametrize(
    ("kind", "count", "program"),
    # Several recurrent networks with a loop take TensorFlow a while to trace.
    [
        ("mlp", 1, ""),
        ("mlp", 2, "; draws one by one"),
        ("cnn", 2, "; Conv2D one by one"),
        ("table", 1, ""),
        ("words", 2, ""),
        ("series", 1, ""),
    ],
)
def test_lane_does_what_fit_does(kind: str, count: int, program: str) -> None:
    own_models = [KINDS[kind]() for _ in range(count)]
    for number, model in enumerate(own_models):
        model.optimizer.learning_rate = 0.01 * (number + 1)
    alone = [twin(model) for model in own_models]
    x, y = rows(count)
    own, active = opened(own_models, x, y)
    assert own.program == f"tf.function, 16 steps a call{program}"
    epochs = []
    for several in (True, False):
        train(own, active, x, y, several=several)
        epochs.append(own.epoch_values())
    own.scatter(range(len(own_models)), members(own_models))
    for number, (model, other) in enumerate(zip(own_models, alone, strict=True)):
        flat = x[:, number].reshape(-1, 4), y[:, number].reshape(-1)
        history = models.fit(other, *flat, epochs=2, batch_size=ROWS, shuffle=False)
        assert largest_difference(model, other) < 2e-6
        for name, column in history.items():
            assert [values[name][number] for values in epochs] == pytest.approx(column, abs=1e-6)


def test_nothing_is_traced_twice() -> None:
    traces: list[int] = []

    class Counted(layers.Layer):
        def call(self, x: Any) -> Any:
            traces.append(1)
            return x

    x, y = rows(2, steps=4)
    own, active = opened([mlp(Counted) for _ in range(2)], x, y)
    seen = len(traces)
    train(own, active, x, y, several=True)  # calls the step that `ready` has traced
    train(own, active, x, y, several=False)
    own.epoch_values()
    assert len(traces) == seen
    for _ in range(2):
        train(own, active, x, y, several=True)
        train(own, active, x[:3], y[:3], several=True)  # fewer steps run in the same program
        train(own, active, x, y, several=False)
        own.epoch_values()
    another = engine([mlp(Counted) for _ in range(2)], programs=own.programs)
    another.check(Batch((x[0], y[0]), False, np.full(2, ROWS)), "m0")
    seen_by_check = len(traces)
    train(another, active, x, y, several=True)
    assert len(traces) == seen_by_check
    assert seen_by_check - seen <= 6  # Keras looks at a batch itself before its metrics are made


def test_narrowed_lane_goes_on_where_it_was() -> None:
    own_models = [mlp(layers.BatchNormalization) for _ in range(3)]
    alone = [twin(model) for model in own_models]
    x, y = rows(3)
    own, active = opened(own_models, x, y)
    train(own, active, x, y, several=True)
    own.give_slots(np.array([0, 2]))
    train(own, own.tensor(np.ones(2, dtype=bool)), x[:, [0, 2]], y[:, [0, 2]], several=True)
    own.give_slots(np.arange(3))
    own.scatter(range(len(own_models)), members(own_models))
    for number, epochs in ((0, 2), (1, 1), (2, 2)):
        flat = x[:, number].reshape(-1, 4), y[:, number].reshape(-1)
        models.fit(alone[number], *flat, batch_size=ROWS, shuffle=False, epochs=epochs)
        assert largest_difference(own_models[number], alone[number]) < 2e-6


def test_xla_takes_over_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "auto")
    monkeypatch.setattr(programs, "LONG", 0.0)
    monkeypatch.setattr(programs, "TRIALS", 0)  # whichever is faster here
    own_models = [mlp(layers.BatchNormalization) for _ in range(2)]
    alone = [twin(model) for model in own_models]
    x, y = rows(2)
    own, active = opened(own_models, x, y)
    epochs = 6
    for _ in range(epochs):
        train(own, active, x, y, several=True, pace=(10, None))
        for graph in graphs(own):
            graph.wait()
    assert not own.compiling
    assert own.program == "XLA, 16 steps a call"
    own.scatter(range(len(own_models)), members(own_models))
    for number, other in enumerate(alone):
        flat = x[:, number].reshape(-1, 4), y[:, number].reshape(-1)
        other.fit(*flat, batch_size=ROWS, shuffle=False, epochs=epochs, verbose=0)
        assert largest_difference(own_models[number], other) < 1e-5


def test_xla_is_not_tried_on_draws_nor_for_a_short_run(
    pair: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "auto")
    for _ in range(5):
        train(*pair, *rows(2), several=True, pace=(100, None))
    assert not any(graph._thread for graph in graphs(pair[0]))
    assert pair[0].program == "tf.function, 16 steps a call"
    monkeypatch.setattr(programs, "LONG", 0.0)
    x, y = rows(1)
    own, active = opened([mlp(lambda: layers.Dropout(0.4))], x, y)
    for _ in range(2):
        train(own, active, x, y, several=False, pace=(100, None))
    assert not any(graph._thread for graph in graphs(own))


def test_draws_from_the_global_generator_are_not_fused() -> None:
    class Noise(layers.Layer):
        def call(self, x: Any) -> Any:
            return x + tf.random.normal(tf.shape(x))

    x, y = rows(2)
    with pytest.raises(CannotFuseError, match="RandomStandardNormal draws from TensorFlow's global generator"):
        opened([mlp(Noise) for _ in range(2)], x, y)


def test_lengths_that_depend_on_the_numbers_are_not_fused() -> None:
    own_models = [table() for _ in range(2)]
    for model in own_models:  # gives RMSprop the rows of the embedding that were looked up
        model.compile(keras.optimizers.RMSprop(), model.loss)
    with pytest.raises(CannotFuseError, match="Where"):
        opened(own_models, *rows(2))


def test_loop_over_time_behind_an_embedding_is_not_fused() -> None:
    x, y = rows(2)
    with pytest.raises(CannotFuseError, match="unroll=True"):
        opened([words(layers.SimpleRNN, unroll=False) for _ in range(2)], x, y)


def test_working_bytes_grow_with_the_batch(pair: tuple[Engine, Any]) -> None:
    x, y = rows(2, size=64)
    small, large = (
        pair[0].working_bytes(Batch((x[0, :, :size], y[0, :, :size]), False, np.full(2, size)))
        for size in (ROWS, 64)
    )
    assert small is not None
    assert large is not None
    assert 0 < small < large


def test_state_goes_round_by_read_and_write(pair: tuple[Engine, Any]) -> None:
    (own, active), (x, y) = pair, rows(2)
    train(own, active, x, y, several=True)
    kept = {name: np.asarray(tensor) for name, tensor in by_path(own.read(range(2))).items()}
    train(own, active, x, y, several=True)
    after = {name: np.asarray(tensor) for name, tensor in by_path(own.read(range(2))).items()}
    assert any((after[name] != tensor).any() for name, tensor in kept.items())  # or nothing was shown
    own.write(range(2), by_part(kept))
    train(own, active, x, y, several=True)
    for name, tensor in by_path(own.read(range(2))).items():
        np.testing.assert_array_equal(np.asarray(tensor), after[name], err_msg=name)


def test_fleet_takes_a_dataset_of_tensorflow() -> None:
    model = mlp()
    other = twin(model)
    generator = np.random.default_rng(3)
    x, y = generator.normal(size=(16, 4)).astype("float32"), generator.integers(0, 3, size=16)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    mf.Fleet({"m": model}).fit(dataset, epochs=2, progress=False)
    models.fit(other, dataset, epochs=2)
    assert largest_difference(model, other) < 2e-6


def test_an_embedding_whose_gradient_is_clipped_is_as_in_keras() -> None:
    def make() -> keras.Model:
        parts = [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(5, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
        model = keras.Sequential(parts)
        model.compile(keras.optimizers.Adam(0.1, clipnorm=0.01, epsilon=1e-3), "mse")
        return model

    own = {name: make() for name in "ab"}
    expected = {name: copy_model(model) for name, model in own.items()}
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (16, 3)).astype(np.int32), rng.normal(size=(16, 2)).astype(np.float32)
    fleet = mf.Fleet(own)
    fleet.fit((x, y), epochs=2, batch_size=8, shuffle=False, progress=False)
    for name, model in expected.items():
        model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)
        models.same(fleet[name], model)
    assert "clips the gradient of an embedding" in (fleet.plan((x, y), batch_size=8).lanes[0].reason or "")
