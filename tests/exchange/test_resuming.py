"""A run with an exchange that is killed and resumed equals the unbroken one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.exchange.loops import HERE, IN_WORKERS, NAMES, Way, data_of, fit, fleet_in, nets, ways
from tests.helpers import all_weights, equal

import modelfleet as mf


class Dies(mf.Callback):
    """Breaks the fit off after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            raise RuntimeError("killed")


EXCHANGES: dict[str, Callable[[], Any]] = {
    "average": lambda: mf.Average(every_steps=3),
    "outer": lambda: mf.Average(every_steps=3, outer=mf.Outer(lr=0.7, momentum=0.9)),
    "outer by epochs": lambda: mf.Average(outer=mf.Outer(lr=0.5, momentum=0.5), groups=[["a", "c"], ["b"]]),
    "gossip": lambda: mf.Gossip(every_steps=2),
    "exploit": lambda: mf.Exploit("loss"),
    "distill": lambda: mf.Distill(temperature=2.0),
    "two": lambda: [mf.Gossip(every_steps=1), mf.Exploit("loss")],
}


def run(folder: Path, make: Callable[[], Any], way: Way, die: int | None = None) -> tuple[Any, mf.History]:
    fleet = fleet_in(way, nets())
    callbacks = [mf.Checkpoint(folder, every_steps=2), Dies(die)]
    history = fit(fleet, data_of(20, 20, 20), make(), way, epochs=4, callbacks=callbacks)
    return all_weights(fleet), history


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("die", [1, 7, 12])
def test_a_resumed_run_equals_the_unbroken_one(name: str, die: int, tmp_path: Path) -> None:
    whole, history = run(tmp_path / "whole", EXCHANGES[name], HERE[0])
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "broken", EXCHANGES[name], HERE[0], die)
    resumed, after = run(tmp_path / "broken", EXCHANGES[name], HERE[0])
    assert equal(resumed, whole)
    assert after.to_dict() == history.to_dict()


@ways(HERE[1:], IN_WORKERS)
def test_it_does_so_however_the_members_run(way: Way, tmp_path: Path) -> None:
    make = EXCHANGES["outer" if "devices" in way else "exploit"]
    whole, history = run(tmp_path / "whole", make, way)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "broken", make, way, 11)
    resumed, after = run(tmp_path / "broken", make, way)
    assert equal(resumed, whole)
    assert after.to_dict() == history.to_dict()


def test_a_second_fit_begins_with_the_compiled_hyperparameters_and_new_outer_momentum() -> None:
    data = data_of(20, 20, 20)
    seen: list[dict[str, float]] = []

    class Look(mf.Exchange):
        def start(self, run: mf.ExchangeRun, *, resumed: bool) -> None:
            seen.append({name: run.hyperparameters(name)["lr"] for name in run.active})

        def exchange(self, run: mf.ExchangeRun) -> None:
            seen.append({name: run.hyperparameters(name)["lr"] for name in run.active})

    fleet = fleet_in(HERE[0], nets())
    average = mf.Average(outer=mf.Outer())
    for _ in range(2):
        fit(fleet, data, [mf.Exploit("loss"), average, Look()], epochs=2)
        fleet["a"][0].weight.data.add_(1.0)  # the outer optimizer must begin at what the members have now
    assert seen[0] == seen[3] == dict(zip(NAMES, [0.1, 0.05, 0.01], strict=True))
    assert seen[1] != seen[0]
    fresh = fleet_in(HERE[0], nets())
    for _ in range(2):
        fit(fresh, data, [mf.Exploit("loss"), mf.Average(outer=mf.Outer())], epochs=2)
        fresh["a"][0].weight.data.add_(1.0)
    assert equal(all_weights(fresh), all_weights(fleet))
