"""The loss of every step, on request: as in a plain loop, however the members are trained."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fit, fleet_of, toy
from torch import nn

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.fused.engine import FusedEngine

X, Y = (torch.from_numpy(array) for array in toy(22))
X = X.double()
ROWS = {"a": 22, "b": 10, "c": 22}
EPOCHS = {"a": 3, "b": 3, "c": 2}
DATA = mf.each({name: (X[:rows], Y[:rows]) for name, rows in ROWS.items()})
OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": False, "epochs": mf.each(EPOCHS), "record_steps": True}


def net(seed: int, *, norm: bool) -> nn.Module:
    torch.manual_seed(seed)
    between = [nn.BatchNorm1d(6)] if norm else []  # padding would count
    return nn.Sequential(nn.Linear(4, 6), *between, nn.Tanh(), nn.Linear(6, 3)).double()


def plain(model: nn.Module, rows: int, epochs: int) -> tuple[list[float], list[int]]:
    """A plain loop: the loss of each step, and its rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, sizes = [], []
    for _ in range(epochs):
        for start in range(0, rows, 4):
            x, y = X[:rows][start : start + 4], Y[:rows][start : start + 4]
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            sizes.append(len(x))
    return losses, sizes


@pytest.mark.parametrize(
    ("strategy", "norm"),
    [
        ("fused", False),
        ("fused", True),
        ("interleaved", False),
        ("threads", False),
        pytest.param("processes", True, marks=pytest.mark.slow),
        pytest.param("data_parallel", False, marks=pytest.mark.slow),
    ],
)
def test_the_losses_are_those_of_a_plain_loop(strategy: Any, norm: bool) -> None:
    models = {name: net(seed, norm=norm) for seed, name in enumerate(ROWS)}
    expected = {name: plain(copy.deepcopy(models[name]), ROWS[name], EPOCHS[name]) for name in ROWS}
    fleet = mf.Fleet(models, devices="cpu:0,cpu:1" if strategy == "data_parallel" else "auto")
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    history = fit(fleet, DATA, strategy=strategy, **OPTIONS)
    for name, (losses, sizes) in expected.items():
        found = history.steps(name)["loss"]
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        steps = len(losses) // EPOCHS[name]
        for epoch, value in enumerate(history[name]["loss"]):
            own = slice(epoch * steps, (epoch + 1) * steps)
            assert np.average(found[own], weights=sizes[own]) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_members_that_are_stopped_or_fail_have_the_steps_they_took(strategy: Any) -> None:
    class Stop(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            if run.epoch == 1:
                run.stop("0")

    x, y = toy(16)
    sick = x.copy()
    sick[9] = np.nan  # in the third of four steps
    data = mf.each({"0": (x, y), "1": (sick, y), "2": (x, y)})
    history = fit(
        fleet_of(3),
        data,
        epochs=3,
        batch_size=4,
        shuffle=False,
        callbacks=[Stop()],
        record_steps=True,
        strategy=strategy,
    )
    assert [len(history.steps(name)["loss"]) for name in history] == [4, 3, 12]
    assert history.failed["1"].step == 3
    assert np.isfinite(history.steps("1")["loss"]).tolist() == [True, True, False]
    assert np.isfinite(history.steps("2")["loss"]).all()


def test_halved_lanes_record_every_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = toy(22)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "epochs": 2, "record_steps": True}
    expected = fit(fleet_of(4), (x, y), **options)
    train = FusedEngine.train

    def small_device(self: FusedEngine, hyper: Any, active: torch.Tensor, batch: Any, *rest: Any) -> None:
        if batch.size == 2 and len(active) > 2:  # the last step of an epoch, so that there are losses already
            raise torch.OutOfMemoryError("pretended")
        train(self, hyper, active, batch, *rest)

    monkeypatch.setattr(FusedEngine, "train", small_device)
    history = fit(fleet_of(4), (x, y), **options)
    for name in history:
        np.testing.assert_allclose(history.steps(name)["loss"], expected.steps(name)["loss"], rtol=1e-5)


def test_a_step_that_is_undone_when_memory_runs_out_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"a": 22, "b": 22, "c": 3, "d": 3}
    models = {name: net(seed, norm=True) for seed, name in enumerate(rows)}
    expected = {name: plain(copy.deepcopy(models[name]), rows[name], 1)[0] for name in rows}
    train_some, tried = FusedEngine.train_some, []

    def small_device(self: FusedEngine, hyper: Any, batch: Any, *rest: Any) -> None:
        tried.append((self.stacked.width, batch.size))
        if tried[-1] == (4, 4):  # c and d have taken their step, of three rows
            raise torch.OutOfMemoryError("pretended")
        train_some(self, hyper, batch, *rest)

    monkeypatch.setattr(FusedEngine, "train_some", small_device)
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    data = mf.each({name: (X[:count], Y[:count]) for name, count in rows.items()})
    history = fit(fleet, data, batch_size=4, shuffle=False, record_steps=True)
    assert tried[:2] == [(4, 3), (4, 4)]
    for name, losses in expected.items():
        np.testing.assert_allclose(history.steps(name)["loss"], losses, rtol=1e-12)


@pytest.mark.parametrize("checkpoint", [{"every_steps": 1}, {"every": 1}], ids=["steps", "epochs"])
def test_a_resumed_run_has_all_steps(checkpoint: dict[str, Any], tmp_path: Path) -> None:
    class Die(mf.Callback):
        def on_step_end(self, run: Any) -> None:
            if run.step == 9 and dying:
                raise KeyboardInterrupt

    x, y = toy(22)
    options: dict[str, Any] = {"batch_size": 4, "epochs": 3, "record_steps": True}
    expected = fit(fleet_of(2), (x, y), **options)
    given, dying = [mf.Checkpoint(tmp_path, **checkpoint), Die()], True
    with pytest.raises(KeyboardInterrupt):
        fit(fleet_of(2), (x, y), callbacks=given, **options)
    dying = False
    history = fit(fleet_of(2), (x, y), callbacks=given, **options)
    for name in history:
        assert history.steps(name) == expected.steps(name)
        assert len(history.steps(name)["loss"]) == 18
    assert history.frame(by="step").equals(expected.frame(by="step"))


def test_a_frame_by_step_has_epochs_and_hyperparameters() -> None:
    fleet = fleet_of(2, lr=mf.each([0.1, 0.2]))
    history = fit(fleet, toy(8), epochs=3, initial_epoch=1, batch_size=4, record_steps=True)
    frame = history.frame(by="step")
    assert list(frame.columns) == ["member", "epoch", "step", "dropout", "optimizer", "lr", "loss"]
    own = frame[frame["member"] == "1"]
    assert own["epoch"].tolist() == [2, 2, 3, 3]
    assert own["step"].tolist() == [1, 2, 3, 4]
    assert own["lr"].tolist() == [0.2] * 4
    assert own["loss"].tolist() == history.steps("1")["loss"]
    with pytest.raises(InputError, match="'epoch'"):
        history.frame(by="epochs")  # type: ignore[arg-type]


def test_nothing_is_recorded_unless_asked_for() -> None:
    fleet = fleet_of(2)
    first = fit(fleet, toy(8), record_steps=True)
    again = fit(fleet, toy(8))
    assert all(lane.engine.record is None for lane in fleet._lanes)
    assert "steps" not in again.to_dict()
    with pytest.raises(InputError, match="record_steps=True"):
        again.steps("0")
    with pytest.raises(InputError, match="record_steps=True"):
        again.frame(by="step")
    with pytest.raises(InputError, match="'9'"):
        first.steps("9")


def test_steps_are_stored_and_appended_with_the_history() -> None:
    fleet = fleet_of(2)
    first, second = (fit(fleet, toy(8), epochs=2, batch_size=4, record_steps=True) for _ in range(2))
    losses = first.steps("0")["loss"] + second.steps("0")["loss"]
    first.extend(mf.History.from_dict(second.to_dict()))
    assert first.steps("0")["loss"] == losses
    assert first.frame(by="step")["epoch"].tolist()[:8] == [1, 1, 2, 2, 3, 3, 4, 4]
