"""Fleets over several devices: the numbers of one device, work taken over, and workers that die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fit, mlp, toy
from tests.sharing.test_sharing import Batches, Dropping, Locked, same
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.sharing import processes

X, Y = toy(44)
BOTH = "cpu:0,cpu:1"
WAYS = ("threads", "processes")


def mixed(devices: str) -> mf.Fleet:
    """Two groups, one of them to be split, and an odd one out."""
    torch.manual_seed(0)
    models = {"a": mlp(), "b": mlp(), "wide": mlp(9), "c": mlp(), "wider": mlp(9), "drop": Dropping()}
    fleet = mf.Fleet(models, devices=devices)
    rates = mf.each([0.01, 0.02, 0.01, 0.03, 0.02, 0.01])
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=rates)
    return fleet


def unlike(devices: str, members: int = 5) -> mf.Fleet:
    torch.manual_seed(0)
    fleet = mf.Fleet({f"m{width}": mlp(width) for width in range(3, 3 + members)}, devices=devices)
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
    return fleet


def told_the_same(one: mf.History, other: mf.History) -> None:
    names = list(one.to_dict()["metrics"])
    assert names
    for name in names:
        assert list(one[name]) == list(other[name])
        for metric, values in one[name].items():
            np.testing.assert_allclose(other[name][metric], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", [*WAYS, "auto", "interleaved"])
def test_a_mixed_fleet_has_the_numbers_of_one_device(strategy: str) -> None:
    given: dict[str, Any] = {"epochs": mf.each([2, 1, 3, 2, 2, 3]), "batch_size": 8, "validation": (X, Y)}
    one, two = mixed("cpu"), mixed(BOTH)
    told = fit(one, (X, Y), **given)
    before = torch.get_num_threads()
    told_the_same(told, fit(two, (X, Y), strategy=strategy, **given))
    same(one, two)
    assert torch.get_num_threads() == before
    if strategy != "interleaved":
        lanes = two.plan((X, Y)).lanes
        assert {lane.device for lane in lanes} == {"cpu:0", "cpu:1"}
    expected, found = one.evaluate((X, Y)), two.evaluate((X, Y))
    outputs, others = one.predict(X), two.predict(X)
    for name in one.names:
        assert found[name] == pytest.approx(expected[name], rel=1e-4)
        np.testing.assert_allclose(others[name], outputs[name], atol=1e-5)


class Together(mf.Callback):
    """Wants to see the fleet at one epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[str, ...]]] = []

    def on_epoch_end(self, run: Any) -> None:
        self.seen.append((run.epoch, run.active))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("strategy", WAYS)
def test_callbacks_work_on_every_device(strategy: str, together: bool) -> None:
    def callbacks() -> list[mf.Callback]:
        stopping = mf.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best=True)
        return [stopping, Together()] if together else [stopping]

    one, two, own = mixed("cpu"), mixed(BOTH), callbacks()
    given: dict[str, Any] = {"validation": (X, Y), "epochs": 5, "batch_size": 8}
    told = fit(one, (X, Y), callbacks=callbacks(), **given)
    history = fit(two, (X, Y), callbacks=own, strategy=strategy, **given)
    assert history.stopped == told.stopped
    assert history.kept == told.kept
    same(one, two)
    if together:
        assert isinstance(own[1], Together)
        assert own[1].seen[0] == (1, tuple(two.names)), "all lanes are at one epoch"


@pytest.mark.parametrize("strategy", WAYS)
def test_every_member_has_its_own_data_wherever_it_is(strategy: str) -> None:
    def data() -> mf.Each:
        return mf.each([toy(rows, rows) for rows in (16, 20, 24, 28, 32, 18)])

    one, two = mixed("cpu"), mixed(BOTH)
    told = fit(one, data(), epochs=2, batch_size=8)
    told_the_same(told, fit(two, data(), epochs=2, batch_size=8, strategy=strategy))
    same(one, two)


def shuffled() -> DataLoader:
    return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=8, shuffle=True)


@pytest.mark.parametrize("strategy", WAYS)
def test_one_loader_is_read_alike_for_all_devices(strategy: str) -> None:
    fleets = mixed("cpu"), mixed(BOTH)
    histories = []
    for fleet, way in zip(fleets, ("auto", strategy), strict=True):
        torch.manual_seed(3)
        histories.append(fit(fleet, shuffled(), epochs=3, strategy=way))
    told_the_same(*histories)
    same(*fleets)


class Ends(mf.Callback):
    together = False

    def __init__(self) -> None:
        self.ended: list[str] = []

    def on_epoch_end(self, run: Any) -> None:
        self.ended += run.active


@pytest.mark.parametrize("strategy", WAYS)
def test_lanes_wait_for_a_device_and_all_are_heard(strategy: str) -> None:
    one, two, ends = unlike("cpu"), unlike(BOTH), Ends()
    fit(one, (X, Y), epochs=3)
    fit(two, (X, Y), epochs=3, strategy=strategy, callbacks=[ends])
    same(one, two)
    assert sorted(ends.ended) == sorted(3 * two.names)
    first = {name: ends.ended.index(name) for name in two.names}
    last = {name: len(ends.ended) - ends.ended[::-1].index(name) for name in two.names}
    assert any(first[late] >= last[early] for late in first for early in last), (
        "one lane begins after another's end"
    )


def test_a_device_that_is_done_takes_over_what_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[int] = []
    taken: list[tuple[int, int]] = []
    give = processes._Foreman._give

    def noted(self: Any, hand: Any, own: Any) -> None:
        taken.append((own.home, self._hands.index(hand)))
        give(self, hand, own)

    def all_on_the_first(self: Any, shifts: Any, home: int) -> None:
        homes.append(home)
        made(self, shifts, 0)

    made = processes.Crew.__init__
    monkeypatch.setattr(processes._Foreman, "_give", noted)
    monkeypatch.setattr(processes.Crew, "__init__", all_on_the_first)
    one, two = unlike("cpu"), unlike(BOTH)
    fit(one, (X, Y), epochs=2)
    fit(two, (X, Y), epochs=2, strategy="processes")
    same(one, two)
    assert {home for home, _ in taken} == {0}
    assert {hand for _, hand in taken} == {0, 1}
    assert len(taken) == 5


class Deadly:
    """Batches at whose end the worker is killed, so many times, when they were read so often before."""

    def __init__(self, folder: Path, times: int, after: int = 1) -> None:
        self.folder, self.times, self.after = folder, times, after

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from Batches()
        before, deaths = len(list(self.folder.glob("read*"))), len(list(self.folder.glob("death*")))
        if before >= self.after and deaths < self.times:
            (self.folder / f"death{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"read{before}").touch()


@pytest.mark.parametrize("together", [False, True])
def test_the_lanes_of_a_killed_worker_go_on_from_their_last_epoch(together: bool, tmp_path: Path) -> None:
    one, two = unlike("cpu"), unlike(BOTH)
    fit(one, Batches(), epochs=3)
    batches: dict[str, Any] = {name: Batches() for name in two.names}
    batches["m4"] = Deadly(tmp_path, 1)
    callbacks = [Together()] if together else []
    history = fit(two, mf.each(batches), epochs=3, strategy="processes", callbacks=callbacks)
    assert len(list(tmp_path.glob("death*"))) == 1
    assert not history.failed
    assert all(len(history[name]["loss"]) == 3 for name in two.names)
    same(one, two)


def test_a_lane_some_of_whose_members_are_done_goes_on_elsewhere(tmp_path: Path) -> None:
    # Most are done after the first epoch; the worker, whose lane was narrowed, dies in the third.
    epochs = mf.each([1, 4, 1, 1, 4])
    one, two = (mf.Fleet.build(mlp, 5, seed=0, devices=devices) for devices in ("cpu", BOTH))
    for fleet in (one, two):
        fleet.compile("adam", "cross_entropy", lr=0.01)
    fit(one, Batches(), epochs=epochs)
    batches: dict[str, Any] = {name: Batches() for name in two.names}
    batches["4"] = Deadly(tmp_path, 1, after=2)
    history = fit(two, mf.each(batches), epochs=epochs, strategy="processes")
    assert len(list(tmp_path.glob("death*"))) == 1
    assert not history.failed
    same(one, two)


def test_a_lane_on_which_workers_die_again_and_again_fails_alone(tmp_path: Path) -> None:
    alone, one, two = unlike("cpu"), unlike("cpu"), unlike(BOTH)
    fit(alone, Batches(), epochs=1)
    fit(one, Batches(), epochs=2)
    batches: dict[str, Any] = {name: Batches() for name in two.names}
    batches["m4"] = Deadly(tmp_path, 9)
    history = fit(two, mf.each(batches), epochs=2, strategy="processes", callbacks=[Together()])
    assert list(history.failed) == ["m4"]
    assert "SIGKILL" in history.failed["m4"].reason
    assert len(list(tmp_path.glob("death*"))) == 2
    kept = two.drop("m4"), alone["m4"]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*(m.parameters() for m in kept), strict=True))
    one.drop("m4")
    same(one, two)


@pytest.mark.parametrize("strategy", WAYS)
def test_ctrl_c_stops_all_devices_and_keeps_what_was_done(strategy: str) -> None:
    class Press(mf.Callback):
        together = False
        pressed = False

        def on_epoch_end(self, run: Any) -> None:
            if run.epoch == 1 and not self.pressed:  # on both devices at once it would be pressed twice
                self.pressed = True
                signal.raise_signal(signal.SIGINT)

    fleet = unlike(BOTH)
    history = fit(fleet, (X, Y), epochs=400, batch_size=4, strategy=strategy, callbacks=[Press()])
    epochs = [len(history[name].get("loss", ())) for name in fleet.names]
    assert max(epochs) >= 1
    assert max(epochs) < 400
    assert not history.failed
    fit(fleet, (X, Y))  # and they can go on


def test_what_cannot_be_sent_is_told_before_anything_is_trained() -> None:
    fleet = unlike(BOTH)
    before = {name: [p.clone() for p in fleet[name].parameters()] for name in fleet.names}
    data: dict[str, Any] = {name: Batches() for name in fleet.names}
    data["m3"] = Locked()
    with pytest.raises(mf.StrategyError, match=r"members 'm3' with their data can't be sent .*top of a module"):
        fit(fleet, mf.each(data), strategy="processes")
    for name, parameters in before.items():
        assert all(torch.equal(a, b) for a, b in zip(parameters, fleet[name].parameters(), strict=True))


class Stop(mf.Callback):
    """Interrupts the fit after an epoch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("strategy", "then"),
    [("threads", BOTH), ("threads", "cpu"), ("threads", "cpu:0,cpu:1,cpu:2"), ("processes", BOTH)],
)
def test_a_resumed_run_ends_as_the_unbroken_one(strategy: str, then: str, tmp_path: Path) -> None:
    expected, broken, resumed = mixed("cpu"), mixed(BOTH), mixed(then)
    fit(expected, (X, Y), epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, (X, Y), epochs=3, strategy=strategy, callbacks=[mf.Checkpoint(tmp_path), Stop(2)])
    places = {tuple(lane.names): lane.device for lane in broken._lanes or ()}
    history = fit(resumed, (X, Y), epochs=3, strategy=strategy, callbacks=[mf.Checkpoint(tmp_path), Stop(9)])
    assert len(history["a"]["loss"]) == 3
    same(expected, resumed)
    if then == BOTH:
        assert {tuple(lane.names): lane.device for lane in resumed._lanes or ()} == places


@pytest.mark.parametrize(("first", "then"), [WAYS, WAYS[::-1]])
def test_a_narrowed_lane_of_a_resumed_run_may_go_on_in_another_way(first: str, then: str, tmp_path: Path) -> None:
    epochs = mf.each([1, 4, 1, 1, 4])  # after the first epoch each device has one member left
    expected, broken, resumed = (mf.Fleet.build(mlp, 5, devices=devices) for devices in ("cpu", BOTH, BOTH))
    for fleet in (expected, broken, resumed):
        fleet.compile("adam", "cross_entropy", lr=0.01)
    fit(expected, (X, Y), epochs=epochs, validation=(X, Y))
    given: dict[str, Any] = {"epochs": epochs, "validation": (X, Y)}
    with pytest.raises(KeyboardInterrupt):
        fit(broken, (X, Y), **given, strategy=first, callbacks=[mf.Checkpoint(tmp_path), Stop(2)])
    history = fit(resumed, (X, Y), **given, strategy=then, callbacks=[mf.Checkpoint(tmp_path), Stop(9)])
    assert [len(history[name]["loss"]) for name in resumed.names] == [1, 4, 1, 1, 4]
    assert resumed.plan().sharing == then
    same(expected, resumed)
