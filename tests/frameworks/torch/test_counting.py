"""Steps counted per parameter, as torch counts them: freezing, unfreezing, parameters that sit steps out."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import modelfleet as mf
from modelfleet.each import each

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LR = [1e-3, 1e-2, 3e-2]
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.5, "initial_accumulator_value": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {"betas": (0.5, 0.9), "momentum_decay": 0.5}),
    (torch.optim.RAdam, {"betas": (0.5, 0.9)}),
    (torch.optim.Adamax, {}),
]
IDS = [f"{kind.__name__}-{'-'.join(given)}" for kind, given in CASES]


def net(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def step(model: nn.Module, update: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    update.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    update.step()


def fleet_of(models: list[nn.Module], kind: type, given: dict[str, Any], lr: list[float]) -> mf.Fleet:
    fleet = mf.Fleet(models)
    fleet.compile(kind, "mse", lr=each(lr), **given)
    return fleet


def same(models: list[nn.Module], references: list[nn.Module]) -> None:
    for model, reference in zip(models, references, strict=True):
        for (name, ours), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.fixture(autouse=True)
def double_by_default() -> Any:
    # NAdam's running product has the default dtype in torch, whatever the parameter's.
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("kind", "given"), CASES, ids=IDS)
def test_a_parameter_counts_its_own_steps_when_it_is_frozen_and_unfrozen(kind: Any, given: dict[str, Any]) -> None:
    models: list[Any] = [net(seed) for seed in range(3)]
    references = copy.deepcopy(models)
    updates = [kind(r.parameters(), lr=lr, **given) for r, lr in zip(references, LR, strict=True)]
    fleet = fleet_of(models, kind, given, LR)
    # Frozen at first, then trained with the rest, then frozen after it has state, then trained again.
    for frozen, trained in (((0,), (2,)), ((), (0, 2)), ((2,), (0,)), ((), (0, 2))):
        for own in (*models, *references):
            for layer in frozen:
                own[layer].requires_grad_(False)
            for layer in trained:
                own[layer].requires_grad_(True)
        fleet.fit((X, Y), epochs=2, batch_size=8, shuffle=False, strategy="fused", progress=False)
        for reference, update in zip(references, updates, strict=True):
            for _ in range(2):
                for x, y in zip(X.split(8), Y.split(8), strict=True):
                    step(reference, update, x, y)
        same(models, references)


class Halves(nn.Module):
    """Has a layer that takes part in wide batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if len(x) == 8 else 0)


@pytest.mark.parametrize(("kind", "given"), CASES, ids=IDS)
def test_a_parameter_counts_only_the_steps_it_takes_part_in(kind: Any, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    models: list[Any] = [Halves().double() for _ in range(3)]
    references = copy.deepcopy(models)
    updates = [kind(r.parameters(), lr=lr, **given) for r, lr in zip(references, LR, strict=True)]
    fleet = fleet_of(models, kind, given, LR)
    fleet.fit((X[:20], Y[:20]), epochs=3, batch_size=8, shuffle=False, strategy="fused", progress=False)
    for reference, update in zip(references, updates, strict=True):
        for _ in range(3):
            for x, y in zip(X[:20].split(8), Y[:20].split(8), strict=True):
                step(reference, update, x, y)
    same(models, references)
