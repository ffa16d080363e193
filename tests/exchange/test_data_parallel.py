"""Members that are each trained on all devices at once exchange as on one device."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange.loops import (
    NAMES,
    TOLERANCE,
    Models,
    Rows,
    adams,
    average,
    difference,
    fit,
    fleet_of,
    give,
    rows,
    train,
)
from torch import nn

import modelfleet as mf
from modelfleet.workers import process

pytestmark = pytest.mark.slow

WAY = {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"}


class Forgets(mf.Exchange):
    """Halves the learning rate of a member, and forgets its momentum."""

    def exchange(self, run: mf.ExchangeRun) -> None:
        state = run.optimizer_state(["b"])
        run.write_optimizer_state(["b"], {name: 0 * own for name, own in state.items()})
        run.set_hyperparameters("b", {"lr": run.hyperparameters("b")["lr"] / 2})


EXCHANGES: dict[str, Callable[[], Any]] = {
    "exploit": lambda: mf.Exploit("loss"),
    "two": lambda: [mf.Gossip(groups=[["a", "b"]]), Forgets()],
}


def nets(last: int = 6) -> Models:
    """Models without running statistics, which rows of a batch would share. The last one may be wider."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 3)).double()
        for width in (6, 6, last)
    ]


def test_they_average_by_their_rows_as_a_plain_loop_does() -> None:
    models = [nn.Sequential(*(part for part in net if not isinstance(part, nn.Dropout))) for net in nets()]
    data: list[Rows] = [rows(count, seed) for seed, count in enumerate((20, 15, 8))]
    fleet = fleet_of(models, WAY["devices"])
    fit(fleet, data, mf.Average(every=2, weights="rows"), WAY, epochs=4)

    def exchange(epoch: int) -> None:
        if epoch % 2 == 0:
            mean = average(models, [20.0, 15.0, 8.0])
            for model in models:
                give(model, mean)

    train(models, data, adams(models), 4, after_epoch=exchange)
    assert difference(fleet, models) < TOLERANCE


@pytest.mark.parametrize("name", EXCHANGES)
def test_they_exchange_as_in_one_process(name: str) -> None:
    models = nets(6 if name == "exploit" else 5)
    one, two = fleet_of(models, schedule="cosine"), fleet_of(models, WAY["devices"], schedule="cosine")
    told = fit(one, rows(20), EXCHANGES[name](), epochs=3)
    history = fit(two, rows(20), EXCHANGES[name](), WAY, epochs=3)
    assert difference(two, [one[member] for member in NAMES]) < TOLERANCE
    assert {member: [own.source for own in copies] for member, copies in history.copied.items()} == {
        member: [own.source for own in copies] for member, copies in told.copied.items()
    }


class Stop(mf.Callback):
    """Breaks the fit off after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.epoch:
            raise RuntimeError("enough")


class Kill(mf.Callback):
    """Kills one of the two workers after a step, once."""

    wants_steps = True
    done = False

    def on_step_end(self, run: Any) -> None:
        if run.step == 5 and not self.done:
            self.done = True
            os.kill(process.hired_pids()[1], signal.SIGKILL)


def test_a_worker_that_is_killed_changes_no_number_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    def exchange() -> mf.Average:
        return mf.Average(every_steps=3, outer=mf.Outer(), groups=[["a", "b"]])

    one, broken, two = fleet_of(nets()), fleet_of(nets(), WAY["devices"]), fleet_of(nets(), WAY["devices"])
    fit(one, rows(20), exchange(), epochs=3)
    kill, checkpoint = Kill(), mf.Checkpoint(tmp_path / "run")
    with pytest.raises(RuntimeError, match="enough"):
        fit(broken, rows(20), exchange(), WAY, epochs=3, callbacks=[checkpoint, kill, Stop(2)])
    assert kill.done
    history = fit(two, rows(20), exchange(), WAY, epochs=3, callbacks=[checkpoint, kill, Stop(99)])
    assert not history.failed
    assert difference(two, [one[member] for member in NAMES]) < TOLERANCE
