"""Keras models are cut between their layers: the stages share the layers, and compute what the model computes."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from tests.frameworks.keras.models import gained, mlp

import modelfleet as mf
from modelfleet.frameworks.keras import copy_model

layers = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 6, 8), dtype=np.float32)


def skipping() -> keras.Model:
    """Skips over any cut, an output from the middle, and an operation that is no layer."""
    given = keras.Input((6, 8), name="given")
    first = layers.Dense(16, activation="relu")(given)
    norm = layers.BatchNormalization()(first)
    dropped = layers.Dropout(0.5, seed=1)(layers.Dense(16)(norm))
    added = layers.Add()([first, dropped])
    joined = layers.Concatenate()([layers.Dense(16)(added), first, given])
    return keras.Model(given, {"main": layers.Dense(3)(ops.mean(joined, axis=1)), "aside": norm})


def run(cut: mf.Split, leaves: list[np.ndarray], *, training: bool = False) -> Any:
    """Run the stages one after the other, with what goes over the links."""
    made: dict[tuple[str, int], Any] = {
        ("", number): ops.convert_to_tensor(leaf) for number, leaf in enumerate(leaves)
    }
    found: Any = None
    for name, stage in cut.stages.items():
        own = [made[link.source, link.output] for link in cut.links if link.target == name]
        found = stage(own[0] if len(own) == 1 else own, training=training)
        made |= {(name, number): part for number, part in enumerate(found if isinstance(found, list) else [found])}
    return found


def assert_equal(found: Any, expected: Any) -> None:
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_allclose(
            ops.convert_to_numpy(one), ops.convert_to_numpy(other), rtol=1e-6, atol=1e-6
        ),
        found,
        expected,
    )


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_of_a_functional_model_compute_what_it_computes(stages: int) -> None:
    model = skipping()
    before = [ops.convert_to_numpy(variable).copy() for variable in model.variables]
    cut = mf.split(model, stages, X)
    assert len(cut.stages) == stages
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)
    for rows in (4, 1, 7):
        x = RANDOM.standard_normal((rows, 6, 8), dtype=np.float32)
        assert_equal(run(cut, [x]), model(x, training=False))


def test_stages_train_as_the_model_does() -> None:
    # Dropout draws from seeds that are variables: a copy draws the same.
    model = skipping()
    other = copy_model(model)
    cut = mf.split(model, 3, X)
    assert_equal(run(cut, [X], training=True), other(X, training=True))
    for one, two in zip(model.variables, other.variables, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(one), ops.convert_to_numpy(two), rtol=1e-6)


def test_stages_share_the_variables_by_their_names() -> None:
    model = skipping()
    cut = mf.split(model, 3, X)
    own = [variable for stage in cut.stages.values() for variable in stage.variables]
    assert {id(variable) for variable in own} == {id(variable) for variable in model.variables}
    assert len(own) == len(model.variables)
    names = [name for paths in cut.paths.values() for name in paths.values()]
    assert len(set(names)) == len(model.variables)
    assert sum(cut.parameters) == model.count_params()


def test_stages_can_be_copied() -> None:
    cut = mf.split(skipping(), 3, X)
    copies = {name: copy_model(stage) for name, stage in cut.stages.items()}
    given = ops.convert_to_tensor(X)
    assert_equal(copies["stage0"](given), cut.stages["stage0"](given))


def test_a_sequential_and_several_inputs_can_be_cut() -> None:
    model = mlp(norm=True, rate=0.3)
    x = RANDOM.standard_normal((4, 4), dtype=np.float32)
    assert_equal(run(mf.split(model, 3, x), [x]), model(x, training=False))
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    both = keras.Model({"a": a, "b": b}, layers.Dense(2)(layers.Add()([layers.Dense(4)(a), b])))
    cut = mf.split(both, 2, {"b": 2 * x, "a": x})  # the order of the example's leaves counts
    assert_equal(run(cut, [2 * x, x]), both({"a": x, "b": 2 * x}))


def test_a_layer_that_is_called_twice_and_a_mask_stay_in_one_stage() -> None:
    given = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(given)
    shared = layers.Dense(4)
    model = keras.Model(given, layers.Dense(2)(shared(layers.Dense(4)(shared(layers.LSTM(4)(embedded))))))
    words = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]], np.int32)
    with pytest.raises(mf.InputError, match="3 pieces at most"):
        mf.split(model, 5, words)
    cut = mf.split(model, 3, words)
    assert_equal(run(cut, [words]), model(words))


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(mf.InputError, match="a `call` of its own"):
        mf.split(gained(), 2, np.zeros((2, 4), np.float32))
    with pytest.raises(mf.InputError, match="does not accept the example"):
        mf.split(mlp(), 2, np.zeros((2, 5), np.float32))
    with pytest.raises(mf.InputError, match="has other inputs than the"):
        mf.split(mlp(), 2, (np.zeros((2, 4)), np.zeros((2, 4))))
