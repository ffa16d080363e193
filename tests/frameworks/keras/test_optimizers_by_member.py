"""Keras members with different optimizers in one lane: each has the numbers of Keras's own `fit`."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.frameworks.keras import copy_model

X, Y = (array[:26] for array in models.data(26))
TOLERANCE = 3e-6
MAKERS: list[Any] = [
    lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    lambda: keras.optimizers.SGD(0.02),
    lambda: keras.optimizers.SGD(0.03, momentum=0.9, nesterov=True),
    lambda: keras.optimizers.Nadam(0.01, global_clipnorm=0.3),
    lambda: keras.optimizers.Adam(0.02, amsgrad=True),
    lambda: keras.optimizers.SGD(0.01),
]
NAMES = [f"m{number}" for number in range(len(MAKERS))]


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pair(make: Any = lambda seed: models.mlp(seed=seed)) -> tuple[mf.Fleet, dict[str, keras.Model]]:
    """A fleet, and a copy of each of its models for Keras."""
    own = {name: make(seed) for seed, name in enumerate(NAMES)}
    plain = {name: copy_model(model) for name, model in own.items()}
    fleet = mf.Fleet(own)
    fleet.compile(mf.each([maker() for maker in MAKERS]), loss(), metrics=["accuracy"])
    for model, maker in zip(plain.values(), MAKERS, strict=True):
        model.compile(maker(), loss(), metrics=["accuracy"])
    return fleet, plain


def fit(fleet: mf.Fleet, plain: dict[str, keras.Model], epochs: dict[str, int], **options: Any) -> mf.History:
    history = fleet.fit((X, Y), epochs=mf.each(epochs), batch_size=8, shuffle=False, progress=False, **options)
    for name, model in plain.items():
        model.fit(X, Y, epochs=epochs[name], batch_size=8, shuffle=False, verbose=0)
        models.same(fleet[name], model, tolerance=TOLERANCE)  # and their optimizers
    return history


def test_members_with_different_optimizers_are_fused_and_equal_keras() -> None:
    fleet, plain = pair()
    (lane,) = fleet.plan((X, Y), batch_size=8).lanes
    assert lane.members == ("m0", "m4", "m1", "m5", "m2", "m3")
    assert "2 Adam, 3 SGD, 1 Nadam" in lane.reason
    fit(fleet, plain, dict.fromkeys(NAMES, 2), strategy="fused")
    fit(fleet, plain, {name: 1 + number % 3 for number, name in enumerate(NAMES)}, strategy="fused")
    # Until only one optimizer is left.
    fit(fleet, plain, {name: 3 if name in ("m1", "m5") else 1 for name in NAMES}, strategy="fused")
    assert len(fleet._lanes) == 1


def test_optimizers_move_between_lanes_and_folders(tmp_path: Path) -> None:
    fleet, plain = pair()
    for strategy in ("fused", "interleaved", "fused"):
        fit(fleet, plain, dict.fromkeys(NAMES, 1), strategy=strategy)
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, lambda: models.mlp())
    fit(loaded, plain, dict.fromkeys(NAMES, 1), strategy="fused")


def test_members_with_different_rows_and_one_that_diverges() -> None:
    fleet, plain = pair()
    bad = X.copy()
    bad[4] = np.nan
    rows = {name: 26 - 3 * number for number, name in enumerate(NAMES)}
    data = {name: ((bad if name == "m4" else X)[:count], Y[:count]) for name, count in rows.items()}
    history = fleet.fit(mf.each(data), epochs=2, batch_size=8, shuffle=False, progress=False, strategy="fused")
    assert set(history.failed) == {"m4"}
    for name, model in plain.items():
        if name != "m4":
            model.fit(*data[name], epochs=2, batch_size=8, shuffle=False, verbose=0)
            models.same(fleet[name], model, tolerance=TOLERANCE)


def test_an_optimizer_that_scales_the_loss_has_a_lane_of_its_own() -> None:
    fleet = mf.Fleet.build(lambda: models.mlp(), ["a", "b"])
    kinds = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01, loss_scale_factor=8.0)]
    fleet.compile(mf.each(kinds), loss())
    assert [lane.members for lane in fleet.plan().lanes] == [("a",), ("b",)]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the others have whole gradients of tables")
def test_rows_of_a_table_are_not_fused_over_optimizers() -> None:
    def make() -> keras.Model:
        parts = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Flatten()]
        return keras.Sequential([*parts, keras.layers.Dense(3)])

    x = np.random.default_rng(0).integers(0, 9, (24, 3)).astype(np.int32)
    fleet = mf.Fleet.build(make, ["a", "b", "c", "d"], seed=1)
    plain = {name: copy_model(fleet[name]) for name in fleet.names}
    makers = [keras.optimizers.Adam, keras.optimizers.RMSprop] * 2
    fleet.compile(mf.each([maker(0.01) for maker in makers]), loss())
    fleet.fit((x, Y[:24]), epochs=2, batch_size=8, shuffle=False, progress=False)
    own = dict(zip(fleet.names, makers, strict=True))
    assert all(len({own[name] for name in lane.names}) == 1 for lane in fleet._lanes)
    for (name, model), maker in zip(plain.items(), makers, strict=True):
        model.compile(maker(0.01), loss())
        model.fit(x, Y[:24], epochs=2, batch_size=8, shuffle=False, verbose=0)
        models.same(fleet[name], model, tolerance=TOLERANCE)
