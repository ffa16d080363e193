"""Which models may draw random numbers, by their code."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.losses import resolve
from modelfleet.frameworks.torch.random.detection import DrawDetector


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
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), False),
        (nn.LSTM(3, 3), False),
        (nn.LSTM(3, 3, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.TransformerEncoderLayer(4, 2), True),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), False),
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
    assert DrawDetector(model, (resolve("cross_entropy").plain,)).may_draw() is expected


def test_the_functions_around_a_model_are_looked_into() -> None:
    def quiet(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()

    def loud(model: nn.Module, batch: Any) -> Tensor:
        return model(jitter(batch[0])).mean()

    assert not DrawDetector(Quiet(), (quiet,)).may_draw()
    assert DrawDetector(Quiet(), (loud,)).may_draw()
    assert DrawDetector(Quiet(), (partial(loud),)).may_draw()
    assert DrawDetector(Quiet(), (lambda model, batch: loud(model, batch),)).may_draw()


def test_a_model_that_draws_late_draws_what_it_would_among_others() -> None:
    data = torch.randn(16, 3), torch.randn(16, 3)
    model = Late()
    twin = copy.deepcopy(model)
    alone, among = mf.Fleet({"a": model}), mf.Fleet({"b": Late(), "a": twin, "c": Late()})
    for fleet in (alone, among):
        fleet.compile("sgd", "mse", lr=0.1)
        fleet.fit(data, batch_size=4, progress=False, strategy="interleaved")
    assert torch.equal(model.layer.weight, twin.layer.weight)


@pytest.mark.parametrize(
    ("model", "rate"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), "1.p"),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), "0.dropout"),
        (nn.Sequential(nn.LSTM(3, 3, 2)), "0.dropout"),
    ],
)
def test_a_rate_of_zero_draws_nothing_until_it_is_raised(model: nn.Module, rate: str) -> None:
    draws = DrawDetector(model, ())
    assert not draws.may_draw()
    place, _, name = rate.partition(".")
    setattr(model.get_submodule(place), name, 0.5)
    assert draws.may_draw()


def test_a_rate_that_a_callback_raises_draws_from_the_members_stream() -> None:
    class Raise(mf.Callback):
        def on_epoch_end(self, run: object) -> None:
            for name in fleet.names:
                fleet[name][1].p = 0.5

    x = torch.randn(16, 3, dtype=torch.float64)
    trained = []
    for strategy in ("interleaved", "threads"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0), nn.Linear(8, 1)).double()
        fleet = mf.Fleet({"a": model}, seed=3)
        fleet.compile("sgd", "mse", lr=0.1)
        torch.manual_seed(1 + len(trained))  # torch's own generator: nothing may hang on it
        fleet.fit((x, x[:, :1]), epochs=3, batch_size=4, callbacks=[Raise()], strategy=strategy, progress=False)
        trained.append(fleet["a"][0].weight.detach().numpy().copy())
    np.testing.assert_array_equal(trained[0], trained[1])


class Attends(nn.Module):
    """Its rate has no name."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, None, 0.1)


class Drops(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(4, 4), nn.Linear(4, 4), rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.rate:
            x = F.dropout(x, self.rate, self.training)
        return self.last(x)


def test_attention_may_draw_even_if_nothing_names_its_rate() -> None:
    assert DrawDetector(Attends(), ()).may_draw()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_code_of_a_stage_is_looked_at(rate: float) -> None:
    cut = mf.split(Drops(rate), 2, np.zeros((4, 4), np.float32))
    assert [DrawDetector(stage, ()).may_draw() for stage in cut.stages.values()].count(True) == (1 if rate else 0)
