"""Lanes that share a device in turn, in threads and in processes: the same numbers, and each its own trouble."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fit, mlp, toy
from torch import nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.types import Strategy

X, Y = toy(40)
SHARINGS = ("interleaved", "threads", "processes")


class Dropping(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        first = nn.Linear(4, width, bias=False)  # before BatchNorm a bias has no gradient but noise
        self.layers = nn.Sequential(first, nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def mixed() -> mf.Fleet:
    """Three lanes: two workers have one of them, and the other two."""
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "b": mlp(), "wide": mlp(9), "drop": Dropping()})
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=mf.each([0.01, 0.02, 0.01, 0.03]))
    return fleet


def stateful() -> mf.Fleet:
    """Two lanes with all that is to be kept from one step to the next: moments, statistics, dropout's position."""
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "b": mlp(), "drop": Dropping()})
    fleet.compile("adam", "cross_entropy", lr=mf.each([0.01, 0.02, 0.03]))
    return fleet


def plain() -> mf.Fleet:
    """Two lanes, for what does not hang on the models."""
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "b": mlp(), "wide": mlp(9)})
    fleet.compile("sgd", "cross_entropy", momentum=0.9, lr=mf.each([0.1, 0.001, 0.02]))
    return fleet


def trained(strategy: Strategy) -> tuple[mf.Fleet, mf.History]:
    fleet = mixed()
    epochs = mf.each([2, 1, 3, 2])
    return fleet, fit(fleet, (X, Y), strategy=strategy, epochs=epochs, batch_size=8, validation=(X, Y))


def same(one: mf.Fleet, other: mf.Fleet, within: float = 1e-5) -> None:
    for name in one.names:
        difference, where = testing.largest_difference(one[name], other[name])
        assert difference < within, (name, where)


# What several tests compare with: trained once, and never changed.


@cache
def of_auto() -> tuple[mf.Fleet, mf.History]:
    return trained("auto")


@cache
def after_three_epochs() -> mf.Fleet:
    fleet = stateful()
    fit(fleet, (X, Y), epochs=3, batch_size=8)
    return fleet


@cache
def on_batches(epochs: int) -> mf.Fleet:
    fleet = plain()
    fit(fleet, Batches(), epochs=epochs)
    return fleet


@pytest.mark.parametrize("strategy", SHARINGS)
def test_every_sharing_gives_the_numbers_of_auto(strategy: Strategy) -> None:
    expected, told = of_auto()
    fleet, history = trained(strategy)
    same(fleet, expected)
    for name in fleet.names:
        assert list(history[name]) == list(told[name])
        for metric, values in told[name].items():
            np.testing.assert_allclose(history[name][metric], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", SHARINGS)
def test_a_second_fit_goes_on_in_another_sharing(strategy: Strategy) -> None:
    fleet = stateful()
    for way in (strategy, "auto", strategy):
        fit(fleet, (X, Y), epochs=1, batch_size=8, strategy=way)
    same(fleet, after_three_epochs())


class Branching(nn.Module):
    """Looks at its numbers, and so can't be traced: every step runs this Python, with a member's weights in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.isnan().any():
                return self.head(x)
        return self.head(x)


@pytest.mark.parametrize("devices", ["cpu", "cpu:0,cpu:1"])
def test_models_that_run_their_python_do_not_meet_in_threads(devices: str) -> None:
    def branching(devices: str) -> mf.Fleet:
        torch.manual_seed(0)
        fleet = mf.Fleet([Branching() for _ in range(4)], devices=devices)
        fleet.compile("adam", "cross_entropy", lr=0.01)
        return fleet

    expected, fleet = branching("cpu"), branching(devices)
    fit(expected, (X[:16], Y[:16]), epochs=2, batch_size=4, strategy="interleaved")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads meet wherever they can
    try:
        fit(fleet, (X[:16], Y[:16]), epochs=2, batch_size=4, strategy="threads")
    finally:
        sys.setswitchinterval(before)
    same(fleet, expected)


class Poisoned:
    """Batches until one raises."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        raise OSError("the disk is gone")


class Batches:
    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, 40, 8):
            yield X[first : first + 8], Y[first : first + 8]


class Locked(Batches):
    """Batches that no other process can have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize("strategy", SHARINGS)
def test_data_that_raise_half_way_fail_their_member_only(strategy: Strategy) -> None:
    fleet = plain()
    data = mf.each({"a": Batches(), "b": Poisoned(), "wide": Batches()})
    history = fit(fleet, data, epochs=2, strategy=strategy)
    assert list(history.failed) == ["b"]
    assert "the disk is gone" in history.failed["b"].reason
    assert len(history["a"]["loss"]) == 2
    for name in ("a", "wide"):
        assert testing.largest_difference(fleet[name], on_batches(2)[name])[0] < 1e-5


class Deadly:
    """Batches of a member whose worker is killed at the second epoch."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from Batches()
        if self.mark.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        self.mark.touch()


def test_a_member_on_which_workers_die_fails_alone_and_keeps_what_it_had(tmp_path: Path) -> None:
    fleet = plain()
    data = mf.each({"a": Deadly(tmp_path / "mark"), "b": Batches(), "wide": Batches()})
    history = fit(fleet, data, epochs=2, strategy="processes")
    assert list(history.failed) == ["a"]
    assert "SIGKILL" in history.failed["a"].reason
    assert len(history["a"]["loss"]) == 1
    assert testing.largest_difference(fleet["a"], on_batches(1)["a"])[0] < 1e-5  # its first epoch is not lost
    for name in ("b", "wide"):
        assert len(history[name]["loss"]) == 2
        assert testing.largest_difference(fleet[name], on_batches(2)[name])[0] < 1e-5


def stopped(strategy: Strategy) -> tuple[mf.Fleet, mf.History]:
    fleet = plain()
    stopping = mf.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best=True)
    given: dict[str, Any] = {"validation": (X, Y), "epochs": 6, "batch_size": 8, "callbacks": [stopping]}
    return fleet, fit(fleet, (X, Y), strategy=strategy, **given)


@cache
def stopped_in_auto() -> tuple[mf.Fleet, mf.History]:
    return stopped("auto")


@pytest.mark.parametrize("strategy", SHARINGS)
def test_callbacks_work_wherever_the_steps_are_taken(strategy: Strategy) -> None:
    expected, told = stopped_in_auto()
    fleet, history = stopped(strategy)
    assert told.stopped
    assert told.kept
    assert history.stopped == told.stopped
    assert history.kept == told.kept
    same(fleet, expected)


class Watching(mf.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[tuple[int, tuple[str, ...]]] = []

    def on_step_end(self, run: Any) -> None:
        self.steps.append(run.step)

    def on_epoch_end(self, run: Any) -> None:
        self.epochs.append((run.epoch, run.active))


@pytest.mark.parametrize("strategy", SHARINGS)
def test_a_callback_that_looks_at_the_fleet_sees_all_lanes_at_one_epoch(strategy: Strategy) -> None:
    watching = Watching()
    fleet = plain()
    fit(fleet, (X, Y), epochs=2, batch_size=20, callbacks=[watching], strategy=strategy)
    assert watching.epochs == [(1, tuple(fleet.names)), (2, tuple(fleet.names))]
    assert len(watching.steps) >= 4


class Stop(mf.Callback):
    """Interrupts the fit after an epoch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("strategy", ["interleaved", "processes"])
def test_checkpoints_resume_in_every_sharing(strategy: Strategy, tmp_path: Path) -> None:
    # Breaking off in processes is in `test_devices.py`: it ends the workers, and new ones take seconds to start.
    broken, resumed = stateful(), stateful()
    given: dict[str, Any] = {"epochs": 3, "batch_size": 8}
    with pytest.raises(KeyboardInterrupt):
        fit(broken, (X, Y), **given, strategy="interleaved", callbacks=[mf.Checkpoint(tmp_path), Stop(2)])
    history = fit(resumed, (X, Y), **given, strategy=strategy, callbacks=[mf.Checkpoint(tmp_path), Stop(9)])
    assert len(history["a"]["loss"]) == 3
    assert resumed.plan().sharing == strategy
    same(resumed, after_three_epochs())


def test_a_share_gives_a_member_more_turns() -> None:
    class Order(mf.Callback):
        together = False

        def __init__(self) -> None:
            self.ended: list[str] = []

        def on_epoch_end(self, run: Any) -> None:
            self.ended += run.active

    order = Order()
    fleet = mf.Fleet({"a": mlp(), "wide": mlp(9)})
    fleet.compile("sgd", "cross_entropy")
    share = mf.each({"a": 1, "wide": 4})
    fit(fleet, (X, Y), epochs=3, batch_size=4, callbacks=[order], share=share, strategy="interleaved")
    assert order.ended[:3] == ["wide", "wide", "wide"]
    assert order.ended.count("a") == 3
    with pytest.raises(mf.InputError, match="share of member 'a' is 0"):
        fit(fleet, (X, Y), share=mf.each({"a": 0, "wide": 3}))


def test_what_cannot_be_sent_to_a_worker_is_told_before_anything_is_trained() -> None:
    fleet = plain()
    before = {name: parameter.clone() for name, parameter in fleet["a"].named_parameters()}
    with pytest.raises(mf.StrategyError, match=r"can't be sent to a worker process: .*top of a module"):
        fit(fleet, Locked(), strategy="processes")
    after = dict(fleet["a"].named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_epoch_may_be_shorter_or_longer_than_the_data() -> None:
    fleet = mf.Fleet({"a": mlp()})
    fleet.compile("sgd", "cross_entropy")
    fit(fleet, (X, Y), batch_size=4, epochs=2, steps_per_epoch=3)
    assert fleet._lanes is not None
    assert fleet._lanes[0].steps.tolist() == [6]
    history = fit(fleet, Batches(), epochs=2, steps_per_epoch=7)  # of five batches: they begin anew
    assert fleet._lanes[0].steps.tolist() == [20]
    assert len(history["a"]["loss"]) == 2


class Filling(nn.Module):
    """Makes a tensor of torch's default dtype in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * torch.full((3,), 1 / 3)


def test_worker_processes_have_the_default_dtype_of_their_owner() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.randn(8, 4)
        trained = {}
        for strategy in ("interleaved", "processes"):
            fleet = mf.Fleet.build(Filling, 2, seed=0)
            fleet.compile("sgd", "mse", lr=0.1)
            history = fleet.fit((x, x[:, :3]), epochs=2, batch_size=4, strategy=strategy, progress=False)
            assert not history.failed
            trained[strategy] = fleet["1"].head.weight.detach().numpy()
        np.testing.assert_allclose(trained["processes"], trained["interleaved"], rtol=1e-12, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)
