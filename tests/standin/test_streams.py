"""No step reads or writes memory that another stream may not be done with."""

from collections.abc import Iterable
from typing import Any

import pytest
from tests.standin.models import DATA, X, Y, differing, fitted, fleet_on
from tests.standin.races import Race, watching

import modelfleet as mf
from modelfleet.planning import measurements
from modelfleet.types import Strategy


def shown(races: Iterable[Race]) -> list[str]:
    return sorted({str(race) for race in races})[:20]


class Watch(mf.Callback):
    """Reads weights after every step."""

    def on_step_end(self, run: Any) -> None:
        for name in run.fleet.names:
            [parameter.sum() for parameter in run.fleet[name].parameters()]


UNLIKE = mf.each([4, 6, 8, 10])  # hidden widths: a lane each


@pytest.mark.parametrize("devices", ["standin:0", "standin:0,standin:1"])
@pytest.mark.parametrize("strategy", ["threads", "auto"])
@pytest.mark.parametrize("watched", [False, True], ids=["freely", "watched"])
def test_lanes_beside_each_other(devices: str, strategy: Strategy, watched: bool) -> None:
    options = {"strategy": strategy, "validation": (X, Y), "callbacks": [Watch()] if watched else []}
    with watching() as races:
        there = fitted(devices, (X, Y), options, width=UNLIKE, members=4)
        there.evaluate((X, Y))
        there.predict(X)
        there.fit((X, Y), batch_size=8, progress=False, strategy=strategy)
    assert shown(races.found) == []
    assert len(races.streams) > 1 or devices == "standin:0"
    on_cpu = fitted("cpu", (X, Y), {"validation": (X, Y)}, width=UNLIKE, members=4)
    on_cpu.fit((X, Y), batch_size=8, progress=False)
    assert differing(there, on_cpu) == []


def test_threads_on_one_device_have_streams_of_their_own() -> None:
    with watching() as races:
        fitted("standin:0", (X, Y), {"strategy": "threads"}, width=UNLIKE, members=4)
    assert len(races.streams) == 5, "one of each lane's own, for all of its turns, and the caller's"
    assert shown(races.found) == []


def test_measuring_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "SHORT_RUN", 10)
    with watching() as races:
        fitted("standin:0,standin:1", (X, Y), {"epochs": 10}, width=UNLIKE, members=4)
    assert shown(races.found) == []
    assert races.operations > 1000


def test_loaders_and_own_data() -> None:
    batches = [(X[start : start + 8], Y[start : start + 8]) for start in range(0, 40, 8)]
    feeds = [batches, mf.each({str(number): [*batches[number:]] for number in range(4)})]
    for data in feeds:
        with watching() as races:
            fleet = fleet_on("standin:0", width=UNLIKE, members=4)
            fleet.fit(data, epochs=2, progress=False, strategy="threads" if data is feeds[1] else "interleaved")
        assert shown(races.found) == []


def test_every_kind_of_model() -> None:
    with watching() as races:
        for build, data in DATA.items():
            fitted("standin:0", data, {"strategy": "threads", "epochs": 1}, build=build)
    assert shown(races.found) == []
