"""Numbers that a callback sets when a fit starts are those of the first step, in every strategy."""

from pathlib import Path
from typing import Any

import pytest
from tests.frameworks.torch import numbers
from tests.frameworks.torch.test_numbers_over_time import SMOOTHED, assert_as_alone, fit, fleet_of, net

import modelfleet as mf
from modelfleet.callbacks import Run

STARTED = [0.3, 0.2, 0.6, 0.0]


class ByEpoch(mf.Callback):
    """Sets rates by the number of epochs, when a fit starts and after each epoch."""

    def on_fit_start(self, run: Run) -> None:
        self._set(run)

    def on_epoch_end(self, run: Run) -> None:
        self._set(run)

    def _set(self, run: Run) -> None:
        for name in run.fleet.names:
            run.fleet[name][2].p = STARTED[int(name[1:])] + 0.1 * run.epoch


class Die(mf.Callback):
    """Ends a fit by an error at one of its steps."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run: Run) -> None:
        if run.step == self._step:
            raise RuntimeError("killed")


def started_so(name: str) -> mf.Fleet:
    """Return a fleet of a member that was built with the numbers, trained for an epoch."""
    fleet = numbers.compiled(numbers.build(net, STARTED), name, loss=mf.each(SMOOTHED))
    fit(fleet, 1)
    return fleet


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "threads", "auto"])
def test_numbers_set_when_a_fit_starts_are_those_of_the_first_step(strategy: Any) -> None:
    fleet = fleet_of()
    fit(fleet, 1, callbacks=[ByEpoch()], strategy=strategy)
    assert_as_alone(fleet, started_so)


def test_numbers_set_when_the_second_fit_starts_are_those_of_its_first_step() -> None:
    def trained(name: str | None = None) -> mf.Fleet:
        fleet = fleet_of(name)
        fit(fleet, 1)
        fit(fleet, 1, callbacks=[ByEpoch()], **({} if name else {"strategy": "fused"}))
        return fleet

    assert_as_alone(trained(), trained)


@pytest.mark.parametrize("step", [2, 3, 4, 7], ids="killed at step {}".format)
def test_a_run_resumed_within_an_epoch_has_the_numbers_set_when_it_starts(tmp_path: Path, step: int) -> None:
    def go(fleet: mf.Fleet, *more: mf.Callback) -> None:
        callbacks = [ByEpoch(), *more, mf.Checkpoint(tmp_path, every_steps=2)]
        fit(fleet, callbacks=callbacks, strategy="fused")

    with pytest.raises(RuntimeError, match="killed"):
        go(fleet_of(), Die(step))
    resumed = fleet_of()
    go(resumed, Die(-1))

    def alone(name: str) -> mf.Fleet:
        fleet = fleet_of(name)
        fit(fleet, callbacks=[ByEpoch()])
        return fleet

    assert_as_alone(resumed, alone)
