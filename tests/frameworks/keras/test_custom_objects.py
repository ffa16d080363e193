"""Models with unregistered classes and functions of one's own: in worker processes, as copies, as replicas."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import __main__
import modelfleet as mf
from modelfleet.frameworks import keras as adapter
from modelfleet.workers import CannotSendError
from modelfleet.workers.parcels import SharedMemoryValue

layers, ops = keras.layers, keras.ops
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False}


class Halved(layers.Layer):
    """A layer that tells nothing of itself beside its name."""

    def call(self, x: Any) -> Any:
        return x / 2


class Sloped(keras.losses.Loss):
    """A loss with a number of its own."""

    def __init__(self, slope: float = 1.0, name: str = "sloped") -> None:
        super().__init__(name=name)
        self.slope = slope

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(self.slope * ops.abs(ops.cast(y_true, "float32") - y_pred), axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {"slope": self.slope, "name": self.name}


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1 / (1 + ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {}


class Bounded(keras.constraints.Constraint):
    def __call__(self, w: Any) -> Any:
        return ops.clip(w, -0.3, 0.3)


def largest(y_true: Any, y_pred: Any) -> Any:
    return ops.max(y_pred, axis=-1)


class Largest(keras.metrics.MeanMetricWrapper):
    def __init__(self, name: str = "largest", dtype: Any = None) -> None:
        super().__init__(largest, name=name, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype}


def mse(y_true: Any, y_pred: Any) -> Any:
    """Is not Keras's function of this name."""
    return ops.mean(ops.abs(ops.cast(y_true, "float32") - y_pred), axis=-1)


def times(factor: float) -> Callable[..., Any]:
    def scaled(y_true: Any, y_pred: Any) -> Any:
        return factor * mse(y_true, y_pred)

    return scaled


def soft(x: Any) -> Any:
    return ops.tanh(0.5 * x)


class Terse(layers.Layer):
    """A layer whose __init__ takes nothing that all layers take."""

    def __init__(self, factor: float) -> None:
        super().__init__(name="terse", trainable=False)
        self.factor = factor

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        return self.factor * x + self.shift


class Plain(keras.Model):
    """A model as most people write theirs: without **kwargs, and without a get_config."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = layers.Dense(width, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
        self.terse = Terse(0.5)
        self.last = layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=2))

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.terse(self.first(x)))


def plain(width: int = 5) -> keras.Model:
    made = Plain(width)
    made.compile(keras.optimizers.SGD(0.1), "mse")
    made(np.zeros((2, 4), np.float32))
    return made


def model(loss: Any, *own: Any, metrics: Any = (), optimizer: Any = None, **options: Any) -> keras.Model:
    kernel = keras.initializers.GlorotUniform(seed=1)
    last = layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=2), **options)
    made = keras.Sequential([keras.Input((4,)), layers.Dense(5, kernel_initializer=kernel), *own, last])
    made.compile(optimizer or keras.optimizers.SGD(0.1), loss, metrics=list(metrics))
    return made


def namesakes() -> keras.Model:
    """Two functions of one name, and two classes."""
    namesake = type("Halved", (layers.Layer,), {"call": lambda self, x: 3.0 * x, "__module__": "__main__"})
    return model("mse", Halved(), namesake(), metrics=[times(2.0), times(3.0)])


vars(__main__).update(POWER=2.0, mse=mse, keras=keras)
exec(
    "def in_main(y_true, y_pred):\n    return POWER * mse(y_true, y_pred)\n"
    "class InMain(keras.layers.Layer):\n    def call(self, x):\n        return POWER * x\n",
    vars(__main__),
)

MAKES: dict[str, Callable[[], keras.Model]] = {
    "function": lambda: model(mse, metrics=[mse]),
    "closure": lambda: model(times(2.0)),
    "lambda": lambda: model(lambda y, p: 2.0 * mse(y, p), metrics=[lambda y, p: largest(y, p)]),
    "classes": lambda: model(
        Sloped(2.0), Halved(), optimizer=keras.optimizers.SGD(Falling()), metrics=[Largest()]
    ),
    "parts of layers": lambda: model("mse", activation=soft, kernel_constraint=Bounded()),
    "lambda layer": lambda: model("mse", layers.Lambda(lambda x: soft(x))),
    "namesakes": namesakes,
    "of a script": lambda: model(__main__.in_main, __main__.InMain()),  # type: ignore[attr-defined]
    "terse": lambda: model("mse", Terse(2.0)),
    "plain": plain,
    "numbered slot": lambda: model("mse", optimizer=keras.optimizers.Nadam(0.01)),
    "spectral": lambda: seeded(model("mse", layers.SpectralNormalization(layers.Dense(5, name="own")))),
}


def seeded(made: keras.Model) -> keras.Model:
    """Give the same numbers to what draws its first ones without a seed."""
    for number, variable in enumerate(made.variables):
        if len(variable.shape) == 2:
            variable.assign(np.random.default_rng(number).normal(0.0, 0.3, variable.shape))
    return made


def test_they_train_in_processes_as_alone() -> None:
    x, y = models.data(16)
    target = np.stack([y, -y, y], axis=1).astype(np.float32)
    fleet = mf.Fleet({name: make() for name, make in MAKES.items()})
    history = fleet.fit((x, target), strategy="processes", progress=False, **OPTIONS)
    assert not history.failed
    for name, make in MAKES.items():
        alone = make()
        expected = models.fit(alone, x, target, **OPTIONS)
        assert history[name].keys() == expected.keys(), name
        for key, values in expected.items():
            np.testing.assert_allclose(history[name][key], values, rtol=1e-4, atol=1e-6, err_msg=f"{name} {key}")
        models.same(fleet[name], alone)


def test_they_are_copied_and_sent_to_replicas() -> None:
    x, _ = models.data(4)
    for make in MAKES.values():
        made = make()
        copied = adapter.copy_model(made)
        shared = SharedMemoryValue.put(adapter.frozen(made), "the model")
        received = shared.get()
        shared.close()
        for other in (copied, received):
            np.testing.assert_allclose(direct(other, x), direct(made, x), rtol=1e-6, atol=1e-7)
        if callable(made.loss):
            assert type(copied.loss) is type(made.loss)
            assert getattr(copied.loss, "__name__", None) == getattr(made.loss, "__name__", None)


def test_a_model_whose_arguments_keras_forgets_is_refused() -> None:
    assert plain(7).get_config()["width"] == 5, "if Keras tells them now, so may we"
    with pytest.raises(mf.InputError, match=r"is incomplete.*units is 5, not 7"):
        adapter.copy_model(plain(7))
    with pytest.raises(CannotSendError, match=r"is incomplete.*units is 5, not 7"):
        SharedMemoryValue.put(adapter.frozen(plain(7)), "the model")


class Bare(keras.Model):
    """A model without arguments, so that nothing of them can be forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.only = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.only(x)


def test_a_model_with_a_part_that_was_frozen_later_on_is_asked_but_not_copied() -> None:
    x, _ = models.data(4)
    for made in (plain(), Bare()):
        made(x)
        made.layers[0].trainable = False
        shared = SharedMemoryValue.put(adapter.frozen(made), "the model")
        np.testing.assert_allclose(direct(shared.get(), x), direct(made, x), rtol=1e-6, atol=1e-7)
        shared.close()
        with pytest.raises(mf.InputError, match="trainable is True, not False"):  # a copy would be trained whole
            adapter.copy_model(made)


class Unsaid(layers.Layer):
    """A layer of which nothing tells how it was made."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, x: Any) -> Any:
        return self.factor * x

    def get_config(self) -> dict[str, Any]:
        return {}


def test_a_model_that_its_config_can_not_make_is_refused_with_what_to_give_instead() -> None:
    made = model("mse", Unsaid(2.0))
    shared = SharedMemoryValue.put(adapter.frozen(made), "the model")
    with pytest.raises(mf.InputError, match="function without arguments that makes the model"):
        shared.get()
    shared.close()


def direct(made: keras.Model, x: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(made(x, training=False))
