"""Members that join after `compile` gave every member its own value: only clones have one at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import fit, mlp, toy, weights
from torch import nn

import modelfleet as mf
from modelfleet.types import Strategy

X, Y = (torch.tensor(array) for array in toy(24))
DATA = X.double(), Y
RATES = {"a": 0.05, "b": 0.02}


def net() -> nn.Module:
    return mlp().double()


def trained(**recipe: Any) -> mf.Fleet:
    fleet = mf.Fleet.build(net, ["a", "b"], seed=1)
    fleet.compile("sgd", "cross_entropy", lr=mf.each(list(RATES.values())), momentum=0.9, **recipe)
    train(fleet)
    return fleet


def train(fleet: mf.Fleet) -> None:
    fit(fleet, DATA, epochs=2, batch_size=24, shuffle=False)


def alone(lr: float, model: nn.Module, steps: int) -> nn.Module:
    """Train a model by a plain loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(DATA[0]), DATA[1]).backward()
        optimizer.step()
    return model


def assert_like(fleet: mf.Fleet, name: str, expected: nn.Module) -> None:
    for path, tensor in weights(expected).items():
        torch.testing.assert_close(weights(fleet[name])[path], tensor, rtol=0, atol=1e-12)


def initial(name: str) -> nn.Module:
    return mf.Fleet.build(net, ["a", "b"], seed=1)[name]


@pytest.mark.parametrize("path", ["unsaved", "saved"])
def test_a_clone_goes_on_with_the_values_and_the_state_of_its_model(path: str, tmp_path: Path) -> None:
    fleet = trained(clip_norm=mf.each([1e9, 1e8]))
    fleet.clone("a", as_="d")
    fleet.clone("d", as_="e")
    if path == "saved":
        fleet.save(tmp_path)
        fleet = mf.load(tmp_path, net)
    assert fleet.predict(DATA[0]).keys() == {"a", "b", "d", "e"}
    assert len(fleet.plan().lanes) == 1
    train(fleet)
    for name, model in {"a": "a", "b": "b", "d": "a", "e": "a"}.items():
        assert_like(fleet, name, alone(RATES[model], initial(model), 4))
    assert {"lr": 0.05, "clip_norm": 1e9}.items() <= fleet._hyperparameters("e").items()


def test_a_clone_is_no_member_of_a_fleet_that_shares_the_recipe() -> None:
    fleet = trained()
    part = fleet[["a"]]
    fleet.clone("a", as_="d")
    part.add("d", net())
    with pytest.raises(mf.InputError, match="no value for 'd'"):
        fit(part, DATA)


def test_the_clone_of_a_member_without_a_value_has_none_either() -> None:
    fleet = trained()
    fleet.add("d", net())
    fleet.drop("b")
    fleet.clone("d", as_="b")
    with pytest.raises(mf.InputError, match=r"lr: each\(...\) has no value for"):
        fit(fleet[["b"]], DATA)


@pytest.mark.parametrize("path", ["unsaved", "saved"])
def test_the_others_do_not_wait_for_the_value_of_a_new_member(path: str, tmp_path: Path) -> None:
    fleet = trained()
    torch.manual_seed(0)
    fleet.add("d", net())
    torch.manual_seed(0)
    new = net()
    if path == "saved":
        fleet.save(tmp_path)
        fleet = mf.load(tmp_path, net)
    found = fleet.predict(DATA[0])
    torch.testing.assert_close(torch.as_tensor(found["d"]), new(DATA[0]).detach())
    assert {name for lane in fleet.plan().lanes for name in lane.members} == {"a", "b", "d"}
    for verb in (train, lambda one: one.evaluate(DATA)):
        with pytest.raises(mf.InputError, match=r"lr: each.* 'd'.*fleet.compile\(..., members=\['d'\]\)"):
            verb(fleet)
    fleet.compile("sgd", "cross_entropy", lr=0.03, momentum=0.9, members=["d"])
    train(fleet)
    for name, rate in RATES.items():
        assert_like(fleet, name, alone(rate, initial(name), 4))
    assert_like(fleet, "d", alone(0.03, new, 2))


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_a_clone_is_saved_with_its_originals_state(tmp_path: Path, strategy: Strategy) -> None:
    fleet = mf.Fleet.build(net, ["a", "b"], seed=1)
    fleet.compile("adam", "cross_entropy", lr=0.05)
    fit(fleet, DATA, epochs=2, batch_size=24, shuffle=False, strategy=strategy)
    fleet.clone("a", as_="c")
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, factory=net)
    for one in (fleet, loaded):
        fit(one, DATA, epochs=2, batch_size=24, shuffle=False, strategy=strategy)
    for name in fleet.names:
        found, expected = weights(loaded[name]), weights(fleet[name])
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name
