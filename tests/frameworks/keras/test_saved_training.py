"""Saved Keras members: a fleet that was loaded goes on as the unsaved one, with the models' own optimizers."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf

X, Y = models.data(22)
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False}
LOSS = "sparse_categorical_crossentropy"


def make(seed: int = 0) -> keras.Model:
    return models.mlp(seed=seed % 100, rate=0.3, norm=True)


class Stepping(keras.Model):
    """A model with a train step of its own, which runs by the functions of its own `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.top = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.top(x)

    def train_step(self, *args: Any, **options: Any) -> Any:
        return super().train_step(*args, **options)


def stepping() -> keras.Model:
    model = Stepping()
    model(X[:2])
    return model


@keras.saving.register_keras_serializable("saved")
def registered(target: Any, output: Any) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(target, output, from_logits=True))


def importable(target: Any, output: Any) -> Any:
    return registered(target, output)


def mse(target: Any, output: Any) -> Any:
    """Not Keras's loss of this name."""
    return registered(target, output)


def saved(fleet: mf.Fleet, folder: Path, factory: Any = make, **options: Any) -> mf.Fleet:
    fleet.save(folder)
    return mf.load(folder, factory, **options)


def go_on(*fleets: mf.Fleet) -> None:
    """Train fleets, which come to the same weights and optimizers."""
    for fleet in fleets:
        fleet.fit((X, Y), **OPTIONS)
    for name in fleets[0].names:
        models.same(fleets[1][name], fleets[0][name], tolerance=1e-7)


def test_members_of_a_recipe_go_on(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(make, ["a", "b"], seed=1)
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=mf.each([0.01, 0.03]))
    unused = saved(fleet, tmp_path)  # no step was taken yet
    go_on(fleet, unused)
    loaded = saved(fleet, tmp_path)
    assert int(loaded["a"].optimizer.iterations.numpy()) == 6  # the model has it, too
    go_on(fleet, loaded)


@pytest.mark.parametrize("factory", [make, stepping])
def test_models_with_a_compile_of_their_own_go_on(factory: Any, tmp_path: Path) -> None:
    own = {name: factory() for name in "ab"}
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)
    own["a"].compile(keras.optimizers.SGD(decay, momentum=0.9), registered, metrics=["accuracy"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    own["b"].compile(models.adam(0.02), loss)
    own["b"].fit(X, Y, batch_size=8, verbose=0, shuffle=False)  # by Keras itself
    loaded = saved(mf.Fleet(own), tmp_path, factory)
    fleet = mf.Fleet(own)
    go_on(fleet, loaded)
    go_on(fleet, saved(loaded, tmp_path, factory))


def test_functions_that_keras_cannot_find_again(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(make, ["a", "b"])
    fleet.compile("adam", mse, lr=0.01)
    fleet.fit((X, Y), **OPTIONS)
    loaded = saved(fleet, tmp_path)
    told = (
        r"its loss is 'tests.frameworks.keras.test_saved_training:mse', which load imports only with allow_import"
    )
    with pytest.raises(mf.InputError, match=told):
        loaded.fit((X, Y), **OPTIONS)
    assert loaded.predict(X)["a"].shape == (22, 3)
    trusted = saved(loaded, tmp_path, allow_import=True)
    loaded.compile("adam", mse, lr=0.01)  # with the same optimizer, whose state goes on
    again = saved(fleet, tmp_path, allow_import=True)
    for one in (fleet, loaded):
        one.fit((X, Y), **OPTIONS)
    go_on(trusted, again)
    for name in fleet.names:
        for one in (loaded, trusted):
            models.same(one[name], fleet[name], tolerance=1e-7)


def test_a_recipe_that_a_models_own_compile_replaced_is_not_used(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(make, ["a"])
    fleet.compile("adam", "cross_entropy", lr=0.01)
    fleet["a"].compile(models.adam(0.1), lambda target, output: registered(target, output))
    loaded = saved(fleet, tmp_path)
    with pytest.raises(
        mf.InputError, match=r"its loss was a lambda of .*test_saved_training, which can't be saved"
    ):
        loaded.fit((X, Y), **OPTIONS)
    fleet["a"].compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert isinstance(saved(fleet, tmp_path)["a"].optimizer, keras.optimizers.SGD)


def test_a_model_that_was_compiled_to_be_evaluated_only(tmp_path: Path) -> None:
    model = make()
    model.compile(optimizer=None, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    loaded = saved(mf.Fleet({"a": model}), tmp_path)
    assert loaded.evaluate((X, Y)) == mf.Fleet({"a": model}).evaluate((X, Y))


def test_without_the_optimizer(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(make, ["a"])
    fleet.compile("adam", "cross_entropy", lr=0.01)
    fleet.fit((X, Y), **OPTIONS)
    fleet.save(tmp_path, optimizer=False)
    loaded = mf.load(tmp_path, make)
    assert loaded["a"].compiled
    assert int(np.sum(loaded["a"].optimizer.iterations.numpy())) == 0


def test_members_with_an_optimizer_each_go_on(tmp_path: Path) -> None:
    def make(seed: int = 0) -> keras.Model:
        return models.mlp(seed=seed % 100, rate=0.0)

    fleet = mf.Fleet.build(make, ["a", "b", "c"], seed=1)
    fleet.compile(mf.each(["adam", "sgd", "adam"]), "cross_entropy", lr=mf.each([0.01, 0.03, 0.02]))
    assert [lane.members for lane in fleet.plan().lanes] == [("a", "c", "b")]
    expected = keras.models.clone_model(fleet["b"])
    expected.set_weights(fleet["b"].get_weights())
    expected.compile(keras.optimizers.SGD(0.03), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False}
    expected.fit(X, Y, verbose=0, **options)
    fleet.fit((X, Y), progress=False, **options)
    models.same(fleet["b"], expected, tolerance=2e-6)
    go_on(fleet, saved(fleet, tmp_path, make))
    with pytest.raises(mf.InputError, match=r"member 'b': Adam\(momentum=0.8\) gave .*momentum"):
        fleet.compile(mf.each(["sgd", "adam", "sgd"]), "mse", momentum=mf.each([0.9, 0.8, 0.7]))
