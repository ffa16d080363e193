"""Plain torch loops that members exchange in, by hand, and the fleets that must equal them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf

Rows = tuple[Tensor, Tensor]
Models = list[Any]
"""Modules. They are indexed by layer, which `nn.Module` does not promise."""
LossOf = Callable[[Models, int, Tensor, Tensor], Tensor]
NAMES = ["a", "b", "c"]
RATES = [0.1, 0.05, 0.01]
BATCH = 5
TOLERANCE = 1e-10

Way = dict[str, Any]
HERE: list[Way] = [
    {"strategy": "fused"},
    {"strategy": "interleaved"},
    {"strategy": "threads"},
    {"strategy": "threads", "devices": "cpu:0,cpu:1"},
]
IN_WORKERS: list[Way] = [
    {"strategy": "processes"},
    {"strategy": "processes", "devices": "cpu:0,cpu:1"},
]


def ways(*kinds: Sequence[Way]) -> Any:
    """A mark that runs a test for each way to run the members."""
    slow = pytest.mark.slow
    params = [
        pytest.param(way, id=" ".join(way.values()), marks=slow if way in IN_WORKERS else ())
        for kind in kinds
        for way in kind
    ]
    return pytest.mark.parametrize("way", params)


def net(width: int = 6) -> nn.Sequential:
    """Four numbers in, three classes out, with running statistics."""
    layers = [nn.Linear(4, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, 3)]
    return nn.Sequential(*layers).double()


def nets(count: int = 3) -> Models:
    """Models of one structure, with other weights each."""
    torch.manual_seed(0)
    return [net() for _ in range(count)]


def rows(count: int, seed: int = 0) -> Rows:
    """Rows of four numbers, and a class for each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, (x[:, :3] + 0.3 * torch.randn(count, 3, generator=generator, dtype=torch.float64)).argmax(1)


def data_of(*counts: int) -> list[Rows]:
    """Each member's own rows."""
    return [rows(count, seed) for seed, count in enumerate(counts)]


def fleet_of(models: Models, devices: str = "auto", **recipe: Any) -> mf.Fleet:
    """A compiled fleet of copies of these models: Adam on cross-entropy, a learning rate each."""
    fleet = mf.Fleet(dict(zip(NAMES, map(copy.deepcopy, models), strict=False)), devices=devices, seed=3)
    whole: dict[str, Any] = {
        "optimizer": "adam",
        "loss": "cross_entropy",
        "lr": mf.each(RATES[: len(models)]),
        **recipe,
    }
    fleet.compile(**whole)
    return fleet


def fit(fleet: mf.Fleet, data: Any, exchange: Any, way: Way | None = None, **given: Any) -> Any:
    """Fit in silence, on rows in their order."""
    strategy = (way or {}).get("strategy", "auto")
    own = mf.each(list(data)) if isinstance(data, list) else data
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "progress": False, **given}
    return fleet.fit(own, exchange=exchange, strategy=strategy, **options)


def fleet_in(way: Way, models: Models, **recipe: Any) -> mf.Fleet:
    """A fleet on the devices of a way."""
    return fleet_of(models, way.get("devices", "auto"), **recipe)


def adams(models: Models) -> list[torch.optim.Optimizer]:
    """The optimizers of `fleet_of`."""
    return [torch.optim.Adam(model.parameters(), lr=rate) for model, rate in zip(models, RATES, strict=False)]


def train(
    models: Models,
    data: Sequence[Rows],
    optimizers: Sequence[torch.optim.Optimizer],
    epochs: int,
    *,
    loss_of: LossOf | None = None,
    after_step: Callable[[int], None] = lambda step: None,
    after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Train the models as a plain loop does, side by side, step by step.

    `loss_of(models, number, x, y)` is the loss of a model, given copies of all from before the step.
    """
    step = 0
    for epoch in range(1, epochs + 1):
        for start in range(0, max(len(x) for x, _ in data), BATCH):
            losses = []
            before = [] if loss_of is None else list(map(copy.deepcopy, models))
            for number, (model, (x, y)) in enumerate(zip(models, data, strict=True)):
                xs, ys = x[start : start + BATCH], y[start : start + BATCH]
                if len(xs):
                    own = F.cross_entropy(model(xs), ys) if loss_of is None else loss_of(before, number, xs, ys)
                    losses.append((own, optimizers[number]))
            for loss, optimizer in losses:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            step += 1
            after_step(step)
        after_epoch(epoch)


def average(models: Models, shares: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The weighted mean of every floating-point tensor of some models."""
    weights = torch.tensor(list(shares or [1.0] * len(models)), dtype=torch.float64)
    weights = weights / weights.sum()
    states = [model.state_dict() for model in models]
    return {
        name: torch.stack([weight * state[name] for weight, state in zip(weights, states, strict=True)]).sum(0)
        for name, tensor in states[0].items()
        if tensor.is_floating_point()
    }


def give(model: Any, values: dict[str, Tensor]) -> None:
    """Write values into a model."""
    model.load_state_dict({**model.state_dict(), **values})


def difference(fleet: mf.Fleet, models: Models) -> float:
    """The largest difference between the members' weights and those of models."""
    return max(
        float((fleet[name].state_dict()[key] - value).abs().max())
        for name, model in zip(fleet.names, models, strict=True)
        for key, value in model.state_dict().items()
    )
