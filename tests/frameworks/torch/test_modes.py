"""Modes that a callback puts a model into, to look at it: they are the callback's, not the training's."""

from typing import Any

import pytest
from tests.frameworks.torch import comparing
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.types import Strategy


class Net(nn.Module):
    """With a dropout that is to be in training, and a norm whose running numbers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(6, 3)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x))))


class Looking(mf.Callback):
    """Puts some members into evaluation mode, as one who looks at them does."""

    def __init__(self, names: str, how: str) -> None:
        self._names, self._how = names, how

    def on_epoch_end(self, run: Any) -> None:
        for name in self._names:
            model = run.fleet[name] if self._how == "fleet" else run.sync(name)
            model.eval()


@pytest.mark.parametrize("strategy", ["auto", "fused", "interleaved"])
@pytest.mark.parametrize("names", ["0", "1", "01"])
@pytest.mark.parametrize("how", ["fleet", "sync"])
def test_a_model_that_a_callback_puts_into_evaluation_mode_is_trained_as_before(
    strategy: Strategy, names: str, how: str
) -> None:
    data, expected = comparing.rows(), comparing.build(Net, 2)
    fit(expected, data, strategy)
    models = comparing.build(Net, 2)
    fit(models, data, strategy, Looking(names, how))
    comparing.assert_equal(models, expected, 1e-12)
    for name, model in zip("01", models, strict=True):
        assert model.training is (name not in names), "the mode that it was left in"
        buffers = dict(model.named_buffers())
        assert not buffers["norm.running_mean"].any(), "the norm stays frozen"


def fit(models: list[Any], data: Any, strategy: Strategy, *callbacks: mf.Callback) -> None:
    fleet = comparing.compiled(models, loss="cross_entropy")
    comparing.fit(fleet, data, callbacks=[*callbacks], strategy=strategy)
