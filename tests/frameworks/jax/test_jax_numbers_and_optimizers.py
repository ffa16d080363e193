"""JAX members that differ in numbers and in their optimizers: each has the numbers that it has alone."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import modelfleet as mf
from modelfleet import testing

DOUBLE: Any = {"dtype": jnp.float64, "param_dtype": jnp.float64}
X = np.random.default_rng(0).normal(size=(26, 4))
Y = np.random.default_rng(1).normal(size=(26, 2))
MOMENTUM = functools.partial(optax.sgd, momentum=0.9)
OTHER_MOMENTUM = functools.partial(optax.sgd, momentum=0.7)
KINDS = ["adam", "sgd", "adam", MOMENTUM, OTHER_MOMENTUM, "sgd"]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Net(nnx.Module):
    """Two layers with dropout and a slope. There are three combinations of numbers."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 6, rngs=rngs, **DOUBLE)
        self.drop = nnx.Dropout(0.1 * (seed % 3 + 1), rngs=rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs, **DOUBLE)
        self.slope = 0.1 + 0.2 * (seed % 3)

    def __call__(self, x: Any) -> Any:
        return self.last(self.drop(jax.nn.leaky_relu(self.first(x), self.slope)))


def fleet_of(numbers: Sequence[int], kinds: Sequence[Any] = KINDS) -> mf.Fleet:
    fleet = mf.Fleet({f"m{number}": Net(number) for number in numbers})
    fleet.compile(
        mf.each([kinds[number] for number in numbers]),
        "mse",
        metrics=["mae"],
        lr=mf.each([0.01 * (1 + number) for number in numbers]),
        clip_norm=mf.each([(None, 0.3, 0.8)[number % 3] for number in numbers]),
    )
    return fleet


def fit(fleet: mf.Fleet, **options: Any) -> mf.History:
    return fleet.fit((X, Y), batch_size=8, progress=False, **options)


def same(act: Callable[[mf.Fleet], list[Any]]) -> mf.Fleet:
    """Compare every member of a fleet with a fleet of its own, and return the fleet."""
    fleet = fleet_of(range(len(KINDS)))
    (lane,) = fleet.plan((X, Y), batch_size=8).lanes
    assert set(lane.members) == set(fleet.names)
    found = act(fleet)
    for number, name in enumerate(fleet.names):
        alone = fleet_of([number])
        wanted = act(alone)
        ours, theirs = jax.tree.leaves([own[name] for own in found]), jax.tree.leaves([o[name] for o in wanted])
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        difference, where = testing.largest_difference(fleet[name], alone[name])
        assert difference < 1e-10, (name, where)
    return fleet


def test_all_share_a_lane_and_are_as_alone() -> None:
    def act(fleet: mf.Fleet) -> list[Any]:
        first = fit(fleet, epochs=2, validation=(X[:10], Y[:10]), strategy="fused")
        values = fleet.evaluate((X, Y), batch_size=7)
        second = fit(fleet, epochs=1)
        return [first, second, values, fleet.predict(X, batch_size=5)]

    fleet = same(act)
    assert len(fleet._lanes) == 1


def test_members_that_stop_until_one_optimizer_is_left() -> None:
    epochs = {"m0": 1, "m1": 3, "m2": 2, "m3": 1, "m4": 1, "m5": 4}

    def act(fleet: mf.Fleet) -> list[Any]:
        history = fit(fleet, epochs=mf.each({name: epochs[name] for name in fleet.names}))
        return [history, fit(fleet)]

    same(act)


def test_members_with_different_rows() -> None:
    def act(fleet: mf.Fleet) -> list[Any]:
        rows = {name: 26 - 3 * int(name[1]) for name in fleet.names}
        data = mf.each({name: (X[:count], Y[:count]) for name, count in rows.items()})
        return [fleet.fit(data, batch_size=8, epochs=2, progress=False)]

    same(act)


class Change(mf.Callback):
    def __init__(self, fleet: mf.Fleet, rates: Callable[[int, float], float]) -> None:
        self.fleet, self.rates = fleet, rates

    def on_epoch_end(self, run: Any) -> None:
        for name in self.fleet.names:
            model: Any = self.fleet[name]
            model.drop.rate = self.rates(int(name[1]), model.drop.rate)


@pytest.mark.parametrize(
    "rates",
    [
        lambda number, rate: rate * (0.5 + 0.1 * number),
        lambda number, rate: 0.0 if number == 1 else rate,  # which is no longer the same computation
    ],
    ids=["annealed", "branching"],
)
def test_numbers_that_a_callback_changes_are_read_again(rates: Callable[[int, float], float]) -> None:
    def act(fleet: mf.Fleet) -> list[Any]:
        return [fit(fleet, epochs=3, callbacks=[Change(fleet, rates)], validation=(X, Y), shuffle=False)]

    same(act)


class Unlike(mf.Callback):
    """Makes a member another structure for an epoch."""

    def __init__(self, fleet: mf.Fleet) -> None:
        self.fleet, self.epoch = fleet, 0

    def on_epoch_end(self, run: Any) -> None:
        self.epoch += 1
        if "m1" in self.fleet.names:
            model: Any = self.fleet["m1"]
            model.slope = 2 if self.epoch == 1 else 0.3


def test_a_member_of_another_structure_for_a_while() -> None:
    def act(fleet: mf.Fleet) -> list[Any]:
        return [fit(fleet, epochs=4, callbacks=[Unlike(fleet)], validation=(X, Y), shuffle=False)]

    same(act)


def test_optimizers_that_cannot_be_fused_have_a_lane_each_for_all_numbers() -> None:
    fleet = mf.Fleet({f"m{number}": Net(number) for number in range(4)})
    fleet.compile(mf.each([optax.lbfgs(), optax.adam(0.1)] * 2), "mse")
    fit(fleet)
    lanes = sorted(lane.names for lane in fleet._lanes)
    # Two objects that `optax.lbfgs` has made are as equal as two numbers.
    assert lanes == [["m0", "m2"], ["m1", "m3"]]
