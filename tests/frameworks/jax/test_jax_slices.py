"""JAX members with different optimizers in one lane: each has the numbers that it has alone with its own."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import modelfleet as mf

X = np.random.default_rng(0).normal(size=(26, 4))
Y = np.random.default_rng(1).normal(size=(26, 2))
TOLERANCE = 1e-10

CASES: dict[str, list[Any]] = {
    "adam+sgd": ["adam", "sgd"],
    "sgd": [
        "sgd",
        functools.partial(optax.sgd, momentum=0.9),
        functools.partial(optax.sgd, momentum=0.8, nesterov=True),
    ],
    "adamw+rmsprop+adagrad": ["adamw", "rmsprop", "adagrad"],
    "lion+radam+nadam": ["lion", "radam", "nadam"],
    "adadelta+adamax": ["adadelta", "adamax"],
    "chains": [optax.chain(optax.clip(0.1), optax.adam(0.02)), optax.MultiSteps(optax.sgd(0.1), 2), "adam"],
}
MIXED = [*CASES["adam+sgd"], CASES["sgd"][1]]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["a"]) @ params["b"]


def make(seed: int) -> Any:
    generator = np.random.default_rng(seed)
    return {"a": generator.normal(size=(4, 6)) / 2, "b": generator.normal(size=(6, 2)) / 2}, apply


class Pair:
    """A fleet in one lane, and a fleet of one for every member."""

    def __init__(self, kinds: list[Any]) -> None:
        self.kinds = dict(enumerate(kinds * 2))
        self.names = [f"m{number}" for number in self.kinds]
        self.fleet = self.compiled(self.names)
        self.alone = {name: self.compiled([name]) for name in self.names}

    def compiled(self, names: list[str]) -> mf.Fleet:
        numbers = [self.names.index(name) for name in names]
        fleet = mf.Fleet({name: make(number) for name, number in zip(names, numbers, strict=True)}, seed=3)
        own = [self.kinds[number] for number in numbers]
        named = not any(
            isinstance(kind, optax.GradientTransformation | optax.MultiSteps) for kind in self.kinds.values()
        )
        more: dict[str, Any] = {"lr": mf.each([0.01 * (1 + number) for number in numbers])} if named else {}
        clips = mf.each([(None, 0.3, 0.8)[number % 3] for number in numbers])
        fleet.compile(mf.each(own), "mse", metrics=["mae"], clip_norm=clips, **more)
        return fleet

    def fit(self, data: Any = (X, Y), strategy: Any = "fused", **options: Any) -> mf.History:
        """Fit the fleet and each member alone, and compare."""
        options = {"epochs": 2, "batch_size": 8, "progress": False, **options}
        history = self.fleet.fit(data, strategy=strategy, **options)
        for name, one in self.alone.items():
            own = {
                key: value.values[name] if isinstance(value, mf.Each) and isinstance(value.values, dict) else value
                for key, value in {"data": data, **options}.items()
            }
            try:
                expected = one.fit(own.pop("data"), **own)
            except mf.AllFailedError as error:
                expected = error.history
            assert (name in history.failed) == (name in expected.failed)
            for metric, values in expected[name].items():
                np.testing.assert_allclose(history[name][metric], values, rtol=TOLERANCE, atol=TOLERANCE)
        self.check()
        return history

    def check(self) -> None:
        states = trained(self.fleet)
        for name, one in self.alone.items():
            (expected,) = trained(one).values()
            assert states[name].keys() == expected.keys()
            pairs = [(self.fleet[name][0], one[name][0]), (states[name], expected)]
            for found, wanted in pairs:
                for key, value in wanted.items():
                    np.testing.assert_allclose(found[key], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)


def trained(fleet: mf.Fleet) -> dict[str, dict[str, np.ndarray]]:
    """What a saved fleet would have of every member's optimizer."""
    return {
        name: {f"{part}/{key}": np.asarray(t)[row] for part, own in one.state.items() for key, t in own.items()}
        for names, one in fleet._live_lanes.training_states()
        for row, name in enumerate(names)
    }


@pytest.mark.parametrize("kinds", CASES.values(), ids=CASES.keys())
def test_every_member_of_a_lane_steps_with_its_own_optimizer(kinds: list[Any]) -> None:
    pair = Pair(kinds)
    (lane,) = pair.fleet.plan((X, Y), batch_size=8).lanes
    assert set(lane.members) == set(pair.names)
    pair.fit()
    pair.fit(epochs=mf.each({name: 1 if number < 2 else 3 for number, name in enumerate(pair.names)}))


def test_members_that_stop_until_one_optimizer_is_left() -> None:
    pair = Pair(MIXED)
    pair.fit(epochs=mf.each({name: 4 if number in (1, 4) else 1 for number, name in enumerate(pair.names)}))
    pair.fit()


def test_a_member_that_diverges_is_set_aside() -> None:
    pair = Pair(MIXED)
    bad = X.copy()
    bad[5] = np.nan
    data = mf.each({name: (bad if name == "m2" else X, Y) for name in pair.names})
    assert set(pair.fit(data, shuffle=False).failed) == {"m2"}
    pair.fit()


def test_members_with_different_rows() -> None:
    pair = Pair(MIXED)
    rows = {name: 26 - 3 * number for number, name in enumerate(pair.names)}
    pair.fit(mf.each({name: (X[:count], Y[:count]) for name, count in rows.items()}))


def test_state_moves_between_lanes() -> None:
    pair = Pair(MIXED)
    for strategy, lanes in (("fused", 1), ("interleaved", 6), ("fused", 1)):
        pair.fit(strategy=strategy)
        assert len(pair.fleet._lanes) == lanes


def test_a_saved_fleet_goes_on(tmp_path: Path) -> None:
    pair = Pair(["adam", "sgd", "lion"])
    pair.fit()
    pair.fleet.save(tmp_path)
    pair.fleet = mf.load(tmp_path, lambda: make(0))
    pair.fit()


def test_the_plan_names_the_optimizers() -> None:
    (lane,) = Pair(["adam", "sgd"]).fleet.plan().lanes
    assert lane.reason == "4 of one structure, fused; 2 adam, 2 sgd"


def test_an_optimizer_that_needs_the_loss_of_other_weights_has_a_lane_of_its_own() -> None:
    fleet = mf.Fleet([make(seed) for seed in range(4)])
    fleet.compile(mf.each([optax.lbfgs(), optax.adam(0.1)] * 2), "mse")
    fleet.fit((X, Y), batch_size=8, progress=False)
    assert sorted(lane.names for lane in fleet._lanes) == [["0", "2"], ["1", "3"]]
