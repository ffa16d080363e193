"""A resumed run has the numbers that callbacks had changed before it was killed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import manifests
from tests.frameworks.torch import numbers
from tests.frameworks.torch.test_numbers_before_the_first_step import Die
from tests.frameworks.torch.test_numbers_over_time import RATES, fit
from torch import nn

import modelfleet as mf
from modelfleet.callbacks import Run


def net(rate: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(rate), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def smoothed() -> list[nn.Module]:
    return [nn.CrossEntropyLoss(label_smoothing=place / 10) for place in range(len(RATES))]


class Grow(mf.Callback):
    """Adds to the numbers of models and losses after each epoch: what is lost once stays lost."""

    def __init__(self, losses: list[Any]) -> None:
        self._losses = losses

    def on_epoch_end(self, run: Run) -> None:
        for place, name in enumerate(run.fleet.names):
            model = run.fleet[name]
            model[2].p, model[3].eps = model[2].p + 0.1 * place / 4, model[3].eps * 10 ** (place + 1)
            self._losses[place].label_smoothing += 0.05


def go(folder: Path, step: int, strategy: Any) -> mf.Fleet:
    losses = smoothed()
    fleet = numbers.compiled(numbers.build(net, RATES), loss=mf.each(losses))
    checkpoint = mf.Checkpoint(folder, every_steps=2) if strategy == "fused" else mf.Checkpoint(folder)
    fit(fleet, 4, callbacks=[Grow(losses), Die(step), checkpoint], strategy=strategy)
    return fleet


@pytest.mark.parametrize(
    ("strategy", "step"), [*itertools.product(["fused", "interleaved"], [4, 7, 10]), ("threads", 7)]
)
def test_a_resumed_run_has_the_numbers_that_callbacks_had_changed(
    tmp_path: Path, strategy: Any, step: int
) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        go(tmp_path / "killed", step, strategy)
    resumed, expected = go(tmp_path / "killed", -1, strategy), go(tmp_path / "unbroken", -1, strategy)
    for name in expected.names:
        assert resumed[name][2].p == expected[name][2].p
        for key, tensor in expected[name].state_dict().items():
            assert torch.equal(resumed[name].state_dict()[key], tensor), (name, key)


def test_numbers_that_no_callback_has_changed_are_those_of_the_script(tmp_path: Path) -> None:
    class Eps(mf.Callback):
        def on_epoch_end(self, run: Run) -> None:
            run.fleet["m1"][3].eps = 0.25

    def run(rates: list[float], step: int) -> mf.Fleet:
        fleet = numbers.compiled(numbers.build(net, rates), loss="cross_entropy")
        fit(fleet, callbacks=[Eps(), Die(step), mf.Checkpoint(tmp_path)], strategy="fused")
        return fleet

    with pytest.raises(RuntimeError, match="killed"):
        run([0.1, 0.2, 0.3], 4)
    fleet = run([0.4, 0.5, 0.6], -1)
    assert [fleet[name][2].p for name in fleet.names] == [0.4, 0.5, 0.6]
    assert [fleet[name][3].eps for name in fleet.names] == [1e-5, 0.25, 1e-5]


def test_numbers_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        go(tmp_path, 4, "fused")
    manifests.edit(tmp_path, manifests.put("numbers", value={"m0": {"model.2.p": "much"}}))
    with pytest.raises(mf.StoreError, match="can't be used"):
        go(tmp_path, -1, "fused")
    manifests.edit(tmp_path, manifests.put("numbers", value={"m0": {"model.2.p": [1]}}))
    with pytest.raises(mf.StoreError, match="numbers"):
        go(tmp_path, -1, "fused")
