"""Which models may draw random numbers, by their code."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.losses import resolve
from modelfleet.frameworks.torch.may_draw import may_draw


class Quiet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layer(x)).permute(1, 0) @ torch.relu(x) * self.scale


class Late(Quiet):
    """Draws from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.noisy(self.layer(x)) if self.calls > 2 else self.layer(x)

    def noisy(self, x: Tensor) -> Tensor:
        return F.dropout(x)


def jitter(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


class ByFunction(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        return jitter(self.layer(x))


class ByAttribute(Quiet):
    change: Any

    def __init__(self) -> None:
        super().__init__()
        self.change = jitter

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer(x))


class Helper:
    def __call__(self, x: Tensor) -> Tensor:
        return jitter(x)


class ByObject(ByAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.change = Helper()


def hooked() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda module, inputs, output: jitter(output))
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Conv1d(1, 1, 1)), False),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), True),
        (nn.LSTM(3, 3), False),
        (nn.LSTM(3, 3, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.TransformerEncoderLayer(4, 2), True),
        (Quiet(), False),
        (Late(), True),
        (ByFunction(), True),
        (ByAttribute(), True),
        (ByObject(), True),
        (hooked(), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_may_draw_is_told_by_its_code(model: nn.Module, expected: bool) -> None:
    assert may_draw(model, (resolve("cross_entropy").plain,)) is expected


def test_the_functions_around_a_model_are_looked_into() -> None:
    def quiet(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()

    def loud(model: nn.Module, batch: Any) -> Tensor:
        return model(jitter(batch[0])).mean()

    assert not may_draw(Quiet(), (quiet,))
    assert may_draw(Quiet(), (loud,))
    assert may_draw(Quiet(), (partial(loud),))
    assert may_draw(Quiet(), (lambda model, batch: loud(model, batch),))


def test_a_model_that_draws_late_draws_what_it_would_among_others() -> None:
    data = torch.randn(16, 3), torch.randn(16, 3)
    model = Late()
    twin = copy.deepcopy(model)
    alone, among = mf.Fleet({"a": model}), mf.Fleet({"b": Late(), "a": twin, "c": Late()})
    for fleet in (alone, among):
        fleet.compile("sgd", "mse", lr=0.1)
        fleet.fit(data, batch_size=4, progress=False, strategy="interleaved")
    assert torch.equal(model.layer.weight, twin.layer.weight)
