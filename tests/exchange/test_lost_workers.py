"""A run with an exchange equals the unbroken one if workers are killed, in an epoch or between two."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange.loops import Rows, data_of, net
from tests.helpers import all_weights, equal
from torch import Tensor

import modelfleet as mf

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c", "d"]
GROUPS = [["a", "c"], ["b", "d"]]
BOTH = "cpu:0,cpu:1"


class Batches:
    """Batches of five rows, whose reader leaves the number of its process. It may be killed at a step, once."""

    def __init__(self, rows: Rows, note: Path, deadly: int | None = None) -> None:
        self.rows, self.note, self.deadly = rows, note, deadly

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.note.write_text(str(os.getpid()))
        x, y = self.rows
        death = self.note.with_suffix(".death")
        for step, begin in enumerate(range(0, len(x), 5)):
            if step == self.deadly and not death.exists():
                death.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield x[begin : begin + 5], y[begin : begin + 5]


class Kill(mf.Callback):
    """Kills the worker of a member after a step or an epoch, once."""

    def __init__(self, note: Path, what: signal.Signals, **when: int) -> None:
        self.note, self.what, self.when = note, what, when
        self.done = False

    @property
    def wants_steps(self) -> bool:
        return "step" in self.when

    def on_step_end(self, run: Any) -> None:
        self._kill(run.step == self.when["step"])

    def on_epoch_end(self, run: Any) -> None:
        self._kill(run.epoch == self.when.get("epoch"))

    def _kill(self, due: bool) -> None:
        if due and not self.done:
            self.done = True
            os.kill(int(self.note.read_text()), self.what)


class Shrink(mf.Callback):
    """Makes the weights of the members smaller by hand, by what another has, after every other step."""

    together = True
    wants_steps = True

    def on_step_end(self, run: Any) -> None:
        if run.step % 2 == 0:
            models = [run.sync(name) for name in NAMES]
            shift = float(models[2][0].weight.detach().mean())
            for name, model in zip(NAMES, models, strict=True):
                with torch.no_grad():
                    model[0].weight.sub_(0.1 * shift)
                run.take(name)


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "average": lambda: {"exchange": mf.Average(every_steps=3, groups=GROUPS)},
    "outer": lambda: {"exchange": mf.Average(every_steps=2, outer=mf.Outer(), groups=GROUPS)},
    "callback": lambda: {"callbacks": [Shrink()]},
}


def run(
    folder: Path, change: str, devices: str, kill: Kill | None = None, deadly: int | None = None
) -> tuple[Any, mf.History]:
    """Train two kinds of members, which exchange with their own kind, in a few workers."""
    torch.manual_seed(0)
    fleet = mf.Fleet({name: net(6 if name in GROUPS[0] else 5) for name in NAMES}, devices=devices, seed=3)
    fleet.compile("adam", "cross_entropy", lr=mf.each([0.1, 0.05, 0.01, 0.02]))
    rows = data_of(25, 25, 25, 25)
    data = {
        name: Batches(own, folder / name, deadly if name == "c" else None)
        for name, own in zip(NAMES, rows, strict=True)
    }
    options = CHANGES[change]()
    callbacks = [*options.pop("callbacks", []), *([] if kill is None else [kill])]
    history = fleet.fit(
        mf.each(data), epochs=3, progress=False, strategy="processes", callbacks=callbacks, **options
    )
    return all_weights(fleet), history


def told(history: mf.History) -> dict[str, Any]:
    return history.to_dict()["metrics"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", [{"epoch": 1}, {"step": 1}, {"step": 7}, {"step": 10}], ids=str)
def test_a_worker_killed_between_two_steps_changes_no_number(
    change: str, when: dict[str, int], tmp_path: Path
) -> None:
    whole, history = run(tmp_path, change, BOTH)
    kill = Kill(tmp_path / "c", signal.SIGKILL, **when)
    broken, after = run(tmp_path, change, BOTH, kill)
    assert kill.done
    assert not after.failed
    assert equal(broken, whole)
    assert told(after) == told(history)


@pytest.mark.parametrize("devices", ["cpu", BOTH])
@pytest.mark.parametrize("deadly", [2, 4])
def test_a_worker_killed_within_a_step_changes_no_number(
    devices: str, deadly: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # on one device, one worker has all lanes
    whole, history = run(tmp_path, "average", devices)
    broken, after = run(tmp_path, "average", devices, deadly=deadly)
    assert list(tmp_path.glob("*.death"))
    assert not after.failed
    assert equal(broken, whole)
    assert told(after) == told(history)
