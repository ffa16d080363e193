"""Ctrl-C ends a fit soon, whatever its workers, its callbacks or its preparation are at."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from tests.helpers import fit, mlp, toy

import modelfleet as mf
from modelfleet.feeds import reading
from modelfleet.types import Strategy

X, Y = toy(40)
TWO = "cpu:0,cpu:1"
MOST = 500  # epochs after Ctrl-C that no fit may reach


def fleet_of(devices: str) -> mf.Fleet:
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "b": mlp(9)}, devices=devices)
    fleet.compile("adam", "cross_entropy", lr=0.01)
    return fleet


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Pressing(mf.Callback):
    """Has Ctrl-C pressed soon after the second epoch, while the workers are at the next ones."""

    epochs = 0

    def on_epoch_end(self, run: Any) -> None:
        self.epochs += 1
        if self.epochs == 2:
            threading.Timer(0.02, press).start()
        if self.epochs > MOST:
            raise AssertionError("it goes on after Ctrl-C")


class Watching(Pressing):
    def on_step_end(self, run: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("strategy", "devices", "callback"),
    [
        ("processes", "cpu", Pressing),
        ("processes", TWO, Pressing),
        ("processes", TWO, Watching),
        ("data_parallel", TWO, Pressing),
        ("threads", "cpu", Pressing),
    ],
)
def test_ctrl_c_is_heard_while_callbacks_wait_for_all(strategy: Strategy, devices: str, callback: Any) -> None:
    fleet = fleet_of(devices)
    history = fit(fleet, (X, Y), epochs=10**6, batch_size=8, strategy=strategy, callbacks=[callback()])
    assert not history.failed
    assert len(history["a"]["loss"]) >= 2
    fit(fleet, (X, Y), batch_size=8)  # and they can go on


class SlowToBegin:
    """Batches that take long to come in a worker, and then raise."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, os.getpid()

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        if os.getpid() != self.owner:
            (self.folder / str(os.getpid())).touch()
            time.sleep(100)
            raise RuntimeError("nobody has ended this worker")
        yield torch.from_numpy(X), torch.from_numpy(Y)


def test_ctrl_c_does_not_wait_for_workers_that_have_not_begun(tmp_path: Path) -> None:
    def press_when_begun() -> None:
        while not any(tmp_path.iterdir()):
            time.sleep(0.01)
        press()

    threading.Thread(target=press_when_begun, daemon=True).start()
    history = fit(fleet_of(TWO), SlowToBegin(tmp_path), epochs=3, strategy="processes")
    assert not history.failed
    assert not history["a"]


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Have Python's own handler, whatever an earlier test of this process has left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_that_is_swallowed_while_a_fit_is_prepared_ends_it_all_the_same() -> None:
    looked: list[int] = []

    def batches() -> Iterator[Any]:
        if not looked:
            try:
                press()
                time.sleep(1)
            except KeyboardInterrupt:  # as Python does in the callback of a weak reference
                pass
        looked.append(1)
        yield torch.from_numpy(X), torch.from_numpy(Y)

    before = signal.getsignal(signal.SIGINT)
    fleet = fleet_of("cpu")
    with pytest.raises(KeyboardInterrupt):
        fit(fleet, batches, epochs=3)
    assert looked == [1]
    assert signal.getsignal(signal.SIGINT) is before
    assert len(fit(fleet, batches)["a"]["loss"]) == 1


over = threading.Event()


class Waits(SimpleQueue[Any]):
    """A queue of batches that counts how often one was waited for."""

    number = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        Waits.number += 1
        return super().get(block, timeout)


class Hanging:
    """A loader whose second batch comes only if the test has failed.

    Args:
        after: Have Ctrl-C pressed twice once batches were waited for so often; 0: not at all.
    """

    def __init__(self, after: int = 0) -> None:
        self.after = after
        self.hanging = False

    def __iter__(self) -> Iterator[Any]:
        yield X[:8], Y[:8]
        self.hanging = True
        end = time.monotonic() + 30
        while self.after and Waits.number < self.after and time.monotonic() < end:
            time.sleep(0.01)
        for _ in range(2 if self.after else 0):
            press()
            time.sleep(0.2)  # two signals at once would be one
        over.wait(30)
        self.hanging = False


class PressingTwice(mf.Callback):
    """Has Ctrl-C pressed twice in the thread that called `fit`, while it is not waiting for a batch."""

    def on_step_end(self, run: Any) -> None:
        press()
        press()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reading, "PATIENCE", 0.05)
    monkeypatch.setattr(reading, "SimpleQueue", Waits)
    Waits.number = 0
    over.clear()
    yield
    over.set()
    for thread in threading.enumerate():
        if thread.name == "modelfleet-feed":
            thread.join()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("strategy", "own", "after"),
    [
        ("interleaved", False, 0),
        ("interleaved", False, 2),
        ("interleaved", True, 2),
        ("threads", False, 2),
        ("threads", True, 0),
        ("threads", True, 4),
    ],
)
def test_a_second_ctrl_c_ends_a_fit_whose_loader_hangs(strategy: Strategy, own: bool, after: int) -> None:
    fleet = fleet_of("cpu")
    loaders = [Hanging(after), Hanging()]
    callbacks = [] if after else [PressingTwice()]
    with pytest.raises(KeyboardInterrupt):
        fit(fleet, mf.each(loaders) if own else loaders[0], epochs=1, strategy=strategy, callbacks=callbacks)
    assert loaders[0].hanging
    fit(fleet, (X, Y), epochs=1, batch_size=8)


@pytest.mark.usefixtures("impatient")
def test_the_first_ctrl_c_does_not_wait_for_a_loader_that_hangs() -> None:
    fleet = fleet_of("cpu")
    loader = Hanging()

    class PressingOnce(mf.Callback):
        def on_step_end(self, run: Any) -> None:
            press()

    history = fit(fleet, loader, epochs=1, callbacks=[PressingOnce()])
    assert loader.hanging
    assert not history.failed


@pytest.mark.usefixtures("impatient")
def test_ctrl_c_ends_an_evaluation_whose_loader_hangs() -> None:
    fleet = fleet_of("cpu")
    loader = Hanging()

    def stop(output: Any, target: Any) -> Any:
        raise KeyboardInterrupt

    fleet.compile("adam", "cross_entropy", metrics=[stop])
    with pytest.raises(KeyboardInterrupt):
        fleet.evaluate(loader)
    fleet.compile("adam", "cross_entropy")
    fit(fleet, (X, Y), epochs=1, batch_size=8)
