"""Members that are each trained on all devices at once: the numbers of one device."""

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fit, mlp, toy
from torch import nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.workers import process

X, Y = toy(40)
TWO = "cpu:0,cpu:1"


def fleet_of(devices: str) -> mf.Fleet:
    torch.manual_seed(0)
    dropping = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
    fleet = mf.Fleet({"a": mlp(), "b": mlp(), "drop": dropping}, devices=devices)
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=mf.each([0.01, 0.02, 0.03]))
    return fleet


def same(one: mf.Fleet, other: mf.Fleet) -> None:
    for name in one.names:
        difference, where = testing.largest_difference(one[name], other[name])
        assert difference < 1e-5, (name, where)


@pytest.fixture(scope="module")
def alone() -> tuple[mf.Fleet, mf.History]:
    fleet = fleet_of("cpu")
    return fleet, fit(fleet, (X, Y), epochs=mf.each([3, 2, 3]), batch_size=8, validation=(X, Y))


def test_the_weights_and_the_history_are_those_of_one_device(alone: tuple[mf.Fleet, mf.History]) -> None:
    fleet = fleet_of(TWO)
    epochs = mf.each([3, 2, 3])
    history = fit(fleet, (X, Y), epochs=epochs, batch_size=8, validation=(X, Y), strategy="data_parallel")
    same(fleet, alone[0])
    assert history.failed == {}
    for name in fleet.names:
        for metric, values in alone[1][name].items():
            np.testing.assert_allclose(history[name][metric], values, rtol=1e-4, atol=1e-6)


def test_one_fit_after_another_by_other_strategies(alone: tuple[mf.Fleet, mf.History]) -> None:
    fleet = fleet_of(TWO)
    for epochs, strategy in ((mf.each([1, 1, 1]), "data_parallel"), (mf.each([2, 1, 2]), "threads")):
        fit(fleet, (X, Y), epochs=epochs, batch_size=8, strategy=strategy)
    same(fleet, alone[0])


def test_three_devices_whose_rows_do_not_divide() -> None:
    """Batches of 7 rows, and a last one of 2, of which the first device has none."""
    fleets = []
    for devices, strategy in (("cpu", "auto"), ("cpu:0,cpu:1,cpu:2", "data_parallel")):
        fleet = mf.Fleet.build(mlp, 2, devices=devices)
        fleet.compile("sgd", "cross_entropy", metrics=["accuracy"], lr=mf.each([0.1, 0.2]))
        fleets.append((fleet, fit(fleet, (X[:16], Y[:16]), epochs=2, batch_size=7, strategy=strategy)))
    (one, told), (three, history) = fleets
    same(three, one)
    assert history.failed == {}
    for name in one.names:
        for metric, values in told[name].items():
            np.testing.assert_allclose(history[name][metric], values, rtol=1e-4, atol=1e-6)


class Killer(mf.Callback):
    """Kills a worker after the first epoch."""

    def __init__(self) -> None:
        self.killed = 0

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == 1 and not self.killed:
            os.kill(process.hired_pids()[0], signal.SIGKILL)
            self.killed += 1


def test_when_one_of_a_team_is_killed_it_goes_on_from_the_last_epoch(alone: tuple[mf.Fleet, mf.History]) -> None:
    fleet, killer = fleet_of(TWO), Killer()
    epochs = mf.each([3, 2, 3])
    history = fit(fleet, (X, Y), epochs=epochs, batch_size=8, strategy="data_parallel", callbacks=[killer])
    assert killer.killed == 1
    assert history.failed == {}
    same(fleet, alone[0])


def test_models_whose_rows_feel_each_other_are_refused() -> None:
    fleet = mf.Fleet([nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))], devices=TWO)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    with pytest.raises(mf.StrategyError, match=r"is not possible for member '0': a train step changes the buffer"):
        fit(fleet, (X, Y), strategy="data_parallel")


def test_one_device_is_not_enough() -> None:
    with pytest.raises(mf.StrategyError, match=r"there is only cpu\. Name more"):
        fit(fleet_of("cpu"), (X, Y), strategy="data_parallel")
