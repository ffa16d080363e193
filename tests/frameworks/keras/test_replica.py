"""Keras models as replicas: asked as they are, their weights in shared memory where the backend can have it so."""

import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models
from tests.replicas.memory import asked_by_two

import modelfleet as mf
from modelfleet.frameworks import keras as adapter
from modelfleet.replicas.models import Source
from modelfleet.workers.inline import InlinePlace
from modelfleet.workers.parcels import SharedMemoryValue

BACKEND = keras.backend.backend()
layers = keras.layers


def direct(model: keras.Model, x: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(x, training=False))


def wide(units: int) -> keras.Model:
    """Its optimizer has as many weights as itself."""
    kernel = keras.initializers.Constant(0.01)
    made = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(units, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(units, kernel_initializer=kernel),
        ]
    )
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return made


def adapted() -> keras.Model:
    """A layer that keeps more than its variables."""
    norm = layers.Normalization()
    norm.adapt(3 * models.data()[0] + 1)
    return keras.Sequential([keras.Input((4,)), norm, layers.Dense(3)])


class Scaled(keras.Model):
    """A model of one's own that tells how it was made; Keras does not know of it."""

    def __init__(self, units: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.hidden = layers.Dense(units, activation="tanh")
        self.table = layers.Embedding(4, units, dtype="bfloat16")

    def call(self, x: Any) -> Any:
        return self.hidden(x) * keras.ops.cast(self.table(x[:, 0] > 0), "float32")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def scaled() -> keras.Model:
    model = Scaled(5)
    model(models.data()[0])
    return model


def test_two_workers_share_the_weights() -> None:
    large = wide(512)
    x, _ = models.data(3)
    for shared, own, answer in asked_by_two(adapter, large, x):
        # TensorFlow's variables have memory of their own: one copy, no stacked one, and no slots.
        expected = (0.0, 1.0) if BACKEND == "tensorflow" else (1.0, 0.0)
        assert (shared, own) == pytest.approx(expected, abs=1e-3)
        np.testing.assert_allclose(answer, direct(large, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: models.mlp(norm=True, rate=0.3), models.two_outputs, scaled, adapted])
def test_every_kind_of_model_comes_out_as_it_was_sent(make: Any) -> None:
    model, (x, _) = make(), models.data(9)
    shared = SharedMemoryValue.put(adapter.frozen(model), "the model")
    received = shared.get()
    shared.close()
    assert type(received) is type(model)
    assert not received.compiled
    (device,) = adapter.choose(None)[:1]
    found = adapter.Replica(received, adapter.native(device), "float32")(x)
    expected = model(x, training=False)
    for answer, own in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(answer, keras.ops.convert_to_numpy(own), rtol=1e-4, atol=1e-5)


def test_the_model_goes_on_being_trained() -> None:
    model, (x, y) = models.mlp(norm=True, rate=0.3), models.data()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before, expected = models.numbers(model, optimizer=False), direct(model, x)
    with mf.Replicas(model, devices="cpu", batch_size=7) as replicas:
        np.testing.assert_allclose(replicas.submit("ada", x).result(), expected, rtol=1e-4, atol=1e-5)
        for own, now in zip(before, models.numbers(model, optimizer=False), strict=True):
            np.testing.assert_array_equal(own, now)
        assert not model.optimizer.built
        models.fit(model, x, y, epochs=2)
        assert replicas.submit("ada", x).result().shape == expected.shape
    assert np.abs(direct(model, x) - expected).max() > 1e-4


def test_what_can_not_be_asked_for() -> None:
    with pytest.raises(mf.InputError, match="is for models of torch and JAX; this one is of keras"):
        mf.Replicas(models.mlp(), precision="bf16")
    with pytest.raises(mf.InputError, match="has no weights yet"):
        mf.Replicas(keras.Sequential([layers.Dense(3)]))


def test_two_classes_of_one_name_are_not_taken_for_each_other() -> None:
    namesake = type("Scaled", (Scaled,), {"__module__": "elsewhere"})
    model = keras.Sequential([keras.Input((4,)), Scaled(4), namesake(4)])
    shared = SharedMemoryValue.put(adapter.frozen(model), "the model")
    received = shared.get()
    shared.close()
    assert [type(layer).__module__ for layer in received.layers] == [__name__, "elsewhere"]


class Forgetful(Scaled):
    """Does not tell its units."""

    def get_config(self) -> dict[str, Any]:
        return keras.Model.get_config(self)


def test_a_config_that_makes_other_weights_is_told_by_name() -> None:
    model = Forgetful(5)
    model(models.data()[0])
    shared = SharedMemoryValue.put(adapter.frozen(model), "the model")
    with pytest.raises(mf.InputError, match=r"has \(4, 2\) as '000.kernel'; expected \(4, 5\)"):
        shared.get()
    shared.close()


def test_a_float64_model_answers_in_float64() -> None:
    x = np.random.default_rng(1).normal(size=(9, 4))
    with sixty_four_bits():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="float64"),
                layers.Dense(8, activation="relu", dtype="float64"),
                layers.Dense(3, dtype="float64"),
            ]
        )
        expected = direct(model, x)
        answer = mf.map(model, {"ada": x}, devices="cpu")["ada"]
    assert answer.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(answer, expected, rtol=1e-15, atol=1e-15)


def sixty_four_bits() -> AbstractContextManager[Any]:
    """JAX alone has to be told."""
    if BACKEND != "jax":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


def test_what_a_factory_makes_has_this_programs_dtype_policy() -> None:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        told = pickle.loads(pickle.dumps(adapter.settings()))
        source = Source.of(make).at([InlinePlace("cpu", "cpu")], 60.0)
    finally:
        keras.config.set_dtype_policy(before)
    assert source.value.layers[0].compute_dtype == "bfloat16"
    with adapter.using(told):  # as in a worker
        assert make().layers[0].compute_dtype == "bfloat16"
    assert make().layers[0].compute_dtype == "float32"
