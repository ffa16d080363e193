"""What a checkpoint must hold beside the weights: epochs that wait to be ended, and where the data are."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, equal, fit, fleet_of, toy
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import modelfleet as mf
from modelfleet.history import History

X, Y = toy(24)


class Watch(mf.Callback):
    """Notes what callbacks see, and breaks the fit off after a step."""

    def __init__(self, die: int | None) -> None:
        self.die = die
        self.seen: list[Any] = []

    def on_step_end(self, run: Any) -> None:
        self.seen.append(run.step)
        if run.step == self.die:
            raise RuntimeError("killed")

    def on_epoch_end(self, run: Any) -> None:
        self.seen.append(run.active)


def unlike(folder: Path, strategy: Any, die: int | None = None) -> tuple[dict[str, Any], History, list[Any]]:
    """Train two members whose epochs have one step and three: what they end with, and what callbacks saw."""
    torch.manual_seed(0)
    nets = {
        name: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
        for name, width in {"a": 3, "b": 5}.items()
    }
    fleet, watch = mf.Fleet(nets), Watch(die)
    fleet.compile("sgd", "cross_entropy", lr=0.2)
    data = mf.each([(X[:6], Y[:6]), (X[:18], Y[:18])])
    given: dict[str, Any] = {"validation": (X[6:], Y[6:]), "epochs": 3, "batch_size": 6, "strategy": strategy}
    history = fit(fleet, data, **given, callbacks=[mf.Checkpoint(folder, every_steps=1), watch])
    return all_weights(fleet), history, watch.seen


@pytest.mark.parametrize("strategy", ["interleaved", "threads", "processes"])
def test_a_lane_that_waits_for_others_keeps_its_epoch(strategy: str, tmp_path: Path) -> None:
    weights, history, seen = unlike(tmp_path / "whole", strategy)
    epochs = [[*range(first, first + 3), ("a", "b")] for first in (1, 4, 7)]
    assert seen == [event for epoch in epochs for event in epoch]
    for die in (2, 3, 4, 9):  # the checkpoint before is one or two steps after the end of "a", or right at it
        folder = tmp_path / str(die)
        with pytest.raises(RuntimeError, match="killed"):
            unlike(folder, strategy, die)
        resumed, broken, after = unlike(folder, strategy)
        assert broken.to_dict() == history.to_dict()
        assert equal(resumed, weights)
        assert after == seen[len(seen) - len(after) :]  # no step is left out
        assert after[0] == die or die == 4


def weighted_loader() -> Any:
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y), torch.ones(len(X)))
    return DataLoader(rows, batch_size=6)


def plain_loader() -> Any:
    return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=6)


@pytest.mark.parametrize(
    ("plain", "weighted"),
    [
        ({"data": (X, Y)}, {"data": (X, Y), "sample_weight": np.ones(len(X))}),
        ({"data": (X, Y)}, {"data": (X, Y, np.ones(len(X), np.float32))}),
        ({"data": plain_loader()}, {"data": weighted_loader()}),
    ],
    ids=["sample_weight", "triple", "loader"],
)
def test_a_run_without_sample_weights_does_not_go_on_with_them(plain: Any, weighted: Any, tmp_path: Path) -> None:
    words = {id(plain): "(x, y)", id(weighted): "(x, y, sample_weight)"}
    for first, second in [(plain, weighted), (weighted, plain)]:
        callbacks = [mf.Checkpoint(tmp_path / str(id(first)))]
        fit(fleet_of(2), **first, epochs=2, callbacks=callbacks)
        told = re.escape(f"its data are ['{words[id(first)]}'], here they are ['{words[id(second)]}']")
        with pytest.raises(mf.StoreError, match=told):
            fit(fleet_of(2), **second, epochs=2, callbacks=callbacks)
        fit(fleet_of(2), **first, epochs=2, callbacks=callbacks)


def shuffled() -> Iterator[Any]:
    """Draw the order at the start of a pass of six batches, and noise with every batch."""
    order = np.random.permutation(24)
    for rows in order.reshape(6, 4):
        yield X[rows] + np.random.rand(4, 4).astype(np.float32), Y[rows]


def seeded_loader(seed: int = 4) -> Any:
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def sampled_loader() -> Any:
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(3))
    return DataLoader(rows, batch_size=4, sampler=sampler)


OWN_STATE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a seeded loader": (seeded_loader, {}),
    "a seeded loader each": (lambda: mf.each([seeded_loader(1), seeded_loader(2)]), {}),
    "a seeded sampler": (sampled_loader, {}),
    "a seeded loader in parts": (seeded_loader, {"steps_per_epoch": 4}),
    "a function": (lambda: shuffled, {}),
    "a function in whole passes": (lambda: shuffled, {"steps_per_epoch": 6}),
    "a function in parts": (lambda: shuffled, {"steps_per_epoch": 4}),
}


@pytest.mark.parametrize("kind", OWN_STATE)
@pytest.mark.parametrize("checkpoint", [{"every_steps": 1}, {"every": 1}], ids=["steps", "epochs"])
def test_a_loader_goes_on_where_it_was(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    make, options = OWN_STATE[kind]

    def train(folder: Path, die: int | None = None) -> dict[str, Any]:
        np.random.seed(1)
        fleet = fleet_of(2, momentum=0.9)
        callbacks = [mf.Checkpoint(folder, **checkpoint), Watch(die)]
        fit(fleet, make(), validation=seeded_loader(9), epochs=3, callbacks=callbacks, **options)
        return all_weights(fleet)

    expected = train(tmp_path / "whole")
    for die in (2, 6, 11):
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path / "broken", die)
    assert equal(train(tmp_path / "broken"), expected)


def test_a_loader_that_a_worker_reads_is_warned_of(tmp_path: Path) -> None:
    callbacks = [mf.Checkpoint(tmp_path)]
    with pytest.warns(mf.FleetWarning, match="member '0' are a loader .* a worker reads"):
        fit(fleet_of(2), seeded_loader(), epochs=1, callbacks=callbacks, strategy="processes")
