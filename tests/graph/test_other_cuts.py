"""What was trained in one cut of a model goes on in another one, from a checkpoint or a saved folder."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.graph.breaking import Break
from tests.graph.comparing import THREE, TWO, assert_same_weights, fit, rows, weights
from torch import nn

import modelfleet as mf
from modelfleet.errors import StoreError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    wide = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(nn.Linear(4, 6), *wide, nn.Linear(6, 3)).double()


def chain_in(model: nn.Module, stages: int, **recipe: Any) -> mf.Chain:
    """A compiled chain of a model cut into stages."""
    devices = {1: "cpu", 2: TWO, 3: THREE}[stages]
    chain = mf.Chain(mf.split(model, stages, torch.zeros(4, 4, dtype=torch.float64)), devices=devices)
    given: dict[str, Any] = {"optimizer": "adam", "loss": "cross_entropy", "lr": 0.01, "schedule": "cosine"}
    chain.compile(**{**given, **recipe})
    return chain


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 3), (3, 2)])
def test_a_checkpoint_goes_on_in_any_number_of_stages(tmp_path: Path, first: int, second: int) -> None:
    data, whole, broken, resumed = rows(), net(), net(), net()
    fit(chain_in(whole, 1), data)
    with pytest.raises(ZeroDivisionError):
        fit(chain_in(broken, first), data, callbacks=[mf.Checkpoint(tmp_path, every_steps=4), Break(10)])
    fit(chain_in(resumed, second), data, callbacks=[mf.Checkpoint(tmp_path, every_steps=4), Break(99)])
    assert_same_weights(weights(resumed), weights(whole))


@pytest.mark.parametrize("other", [{"loss": "nll"}, {"optimizer": "sgd"}, {"lr": 0.02}])
def test_another_run_is_refused_in_another_cut_too(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(chain_in(net(), 2), rows(), callbacks=[mf.Checkpoint(tmp_path, every_steps=4), Break(10)])
    chain = chain_in(net(), 1, **other)
    with pytest.raises(StoreError, match="a checkpoint of another run"):
        fit(chain, rows(), callbacks=[mf.Checkpoint(tmp_path, every_steps=4), Break(99)])


@pytest.mark.parametrize(("first", "second"), [(2, 3), (2, 1), (1, 2)])
def test_a_saved_chain_goes_on_in_another_cut(tmp_path: Path, first: int, second: int) -> None:
    data, model, other = rows(), net(), net()
    chain = chain_in(model, first)
    fit(chain, data, epochs=2)
    chain.save(tmp_path / "saved")
    example = torch.zeros(4, 4, dtype=torch.float64)
    again = mf.Chain.load(tmp_path / "saved", mf.split(other, second, example), devices=THREE[:second])
    assert_same_weights(weights(other), weights(model))
    fit(chain, data, epochs=2)
    fit(again, data, epochs=2)
    assert_same_weights(weights(other), weights(model))


def test_stages_that_were_compiled_differently_keep_their_cut(tmp_path: Path) -> None:
    chain = chain_in(net(), 2, lr=mf.each([0.01, 0.1]))
    chain.save(tmp_path / "saved")
    cut = mf.split(net(), 3, torch.zeros(4, 4, dtype=torch.float64))
    with pytest.raises(mf.InputError, match="the saved stages were compiled with different values of lr"):
        mf.Chain.load(tmp_path / "saved", cut)


def test_inspect_shows_a_saved_chain_and_its_checkpoint(tmp_path: Path) -> None:
    chain = chain_in(net(), 2)
    fit(chain, rows(), epochs=2, callbacks=[mf.Checkpoint(tmp_path / "run")])
    chain.save(tmp_path / "saved")
    shown = {}
    for name in ("run", "saved"):
        command = [sys.executable, "-m", "modelfleet", "inspect", str(tmp_path / name)]
        shown[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "a checkpoint of a chain after epoch 2 of 2 (step 10)" in " ".join(shown["run"].split())
    assert "a chain of 2 nodes (stage0, stage1)" in " ".join(shown["saved"].split())
    assert "2 epochs trained" in " ".join(shown["saved"].split())
    numbers = sum(parameter.numel() for parameter in net().parameters())
    assert all(f"{numbers:,}" in text for text in shown.values())
    assert "optimizer='adam'" in shown["saved"]
