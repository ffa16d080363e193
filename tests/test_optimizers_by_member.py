"""An optimizer for each member: every member steps as it would alone with its own."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.helpers import fit, mlp, toy

import modelfleet as mf
from modelfleet import testing

X, Y = toy()
NAMES = ["a", "b", "c", "d"]
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 8}

SGD = functools.partial(torch.optim.SGD, momentum=0.9)
TORCH = mf.each(["adam", SGD, "adam", torch.optim.SGD])
OPTAX = mf.each(["adam", functools.partial(optax.sgd, momentum=0.9), "adam", optax.sgd])
RATES = dict(zip(NAMES, (0.01, 0.02, 0.03, 0.04), strict=True))


def pair(rngs: Any = None) -> Any:
    params = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}
    return params, lambda params, x: jnp.tanh(x) @ params["w"]


def fleet_of(factory: Any, optimizer: Any, **more: Any) -> mf.Fleet:
    fleet = mf.Fleet.build(factory, NAMES, seed=1)
    fleet.compile(optimizer, "cross_entropy", lr=mf.each(RATES), **more)
    return fleet


@pytest.mark.parametrize(("factory", "optimizer"), [(mlp, TORCH), (pair, OPTAX)])
def test_every_member_steps_with_its_own_optimizer(factory: Any, optimizer: mf.Each) -> None:
    fleet = fleet_of(factory, optimizer, clip_norm=mf.each([None, 0.5, 0.1, None]))
    clips = dict(zip(NAMES, (None, 0.5, 0.1, None), strict=True))
    own = dict(zip(NAMES, list(optimizer.values), strict=True))
    expected = {
        name: testing.alone(
            fleet[name],
            name,
            (X, Y),
            optimizer=own[name],
            loss="cross_entropy",
            seed=1,
            clip_norm=clips[name],
            lr=RATES[name],
            **OPTIONS,
        )
        for name in NAMES
    }
    fit(fleet, (X, Y), **OPTIONS)
    for name in NAMES:
        difference, where = testing.largest_difference(fleet[name], expected[name])
        assert difference < 1e-5, (name, where)


def test_members_with_different_optimizers_share_a_lane_and_the_plan_says_which() -> None:
    (lane,) = fleet_of(mlp, TORCH).plan().lanes
    assert lane.members == ("a", "c", "b", "d")
    assert lane.reason == "4 of one structure, fused; 2 adam, 2 sgd"


@pytest.mark.parametrize(
    ("factory", "optimizer"), [(mlp, TORCH), (pair, mf.each(["adam", optax.sgd, "adam", "sgd"]))]
)
def test_a_saved_fleet_goes_on(factory: Any, optimizer: mf.Each, tmp_path: Path) -> None:
    fleet = fleet_of(factory, optimizer)
    fit(fleet, (X, Y), **OPTIONS)
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, factory)
    for one in (fleet, loaded):
        fit(one, (X, Y), **OPTIONS)
    for name in NAMES:
        difference, where = testing.largest_difference(fleet[name], loaded[name])
        assert difference < 1e-6, (name, where)


def test_members_keep_their_saved_state_only_if_their_own_optimizer_is_the_same(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(mlp, ["a", "b"])
    fleet.compile(mf.each(["adam", "sgd"]), lambda output, target: output.square().mean(), lr=0.1)
    fit(fleet, (X, Y), **OPTIONS)
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, mlp)
    with pytest.warns(mf.FleetWarning, match="'b' was saved with the optimizer 'sgd', and is compiled with ano"):
        loaded.compile(mf.each([torch.optim.Adam, "lion"]), "cross_entropy", lr=0.1)
    fit(loaded, (X, Y), **OPTIONS)
    steps = {name: int(lane.steps[lane.positions[name]]) for lane in loaded._lanes for name in lane.names}
    assert steps == {"a": 12, "b": 6}


def test_the_history_has_every_members_optimizer() -> None:
    fleet = mf.Fleet.build(mlp, ["a", "b"])
    fleet.compile(mf.each(["adam", "sgd"]), "cross_entropy")
    history = fit(fleet, (X, Y), **OPTIONS)
    assert [history.hyperparameters[name]["optimizer"] for name in "ab"] == ["adam", "sgd"]


@pytest.mark.parametrize("factory", [mlp, pair])
def test_a_hyperparameter_that_one_optimizer_lacks_is_named_with_the_member(factory: Any) -> None:
    fleet = mf.Fleet.build(factory, ["a", "b"])
    with pytest.raises(mf.InputError, match=r"member 'b': unknown hyperparameter of adam 'momentum'"):
        fleet.compile(mf.each(["sgd", "adam"]), "cross_entropy", momentum=mf.each([0.9, 0.8]))


@pytest.mark.parametrize("factory", [mlp, pair])
def test_an_unknown_optimizer_is_named_with_the_member(factory: Any) -> None:
    fleet = mf.Fleet.build(factory, ["a", "b"])
    with pytest.raises(mf.InputError, match=r"member 'b': unknown optimizer 'adm'.*adam"):
        fleet.compile(mf.each(["sgd", "adm"]), "cross_entropy")
    with pytest.raises(mf.InputError, match=r"optimizer: each\(...\) has 1 values"):
        fleet.compile(mf.each(["sgd"]), "cross_entropy")
    with pytest.raises(mf.InputError, match=r"optimizer is a list.*optimizer=mf.each"):
        fleet.compile(["sgd", "adam"], "cross_entropy")
