"""Keras members that average and copy the best; they do not distil."""

from typing import Any

import keras
import numpy as np
import pytest

import modelfleet as mf

NAMES = ("a", "b", "c")
X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = np.argmax(X[:, :3], axis=1)


def make_net() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)])


def fleet_of(rates: list[float]) -> mf.Fleet:
    fleet = mf.Fleet.build(make_net, NAMES, seed=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fleet.compile("sgd", loss, lr=mf.each(rates))
    return fleet


def test_members_continue_from_their_mean() -> None:
    fleet = fleet_of([0.0, 0.0, 0.0])
    mean = [np.mean(own, axis=0) for own in zip(*(fleet[name].get_weights() for name in NAMES), strict=True)]
    fleet.fit((X, Y), epochs=1, exchange=mf.Average(every_steps=1), progress=False)
    for name in NAMES:
        for own, expected in zip(fleet[name].get_weights(), mean, strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-6)


def test_the_worst_member_becomes_a_copy_with_another_rate() -> None:
    fleet = fleet_of([0.3, 0.1, 1e-6])
    history = fleet.fit((X, Y), epochs=2, exchange=mf.Exploit("loss", perturb={"lr": (0.5,)}), progress=False)
    ((target, (copied,)),) = history.copied.items()
    rates = dict(zip(NAMES, [0.3, 0.1, 1e-6], strict=True))
    assert copied.hyperparameters["lr"] == pytest.approx(rates[copied.source] / 2)
    assert float(fleet[target].optimizer.learning_rate) == pytest.approx(rates[copied.source] / 2)


def test_they_do_not_distil() -> None:
    with pytest.raises(mf.InputError, match="'a' is a model of keras, which computes its loss itself"):
        fleet_of([0.1, 0.1, 0.1]).fit((X, Y), exchange=mf.Distill(), progress=False)
