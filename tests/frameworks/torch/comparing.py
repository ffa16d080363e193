"""A fleet beside plain torch loops, in float64: for tests of what fusing may not change."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import modelfleet as mf

Objective = Callable[[nn.Module, Any], Any]
Data = tuple[Tensor, Tensor]


def rows(count: int = 12, classes: int = 3) -> Data:
    """Rows of four numbers in float64, and a class for each."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(count, 4)), generator.integers(0, classes, count)
    return torch.tensor(x), torch.tensor(y)


def build(make: Callable[[], nn.Module], members: int = 3) -> list[nn.Module]:
    """Models in float64 with weights of their own."""
    models = []
    for seed in range(members):
        torch.manual_seed(seed)
        models.append(make().double())
    return models


def compiled(models: Sequence[nn.Module], **recipe: Any) -> mf.Fleet:
    """A fleet that trains by SGD with momentum, at learning rates that differ by member."""
    fleet = mf.Fleet(list(models))
    rates = [0.1 * (place + 1) for place in range(len(models))]
    fleet.compile("sgd", momentum=0.9, lr=mf.each(rates), **recipe)
    return fleet


def fit(fleet: mf.Fleet, data: Any, *, epochs: int = 2, batch_size: int = 4, **options: Any) -> mf.History:
    """Train in silence, in the order of the rows."""
    return fleet.fit(data, epochs=epochs, batch_size=batch_size, shuffle=False, progress=False, **options)


def plainly(
    models: Sequence[nn.Module],
    objective: Objective,
    data: Data,
    *,
    epochs: int = 2,
    batch_size: int = 4,
    after_epoch: Callable[[], None] | None = None,
    before: Callable[[], None] | None = None,
) -> list[nn.Module]:
    """Copies of the models, trained one after the other by a loop as anybody would write it."""
    trained = []
    for place, model in enumerate(models):
        if before is not None:
            before()
        own = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1 * (place + 1), momentum=0.9)
        for _ in range(epochs):
            for start in range(0, len(data[0]), batch_size):
                x, y = (part[start : start + batch_size].clone() for part in data)
                optimizer.zero_grad()
                loss = objective(own, (x, y))
                loss = loss[0] if isinstance(loss, tuple) else loss
                loss.backward()
                optimizer.step()
            if after_epoch is not None:
                after_epoch()
        trained.append(own)
    return trained


def assert_equal(models: Sequence[nn.Module], expected: Sequence[nn.Module], bound: float = 1e-12) -> None:
    """Check that every weight and buffer agrees."""
    for place, (model, other) in enumerate(zip(models, expected, strict=True)):
        theirs: dict[str, Tensor] = other.state_dict()
        for name, tensor in model.state_dict().items():
            off = (tensor - theirs[name]).abs().max().item()
            assert off <= bound, f"{name} of member {place} is off by {off}"


def reason(fleet: mf.Fleet, data: Any, batch_size: int = 4) -> str | None:
    """Why the members are not fused; None if they are."""
    plan = fleet.plan(data, batch_size=batch_size)
    if len(plan.lanes) == 1:
        return None
    return "; ".join(lane.reason or "no reason given" for lane in plan.lanes)
