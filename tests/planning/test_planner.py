"""The planner: it takes what measures best, within its budget, and remembers."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import fit, fleet_of, mlp, toy
from torch import nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.frameworks import torch as torch_adapter
from modelfleet.planning import measurements, planner, timings, trials

X, Y = toy(64)
LONG = {"epochs": 100, "batch_size": 8}  # 800 steps: worth measuring


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path))
    return tmp_path / "timings.json"


class Stopwatch:
    """Trials that take what they are told to, and are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fused: float, single: float, shared: float = 1e9) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.seconds: list[float] = []  # that each trial of a step was given
        self.sharings = 0

        def step_seconds(builder: Any, groups: Any, part: Any, batch: Any, most: float) -> float:
            self.asked.append((len(part.members), part.fused))
            self.seconds.append(most)
            return fused * len(part.members) if part.fused else single

        def epoch_seconds(*args: Any) -> float:
            self.sharings += 1
            return shared

        monkeypatch.setattr(trials, "step_seconds", step_seconds)
        monkeypatch.setattr(trials, "epoch_seconds", epoch_seconds)


@pytest.mark.parametrize(("fused", "single", "lanes"), [(0.01, 0.1, [8]), (0.1, 0.01, [1] * 8)])
def test_what_measures_faster_is_taken(
    fused: float, single: float, lanes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, fused, single)
    plan = fleet_of(8).plan((X, Y), **LONG)
    assert [len(lane.members) for lane in plan.lanes] == lanes
    if len(lanes) > 1:
        assert "apart is faster than fused" in plan.lanes[0].reason
        assert not plan.lanes[0].fused
    assert plan.predicted_seconds == pytest.approx(800 * min(8 * single, 8 * fused))


def test_a_short_run_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 0.1, 0.01)
    plan = fleet_of(8).plan((X, Y), epochs=10, batch_size=8)
    assert watch.asked == []
    assert len(plan.lanes) == 1
    assert plan.predicted_seconds is None


def test_a_fleet_of_one_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 0.1, 0.01)
    plan = fleet_of(1).plan((X, Y), **LONG)
    assert watch.asked == []
    assert plan.predicted_seconds is None


def test_plain_steps_win_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, 0.01, 0.01)
    assert [lane.fused for lane in fleet_of(2).plan((X, Y), **LONG).lanes] == [False, False]


def test_measuring_stays_within_its_part_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 1e-6, 1e-9)  # the run would take milliseconds: one look, and on
    monkeypatch.setattr(measurements.Budget, "spend", lambda self, seconds: setattr(self, "spent", 5.0))
    fleet_of(8).plan((X, Y), **LONG)
    assert watch.asked == [(8, True)]


def test_a_trial_that_was_disturbed_once_does_not_split_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 0.01, 0.05)
    plain, disturbed = trials.step_seconds, [100.0]

    def step_seconds(*args: Any) -> float:
        return plain(*args) * (disturbed.pop() if disturbed else 1.0)

    monkeypatch.setattr(trials, "step_seconds", step_seconds)
    plan = fleet_of(8).plan((X, Y), **LONG)
    assert [len(lane.members) for lane in plan.lanes] == [8]
    assert watch.asked.count((8, True)) == 2
    assert plan.lanes[0].predicted_seconds_per_step == pytest.approx(0.08)


def test_a_run_of_seconds_does_not_try_narrower_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 1e-3, 1e-1)  # to trace them would take longer than they can save
    fleet_of(8).plan((X, Y), **LONG)
    assert set(watch.asked) == {(8, True), (1, False)}
    longer = Stopwatch(monkeypatch, 1e-1, 1e1)
    fleet_of(8, optimizer="adam").plan((X, Y), **LONG)
    assert (2, True) in longer.asked


def two_depths() -> mf.Fleet:
    fleet = mf.Fleet({"a": mlp(), "deep": nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(3, 3))})
    fleet.compile("sgd", "cross_entropy")
    return fleet


def test_a_first_look_at_every_lane_tells_that_a_run_is_over_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 1e-4, 1e-4, shared=1e-9)
    plan = two_depths().plan((X, Y), **LONG)
    assert watch.asked == [(1, True), (1, True)] or watch.asked == [(1, False), (1, False)]
    assert watch.seconds == [0.0, 0.0]
    assert watch.sharings == 0
    assert plan.predicted_seconds == pytest.approx(2 * 800e-4)


def test_a_first_look_is_not_remembered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    watch = Stopwatch(monkeypatch, 1e-4, 1e-4)
    fleet = two_depths()
    fleet.plan((X, Y), **LONG)
    fleet.plan((X, Y), **LONG)
    assert len(watch.asked) == 2
    assert not cache.exists()
    two_depths().plan((X, Y), **LONG)
    assert len(watch.asked) == 4


def test_a_first_look_at_a_long_run_is_followed_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 0.1, 0.1, shared=1e9)
    two_depths().plan((X, Y), **LONG)
    assert watch.seconds[:2] == [0.0, 0.0]
    assert min(watch.seconds[2:]) > 1.0  # 160 s allow several
    assert watch.sharings >= 1


def test_what_was_measured_is_known_to_the_next_fleet(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    watch = Stopwatch(monkeypatch, 0.1, 0.01)
    first = fleet_of(8).plan((X, Y), **LONG)
    count = len(watch.asked)
    assert count >= 2
    assert cache.exists()
    second = fleet_of(8, seed=3).plan((X, Y), **LONG)
    assert len(watch.asked) == count
    assert [lane.members for lane in second.lanes] == [lane.members for lane in first.lanes]
    cache.write_text("{not json")
    fleet_of(8).plan((X, Y), **LONG)  # a file that can't be read is no trouble
    assert len(watch.asked) > count


def test_what_was_measured_on_another_kind_of_device_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 0.1, 0.01)
    counts = []
    for name in (None, "A100", "A100", "H100", "A100"):
        monkeypatch.setattr(torch_adapter, "hardware", lambda device, name=name: name)
        fleet_of(8).plan((X, Y), **LONG)
        counts.append(len(watch.asked))
    assert counts[0] < counts[1] == counts[2] < counts[3] == counts[4]


def test_lanes_share_the_device_as_it_measures_best(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 0.01, 0.01, shared=1e-6)
    fleet = mf.Fleet({"a": mlp(), "deep": nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(3, 3))})
    fleet.compile("sgd", "cross_entropy")
    assert fleet.plan((X, Y), **LONG).sharing in ("threads", "processes")
    assert watch.sharings >= 1
    Stopwatch(monkeypatch, 0.01, 0.01, shared=1e9)
    other = mf.Fleet({"a": mlp(5), "wide": mlp(11)})
    other.compile("sgd", "cross_entropy")
    assert other.plan((X, Y), **LONG).sharing == "interleaved"


def test_processes_that_would_take_turns_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def epoch_seconds(self: Any, opener: Any, opened: Any, sharing: str, *rest: Any) -> float:
        tried.append(sharing)
        return 1e-6 if sharing == "processes" else 1e9

    monkeypatch.setattr(measurements.Measurements, "epoch_seconds", epoch_seconds)
    Stopwatch(monkeypatch, 0.1, 0.1)
    for shared, best in ((True, "processes"), (False, "interleaved")):
        monkeypatch.setattr(planner, "shared_by_processes", lambda device, shared=shared: shared)
        tried.clear()
        plan = two_depths().plan((X, Y), epochs=1000, batch_size=8)
        assert plan.sharing == best
        assert tried == (["threads", "processes"] if shared else ["threads"])
        assert plan.note == ""


def test_a_plan_tells_what_processes_cost_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = two_depths()
    assert fleet.plan((X, Y), strategy="processes").note == ""
    monkeypatch.setattr(planner, "shared_by_processes", lambda device: False)
    plan = fleet.plan((X, Y), strategy="processes")
    assert plan.sharing == "processes"
    assert "processes take turns on cpu" in plan.note
    assert plan.note in " ".join(str(plan).split())
    assert fleet.plan((X, Y), strategy="threads").note == ""


def test_real_trials_leave_the_members_alone_and_give_a_time() -> None:
    plain, fleet = fleet_of(4), fleet_of(4)
    plan = fleet.plan((X, Y), **LONG)
    predicted = plan.lanes[0].predicted_seconds_per_step
    assert predicted is not None
    assert predicted > 0
    assert plan.measuring_seconds > 0
    fit(plain, (X, Y), epochs=2)
    fit(fleet, (X, Y), epochs=2)
    for name in fleet.names:
        assert testing.largest_difference(fleet[name], plain[name])[0] < 1e-6


def test_a_plan_tells_what_a_run_took() -> None:
    fleet = fleet_of(3)
    fit(fleet, (X, Y), epochs=8, batch_size=8)
    plan = fleet.plan((X, Y), epochs=8, batch_size=8)
    assert plan.lanes[0].seconds_per_step is not None
    assert plan.seconds_per_epoch is not None
    assert "took" in str(plan)
    assert "the last run took" in str(plan)


def test_keys_go_by_what_a_measurement_depends_on() -> None:
    assert timings.key("a", (1, 2)) == timings.key("a", (1, 2))
    assert timings.key("a", (1, 2)) != timings.key("a", (1, 3))

    def local() -> None: ...

    assert " at 0x" in repr(local)
    first = timings.key(local)

    def local() -> None: ...

    assert timings.key(local) == first


def test_nothing_is_kept_where_nothing_is_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELFLEET_CACHE", "")
    known = timings.Timings()
    known.put("a", 1.0)
    known.save()
    assert list(tmp_path.iterdir()) == []
    assert timings.Timings().get("a") is None
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path / "new"))
    known = timings.Timings()
    known.put("a", float(np.float32(0.5)))
    known.save()
    assert timings.Timings().get("a") == 0.5


def test_long_runs_on_several_cpus_take_processes_and_what_can_not_be_sent_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "WORKER_START_SECONDS", 0.0)  # as if the run were long
    long = lambda self, opener, plan, *_: replace(plan, predicted_seconds=1.0)  # noqa: E731
    monkeypatch.setattr(planner.Planner, "_share", long)
    x, y = toy(64)

    def sharing(fleet: mf.Fleet) -> str:
        fleet.compile("sgd", "cross_entropy", lr=0.1)
        return fleet.plan((x, y), batch_size=8).sharing

    class Locked(nn.Linear):
        """Can't be pickled."""

        def __init__(self) -> None:
            super().__init__(4, 3)
            self.lock = threading.Lock()

    assert sharing(mf.Fleet([mlp(), mlp()], devices="cpu:0,cpu:1")) == "processes"
    assert sharing(mf.Fleet([Locked(), Locked()], devices="cpu:0,cpu:1")) == "threads"
