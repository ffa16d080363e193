"""A member's rows are shuffled by its own seed and the epochs it has trained, whatever lanes it has been in."""

from collections.abc import Callable

import pytest
import torch
from tests.fuzz.draws import order, seed_of
from tests.helpers import Arrays, close, fit, mlp, toy, weights
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.types import Strategy

FIRST, SECOND = toy(12, seed=1), toy(16, seed=2)
RATE, SIZE = 0.5, 3


def trained(model: nn.Module, name: str, data: Arrays, epochs: range) -> None:
    """SGD on rows that are in the order of an epoch's number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = (torch.from_numpy(array) for array in data)
    for epoch in epochs:
        for rows in torch.from_numpy(order(seed_of(name), epoch, len(x))).split(SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def wide(fleet: mf.Fleet) -> None:
    """A member of another structure comes, and the members are placed anew."""
    fleet.add("z", mlp(20))
    fleet.compile("sgd", "cross_entropy", lr=RATE, members=["z"])


def alike(fleet: mf.Fleet) -> None:
    fleet.add("z", mlp())
    fleet.compile("sgd", "cross_entropy", lr=RATE, members=["z"])


def again(fleet: mf.Fleet) -> None:
    """One member begins anew, the others do not."""
    fleet.compile("adam", "mse", lr=0.1, members=["c"])
    fleet.compile("sgd", "cross_entropy", lr=RATE, members=["c"])


def in_between(fleet: mf.Fleet) -> None:
    """Verbs that read have lanes of their own."""
    fleet.plan(SECOND, batch_size=5)
    fleet.predict(SECOND[0])
    fleet[fleet.names[0]][0].weight.requires_grad_(False).requires_grad_(True)


CHANGES: dict[str, Callable[[mf.Fleet], object]] = {
    "nothing": lambda fleet: None,
    "a member of another structure joins": wide,
    "a member joins": alike,
    "a member leaves": lambda fleet: fleet.drop("c"),
    "a clone": lambda fleet: fleet.clone("c", as_="z"),
    "one is compiled anew": again,
    "reading": in_between,
}


@pytest.mark.parametrize("strategy", ["auto", "interleaved"])
@pytest.mark.parametrize("devices", ["cpu", "cpu:0,cpu:1"])
@pytest.mark.parametrize("change", CHANGES)
def test_shuffles_go_on_in_lanes_that_are_made_anew(change: str, devices: str, strategy: Strategy) -> None:
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {"a": mlp(), "b": mlp(), "c": mlp(9)}
    alone = {name: mlp(9 if name == "c" else 6) for name in models}
    for name, model in alone.items():
        model.load_state_dict(models[name].state_dict())
    fleet = mf.Fleet(models, devices=devices)
    fleet.compile("sgd", "cross_entropy", lr=RATE)
    fit(fleet, FIRST, epochs=2, batch_size=SIZE, strategy=strategy)
    CHANGES[change](fleet)
    epochs = mf.each({name: 1 if name == "a" else 3 for name in fleet.names})  # so that lanes are placed otherwise
    fit(fleet, SECOND, epochs=epochs, batch_size=SIZE, strategy=strategy)
    for name, count in {"a": 1, "b": 3}.items():
        trained(alone[name], name, FIRST, range(2))
        trained(alone[name], name, SECOND, range(2, 2 + count))
        assert close(weights(fleet[name]), weights(alone[name]))


class Pooled(nn.Module):
    """Takes rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[..., None]).tanh().sum(1)


def test_shuffles_go_on_where_members_get_rows_of_unlike_shapes() -> None:
    torch.manual_seed(0)
    models = {"a": Pooled(), "b": Pooled()}
    alone = {"a": Pooled(), "b": Pooled()}
    for name, model in alone.items():
        model.load_state_dict(models[name].state_dict())
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=RATE)
    fit(fleet, FIRST, epochs=2, batch_size=SIZE)
    own = {"a": SECOND, "b": (SECOND[0][:, :3].copy(), SECOND[1])}
    fit(fleet, mf.each(own), batch_size=SIZE)
    assert len(fleet.plan().lanes) == 1
    fit(fleet, mf.each(own), batch_size=SIZE)  # cut a second time
    for name, model in alone.items():
        trained(model, name, FIRST, range(2))
        trained(model, name, own[name], range(2, 4))
        assert close(weights(fleet[name]), weights(model)), name


def test_shuffles_go_on_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = mf.Fleet.build(mlp, ["a", "b", "c", "d"])
    fleet.compile("sgd", "cross_entropy", lr=RATE)
    alone = {name: mlp() for name in fleet.names}
    for name, model in alone.items():
        model.load_state_dict(fleet[name].state_dict())
    fit(fleet, FIRST, epochs=2, batch_size=SIZE)
    (whole,) = fleet.plan(SECOND, batch_size=SIZE).lanes
    monkeypatch.setenv("MODELFLEET_MEMORY", str((whole.state_bytes + (whole.working_bytes or 0)) // 2))
    fit(fleet, SECOND, epochs=2, batch_size=SIZE)
    assert {lane.wave for lane in fleet.plan(SECOND, batch_size=SIZE).lanes} > {0}
    for name, model in alone.items():
        trained(model, name, FIRST, range(2))
        trained(model, name, SECOND, range(2, 4))
        assert close(weights(fleet[name]), weights(model)), name
