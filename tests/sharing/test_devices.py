"""Fleets over several devices: the numbers of one device, work taken over, and workers that die."""

import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import fit, mlp, toy
from tests.sharing.test_sharing import Batches, Dropping, Locked, Stop, same
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.sharing import dispatcher, processes
from modelfleet.types import Strategy

X, Y = toy(40)
BOTH = "cpu:0,cpu:1"
WAYS = ("threads", "processes")


def mixed(devices: str) -> mf.Fleet:
    """A group to be split, and an odd one out with statistics and dropout."""
    torch.manual_seed(0)
    models = {"a": mlp(), "b": mlp(), "c": mlp(), "d": mlp(), "drop": Dropping()}
    fleet = mf.Fleet(models, devices=devices)
    rates = mf.each([0.01, 0.02, 0.01, 0.03, 0.02])
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=rates)
    return fleet


def split(devices: str) -> mf.Fleet:
    """A group to be split and an odd one out, for what does not hang on the models."""
    torch.manual_seed(0)
    models = {"a": mlp(), "b": mlp(), "c": mlp(), "d": mlp(), "wide": mlp(9)}
    fleet = mf.Fleet(models, devices=devices)
    fleet.compile("sgd", "cross_entropy", momentum=0.9, lr=mf.each([0.1, 0.001, 0.02, 0.1, 0.02]))
    return fleet


def unlike(devices: str) -> mf.Fleet:
    """More lanes than devices."""
    torch.manual_seed(0)
    fleet = mf.Fleet({f"m{width}": mlp(width) for width in (3, 4, 5)}, devices=devices)
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
    return fleet


def narrowing(devices: str) -> mf.Fleet:
    """For `ENDING`: after the first epoch each of two devices has one member left."""
    fleet = mf.Fleet.build(mlp, 4, devices=devices)
    fleet.compile("adam", "cross_entropy", lr=0.01)
    return fleet


ENDING = mf.each([1, 3, 1, 3])


def told_the_same(one: mf.History, other: mf.History) -> None:
    names = list(one.to_dict()["metrics"])
    assert names
    for name in names:
        assert list(one[name]) == list(other[name])
        for metric, values in one[name].items():
            np.testing.assert_allclose(other[name][metric], values, rtol=1e-4, atol=1e-6)


# What several tests compare with: trained once, on one device, and never changed.


@cache
def on_batches(name: str = "") -> mf.Fleet:
    """After three epochs, or one member after one."""
    fleet = unlike("cpu")
    for other in set(fleet.names) - {name} if name else ():
        fleet.drop(other)
    fit(fleet, Batches(), epochs=1 if name else 3)
    return fleet


@cache
def on_arrays() -> mf.Fleet:
    fleet = unlike("cpu")
    fit(fleet, (X, Y), epochs=3, batch_size=8)
    return fleet


GIVEN: dict[str, Any] = {"epochs": mf.each([2, 2, 2, 2, 3]), "batch_size": 8, "validation": (X, Y)}


@cache
def of_mixed() -> tuple[mf.Fleet, mf.History]:
    fleet = mixed("cpu")
    return fleet, fit(fleet, (X, Y), **GIVEN)


@pytest.mark.parametrize("strategy", [*WAYS, "auto", "interleaved"])
def test_a_mixed_fleet_has_the_numbers_of_one_device(strategy: Strategy) -> None:
    (one, told), two = of_mixed(), mixed(BOTH)
    before = torch.get_num_threads()
    told_the_same(told, fit(two, (X, Y), strategy=strategy, **GIVEN))
    same(one, two)
    assert torch.get_num_threads() == before
    if strategy != "interleaved":
        places = {lane.members: lane.device for lane in two.plan((X, Y), batch_size=8).lanes}
        assert {places["a", "b"], places["c", "d"]} == {"cpu:0", "cpu:1"}
    expected, found = one.evaluate((X, Y), batch_size=8), two.evaluate((X, Y), batch_size=8)
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


def stopped(devices: str, strategy: Strategy, *callbacks: mf.Callback) -> tuple[mf.Fleet, mf.History]:
    fleet = split(devices)
    stopping = mf.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best=True)
    given: dict[str, Any] = {"validation": (X, Y), "epochs": 5, "batch_size": 8}
    return fleet, fit(fleet, (X, Y), callbacks=[stopping, *callbacks], strategy=strategy, **given)


@cache
def stopped_on_one() -> tuple[mf.Fleet, mf.History]:
    return stopped("cpu", "auto")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("strategy", WAYS)
def test_callbacks_work_on_every_device(strategy: Strategy, together: bool) -> None:
    own = [Together()] if together else []
    (one, told), (two, history) = stopped_on_one(), stopped(BOTH, strategy, *own)
    assert told.stopped
    assert told.kept
    assert history.stopped == told.stopped
    assert history.kept == told.kept
    same(one, two)
    for callback in own:
        assert callback.seen[0] == (1, tuple(two.names)), "all lanes are at one epoch"


def fed(devices: str, strategy: Strategy) -> tuple[mf.Fleet, mf.History]:
    fleet = split(devices)
    data = mf.each([toy(rows, rows) for rows in (16, 20, 24, 18, 20)])
    return fleet, fit(fleet, data, epochs=2, batch_size=8, strategy=strategy)


@cache
def fed_on_one() -> tuple[mf.Fleet, mf.History]:
    return fed("cpu", "auto")


@pytest.mark.parametrize("strategy", WAYS)
def test_every_member_has_its_own_data_wherever_it_is(strategy: Strategy) -> None:
    (one, told), (two, history) = fed_on_one(), fed(BOTH, strategy)
    told_the_same(told, history)
    same(one, two)


def loaded(devices: str, strategy: Strategy) -> tuple[mf.Fleet, mf.History]:
    fleet = split(devices)
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    torch.manual_seed(3)
    return fleet, fit(fleet, DataLoader(rows, batch_size=8, shuffle=True), epochs=3, strategy=strategy)


@cache
def loaded_on_one() -> tuple[mf.Fleet, mf.History]:
    return loaded("cpu", "auto")


@pytest.mark.parametrize("strategy", WAYS)
def test_one_loader_is_read_alike_for_all_devices(strategy: Strategy) -> None:
    (one, told), (two, history) = loaded_on_one(), loaded(BOTH, strategy)
    told_the_same(told, history)
    same(one, two)


class Ends(mf.Callback):
    together = False

    def __init__(self) -> None:
        self.ended: list[str] = []

    def on_epoch_end(self, run: Any) -> None:
        self.ended += run.active


@pytest.mark.parametrize("strategy", WAYS)
def test_lanes_wait_for_a_device_and_all_are_heard(strategy: Strategy) -> None:
    two, ends = unlike(BOTH), Ends()
    fit(two, (X, Y), epochs=3, batch_size=8, strategy=strategy, callbacks=[ends])
    same(on_arrays(), two)
    assert sorted(ends.ended) == sorted(3 * two.names)
    first = {name: ends.ended.index(name) for name in two.names}
    last = {name: len(ends.ended) - ends.ended[::-1].index(name) for name in two.names}
    assert any(first[late] >= last[early] for late in first for early in last), (
        "one lane begins after another's end"
    )


def test_a_device_that_is_done_takes_over_what_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[int] = []
    taken: list[tuple[int, int]] = []
    give = dispatcher.Dispatcher._give

    def noted(self: Any, hand: Any, own: Any) -> None:
        taken.append((own.home, self._seats.index(hand)))
        give(self, hand, own)

    def all_on_the_first(self: Any, shifts: Any, home: int) -> None:
        homes.append(home)
        made(self, shifts, 0)

    made = processes.RemoteLanes.__init__
    monkeypatch.setattr(dispatcher.Dispatcher, "_give", noted)
    monkeypatch.setattr(processes.RemoteLanes, "__init__", all_on_the_first)
    two = unlike(BOTH)
    fit(two, (X, Y), epochs=3, batch_size=8, strategy="processes")
    same(on_arrays(), two)
    assert {home for home, _ in taken} == {0}
    assert {hand for _, hand in taken} == {0, 1}
    assert len(taken) == 3


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


def test_the_lanes_of_a_killed_worker_go_on_from_their_last_epoch(tmp_path: Path) -> None:
    two = unlike(BOTH)
    batches: dict[str, Any] = {name: Batches() for name in two.names}
    batches["m4"] = Deadly(tmp_path, 1)
    history = fit(two, mf.each(batches), epochs=3, strategy="processes", callbacks=[Together()])
    assert len(list(tmp_path.glob("death*"))) == 1
    assert not history.failed
    assert all(len(history[name]["loss"]) == 3 for name in two.names)
    same(on_batches(), two)


def test_a_lane_some_of_whose_members_are_done_goes_on_elsewhere(tmp_path: Path) -> None:
    # The worker, whose lane was narrowed after the first epoch, dies in the third.
    one, two = narrowing("cpu"), narrowing(BOTH)
    fit(one, Batches(), epochs=ENDING)
    batches: dict[str, Any] = {name: Batches() for name in two.names}
    batches["3"] = Deadly(tmp_path, 1, after=2)
    history = fit(two, mf.each(batches), epochs=ENDING, strategy="processes")
    assert len(list(tmp_path.glob("death*"))) == 1
    assert not history.failed
    same(one, two)


def test_a_lane_on_which_workers_die_again_and_again_fails_alone(tmp_path: Path) -> None:
    two = unlike(BOTH)
    batches: dict[str, Any] = {name: Batches() for name in two.names}
    batches["m4"] = Deadly(tmp_path, 9)
    history = fit(two, mf.each(batches), epochs=3, strategy="processes", callbacks=[Together()])
    assert list(history.failed) == ["m4"]
    assert "SIGKILL" in history.failed["m4"].reason
    assert len(list(tmp_path.glob("death*"))) == 2
    kept = two.drop("m4"), on_batches("m4")["m4"]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*(m.parameters() for m in kept), strict=True))
    same(two, on_batches())


@pytest.mark.parametrize("strategy", WAYS)
def test_ctrl_c_stops_all_devices_and_keeps_what_was_done(strategy: Strategy) -> None:
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
    fit(fleet, (X, Y), batch_size=4)  # and they can go on


def test_what_cannot_be_sent_is_told_before_anything_is_trained() -> None:
    fleet = unlike(BOTH)
    before = {name: [p.clone() for p in fleet[name].parameters()] for name in fleet.names}
    data: dict[str, Any] = {name: Batches() for name in fleet.names}
    data["m3"] = Locked()
    with pytest.raises(mf.StrategyError, match=r"members 'm3' with their data can't be sent .*top of a module"):
        fit(fleet, mf.each(data), strategy="processes")
    for name, parameters in before.items():
        assert all(torch.equal(a, b) for a, b in zip(parameters, fleet[name].parameters(), strict=True))


def resumable(fleet: mf.Fleet, strategy: Strategy, folder: Path, after: int) -> mf.History:
    given: dict[str, Any] = {"epochs": 3, "batch_size": 8, "strategy": strategy}
    return fit(fleet, (X, Y), **given, callbacks=[mf.Checkpoint(folder), Stop(after)])


@cache
def unbroken() -> mf.Fleet:
    fleet = mixed("cpu")
    fit(fleet, (X, Y), epochs=3, batch_size=8)
    return fleet


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[mf.Fleet, Path]:
    """A fleet whose fit was broken off, and its checkpoint: several go on from it, and none changes it."""
    fleet, folder = mixed(BOTH), tmp_path_factory.mktemp("broken")
    with pytest.raises(KeyboardInterrupt):
        resumable(fleet, "threads", folder, 2)
    return fleet, folder


@pytest.mark.parametrize(
    ("strategy", "then"),
    [("threads", BOTH), ("threads", "cpu"), ("threads", "cpu:0,cpu:1,cpu:2"), ("processes", BOTH)],
)
def test_a_resumed_run_ends_as_the_unbroken_one(
    strategy: Strategy, then: str, broken: tuple[mf.Fleet, Path], tmp_path: Path
) -> None:
    shutil.copytree(broken[1], tmp_path, dirs_exist_ok=True)
    resumed = mixed(then)
    history = resumable(resumed, strategy, tmp_path, 9)
    assert len(history["a"]["loss"]) == 3
    same(unbroken(), resumed)
    if then == BOTH:
        before, after = (
            {tuple(lane.names): lane.device for lane in fleet._lanes or ()} for fleet in (broken[0], resumed)
        )
        assert before
        assert after == before


def narrowed(devices: str, strategy: Strategy, *callbacks: mf.Callback) -> tuple[mf.Fleet, mf.History]:
    fleet = narrowing(devices)
    given: dict[str, Any] = {"epochs": ENDING, "batch_size": 8, "validation": (X, Y), "strategy": strategy}
    return fleet, fit(fleet, (X, Y), **given, callbacks=callbacks)


@cache
def narrowed_on_one() -> mf.Fleet:
    return narrowed("cpu", "auto")[0]


@pytest.mark.parametrize(("first", "then"), [WAYS, WAYS[::-1]])
def test_a_narrowed_lane_of_a_resumed_run_may_go_on_in_another_way(
    first: Strategy, then: Strategy, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        narrowed(BOTH, first, mf.Checkpoint(tmp_path), Stop(2))
    resumed, history = narrowed(BOTH, then, mf.Checkpoint(tmp_path), Stop(9))
    assert [len(history[name]["loss"]) for name in resumed.names] == [1, 3, 1, 3]
    assert resumed.plan().sharing == then
    same(narrowed_on_one(), resumed)
