"""Weights that no gradient reaches stay as they are, as in the undivided model; so do their optimizers."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.graph.comparing import HYBRID, TWO, assert_same_weights, chain_of, fit, rows, weights
from torch import Tensor, nn
from torch.nn import functional

import modelfleet as mf

ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}


class Spare(nn.Module):
    """A layer, and weights that take no part in its outputs, or only in those of a short batch."""

    def __init__(self, *, short: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6, dtype=torch.float64)
        self.spare = nn.Linear(4, 6, dtype=torch.float64)
        self.short = short

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (self.spare(x) if len(x) == self.short else 0.0)


class Detached(nn.Linear):
    """A layer through which no gradient comes."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach()


def trained(models: Sequence[nn.Module], data: tuple[Tensor, Tensor], *, epochs: int = 3) -> dict[str, Tensor]:
    """The weights after a plain loop over copies of the models."""
    net = nn.Sequential(*copy.deepcopy(models))
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    for _ in range(epochs):
        for start in range(0, len(data[0]), 8):
            x, y = (part[start : start + 8] for part in data)
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return weights(net)


@pytest.mark.parametrize("strategy", ["threads", "processes"])
@pytest.mark.parametrize("make", [Spare, lambda: Detached(4, 6, dtype=torch.float64)], ids=["spare", "detached"])
def test_replicas_leave_weights_without_a_gradient_as_they_are(make: Any, strategy: str) -> None:
    torch.manual_seed(0)
    models = [make(), nn.Linear(6, 3, dtype=torch.float64)]
    expected = trained(models, data := rows(21))
    chain = chain_of(models, [["cpu:0", "cpu:1"], ["cpu:2"]], optimizer="adamw", **ADAMW)
    fit(chain, data, epochs=3, shuffle=False, strategy=strategy)
    assert_same_weights(weights(chain), expected)


def test_a_weight_that_only_one_replica_reaches_is_updated_on_all() -> None:
    torch.manual_seed(0)
    models = [Spare(short=1), nn.Linear(6, 3, dtype=torch.float64)]
    data = rows(17)  # the last batch is one row, which one replica computes
    expected = trained(models, data)
    chain = chain_of(models, [["cpu:0", "cpu:1"], ["cpu:2"]], optimizer="adamw", **ADAMW)
    fit(chain, data, epochs=3, shuffle=False, micro_batches=2)
    assert_same_weights(weights(chain), expected)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_a_node_that_no_gradient_reaches_does_not_change(optimizer: str) -> None:
    encoder, head = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)
    before = copy.deepcopy(encoder)
    graph = mf.Graph({"encoder": encoder, "head": head}, [mf.Edge("encoder", "head", detach=True)], devices=TWO)
    graph.compile(optimizer, "cross_entropy", **ADAMW)
    fit(graph, rows(20), epochs=1)
    assert torch.equal(encoder.weight, before.weight)


@pytest.mark.parametrize("devices", ["cpu", {"encoder": "cpu:0", "heads": ["cpu:1", "cpu:2"]}], ids=["one", "row"])
def test_members_of_a_fleet_keep_weights_that_take_no_part(devices: Any) -> None:
    torch.manual_seed(0)
    encoder = nn.Linear(4, 4, dtype=torch.float64)
    heads: dict[str, nn.Module] = {
        name: nn.Sequential(Spare(), nn.Linear(6, 3, dtype=torch.float64)) for name in "ab"
    }
    expected = {name: trained([encoder.requires_grad_(False), head], rows(21)) for name, head in heads.items()}
    graph = mf.Graph(
        {"encoder": encoder, "heads": mf.Fleet(heads)}, [("encoder", "heads")], outputs="heads", devices=devices
    )
    graph.compile("adamw", "cross_entropy", **ADAMW)
    fit(graph, rows(21), epochs=3, shuffle=False)
    for name, head in heads.items():
        assert_same_weights(weights(nn.Sequential(encoder, head)), expected[name])


@pytest.mark.parametrize("devices", [TWO, HYBRID[:2]], ids=["two", "row"])
@pytest.mark.parametrize("strategy", ["threads", "processes"])
def test_a_callback_that_changes_weights_takes_them_back(devices: Any, strategy: str) -> None:
    class Halve(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            stage = run.sync("chain")["0"]
            with torch.no_grad():
                stage.weight.mul_(0.5)
            run.take("chain")

    def models() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)]

    data = rows(20)
    stages, others = models(), nn.Sequential(*models())
    fit(chain_of(stages, devices), data, epochs=2, shuffle=False, strategy=strategy, callbacks=[Halve()])
    optimizer = torch.optim.Adam(others.parameters(), lr=0.01)
    for _ in range(2):
        for start in range(0, 20, 8):
            optimizer.zero_grad()
            functional.cross_entropy(others(data[0][start : start + 8]), data[1][start : start + 8]).backward()
            optimizer.step()
        with torch.no_grad():
            others[0].weight.mul_(0.5)  # pyrefly: ignore
    assert_same_weights(weights(nn.Sequential(*stages)), weights(others))
