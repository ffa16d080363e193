"""`mf.split` refuses a trace that changes buffers or Python values otherwise than the model does."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.graph.test_split import run
from torch import Tensor, nn

import modelfleet as mf

X = np.random.default_rng(0).standard_normal((4, 4), dtype=np.float32)
Between = Callable[["Holder", Tensor], Tensor]


class Holder(nn.Module):
    """Two layers with something between them that may change what the model holds."""

    average: Tensor
    steps: Tensor

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))
        self.held = torch.zeros(4)
        self.calls = 0
        self.log: list[int] = []
        self.cache: Tensor | None = None
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.between(self, self.first(x))))


def average_in_training(model: Holder, x: Tensor) -> Tensor:
    if model.training:
        model.average.lerp_(x.detach().mean(0), 0.1)
    return x


def average_without_gradients(model: Holder, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.average.lerp_(x.mean(0), 0.1)
    return x


def average_as_an_attribute(model: Holder, x: Tensor) -> Tensor:
    if model.training:
        model.held.lerp_(x.detach().mean(0), 0.1)
    return x


def count_in_a_buffer(model: Holder, x: Tensor) -> Tensor:
    if model.training:
        model.steps += 1
    return x


def count_in_python(model: Holder, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def write_a_log(model: Holder, x: Tensor) -> Tensor:
    model.log.append(1)
    return x


def average(model: Holder, x: Tensor) -> Tensor:
    model.average.lerp_(x.detach().mean(0), 0.1)
    return x


def fill_a_cache(model: Holder, x: Tensor) -> Tensor:
    if model.cache is None:
        model.cache = torch.full((4,), 2.0)
    return x * model.cache


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (average_in_training, r"in evaluation mode its stages leave 'average' with other values"),
        (average_without_gradients, r"change 'average' with other gradients .* torch.no_grad"),
        (average_as_an_attribute, r"in evaluation mode its stages leave .* with other values"),
        (count_in_a_buffer, r"in training mode its stages leave 'steps' with other values"),
        (count_in_python, r"running it changes self.calls, and running its stages does not"),
        (write_a_log, r"running it changes self.log, and running its stages does not"),
    ],
)
def test_a_change_that_the_stages_do_not_make_alike_is_refused(between: Between, message: str) -> None:
    model = Holder(between)
    with pytest.raises(mf.InputError, match=message):
        mf.split(model, 2, X)
    assert not any(buffer.any() for buffer in (model.average, model.steps, model.held))
    assert (model.calls, model.log) == (0, [])


@pytest.mark.parametrize("between", [average, fill_a_cache])
def test_a_change_that_the_stages_make_alike_or_need_not_make_is_no_reason(between: Between) -> None:
    model = Holder(between)
    cut = mf.split(model, 2, X)
    assert not model.average.any()
    assert model.cache is None
    x = torch.from_numpy(X)
    found = [run(cut, x), model.average.clone()]
    model.average.zero_()
    torch.testing.assert_close(found, [model(x), model.average], rtol=0, atol=0)


def test_a_module_that_changes_its_own_state_may_stay_whole() -> None:
    class Norm(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0), 0.1)
            return x - self.mean

    norm = Norm()
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))
    cut = mf.split(model, 2, X)
    assert cut.reasons[0] == "cut between the children of its nn.Sequential"
    assert norm.calls == 0
    run(cut, torch.from_numpy(X))
    assert norm.calls == 1
    assert norm.mean.any()
