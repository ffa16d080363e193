"""Arguments of callbacks, exchanges and folders that are out of range are refused before anything runs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fleet_of, toy
from torch import Tensor, nn

import modelfleet as mf

checkpoint: Any = mf.Checkpoint
stopping: Any = mf.EarlyStopping
load: Any = mf.load
X, Y = toy(24)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: checkpoint("run", every=math.nan), "every is nan, expected a whole number of epochs, 1 or more"),
        (lambda: checkpoint("run", every=2.5), "every is 2.5, expected a whole number"),
        (lambda: checkpoint("run", every_steps=math.nan), "every_steps is nan, expected a whole number of steps"),
        (lambda: checkpoint("run", every="x"), "every is 'x', expected a whole number"),
        (lambda: checkpoint("run", resume="no"), "resume is 'no', expected True or False"),
        (lambda: checkpoint(3), "folder is 3, expected the path of a folder"),
        (lambda: stopping(patience=math.nan), "patience is nan, expected a whole number of epochs"),
        (lambda: stopping(patience=True), "patience is True, expected a whole number"),
        (lambda: stopping(min_delta="x"), "min_delta is 'x', expected a finite number, 0 or more"),
        (lambda: stopping(3), "metric is 3, expected the name of a metric"),
        (lambda: load(None), "folder is None, expected the path of a folder"),
        (lambda: load("a\0b"), "folder is 'a.x00b', expected the path of a folder"),
        (lambda: fleet_of(2).save(3), "folder is 3, expected the path of a folder"),  # pyrefly: ignore
    ],
)
def test_what_is_out_of_range_is_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(mf.InputError, match=expected):
        make()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    assert checkpoint(tmp_path, every=np.int64(2)).every == 2
    assert stopping(patience=np.int32(2), min_delta=np.float32(0.5)).patience == 2


def fit(fleet: mf.Fleet, **options: Any) -> mf.History:
    return fleet.fit((X, Y), epochs=3, batch_size=8, progress=False, **options)


def test_an_average_needs_a_weight_above_zero() -> None:
    with pytest.raises(mf.InputError, match="the weights of '0', '1' are all 0, so they have no average"):
        fit(fleet_of(2), exchange=mf.Average(weights=mf.each([0, 0])))


def test_no_hyperparameter_becomes_negative() -> None:
    turned = mf.Exploit("loss", fraction=0.4, perturb={"lr": lambda value, draw: -value})
    with pytest.raises(mf.InputError, match=r"lr of member '.' would become -.*; expected 0 or more"):
        fit(fleet_of(3), exchange=turned)


@pytest.mark.parametrize("members", [1, 3])
def test_a_loss_without_a_gradient_fails_in_a_fleet_as_alone(members: int) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.detach().sum()

    fleet = mf.Fleet([nn.Linear(X.shape[1], 3) for _ in range(members)])
    fleet.compile("adam", loss, lr=0.1)
    with pytest.raises(mf.AllFailedError, match="does not require grad"):
        fleet.fit((torch.as_tensor(X), torch.as_tensor(Y)), progress=False)
