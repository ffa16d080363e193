"""Members that hold the very same module: a step of one must not set the mode in which another runs it."""

import threading
from collections.abc import Mapping

import pytest
import torch
from tests.helpers import close, fit, toy, weights
from torch import Tensor, nn

import modelfleet as mf

X, Y = toy(24)


class Trunk(nn.Module):
    """Frozen, and unlike in training and in evaluation. It notes who runs it, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        RUNNING.append(threading.get_ident())
        return self.layer(x) * (1.0 if self.training else 3.0)


RUNNING: list[int] = []


def models() -> dict[str, nn.Sequential]:
    """Unlike ones, so that each is in a lane of its own."""
    torch.manual_seed(0)
    trunk = Trunk().requires_grad_(False)
    heads = {
        "a": nn.Linear(6, 3),
        "b": nn.Sequential(nn.Tanh(), nn.Linear(6, 3)),
        "c": nn.Sequential(nn.Linear(6, 3)),
    }
    return {name: nn.Sequential(trunk, head) for name, head in heads.items()}


def compiled(members: Mapping[str, nn.Module], devices: str = "cpu") -> mf.Fleet:
    fleet = mf.Fleet(members, devices=devices)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    return fleet


def test_threads_are_refused_for_members_that_hold_one_module() -> None:
    fleet = compiled(models())
    with pytest.raises(mf.StrategyError, match=r"'a' and 'b' hold the same module '0'.*deepcopy.*interleaved"):
        fit(fleet, (X, Y), strategy="threads")
    fit(fleet, (X, Y), strategy="interleaved")
    for model in (fleet[name] for name in fleet.names):
        model[0] = Trunk().requires_grad_(False)
    fit(fleet, (X, Y), strategy="threads")


def test_members_that_hold_one_module_are_trained_and_read_in_one_thread_on_two_devices() -> None:
    fleet, alone = compiled(models(), "cpu:0,cpu:1"), models()
    RUNNING.clear()
    history = fit(fleet, (X, Y), validation=(X, Y), epochs=2, batch_size=8, shuffle=False)
    evaluated = fleet.evaluate((X, Y))
    predicted = fleet.predict(X)
    assert {lane.device for lane in fleet.plan((X, Y)).lanes} == {"cpu:0", "cpu:1"}
    assert fleet.plan((X, Y)).sharing == "interleaved"
    assert set(RUNNING) == {threading.get_ident()}
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for name, model in alone.items():
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        for _ in range(2):
            for rows in range(0, 24, 8):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows : rows + 8]), y[rows : rows + 8]).backward()
                optimizer.step()
        assert close(weights(fleet[name]), weights(model)), name
        assert all(module.training for module in fleet[name].modules())
        with torch.no_grad():
            model.eval()
            outputs = model(x)
            model.train()
        loss = nn.functional.cross_entropy(outputs, y).item()
        assert evaluated[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert history[name]["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(torch.from_numpy(predicted[name]), outputs, atol=1e-5)


def test_fused_lanes_with_a_common_trunk_run_in_threads_as_before() -> None:
    torch.manual_seed(0)
    trunk = nn.Linear(4, 6).requires_grad_(False)
    fleet = compiled({name: nn.Sequential(trunk, nn.Linear(6, 3)) for name in "abcd"}, "cpu:0,cpu:1")
    fit(fleet, (X, Y), strategy="threads")
    assert [lane.members for lane in fleet.plan((X, Y)).lanes] == [("a", "b"), ("c", "d")]
