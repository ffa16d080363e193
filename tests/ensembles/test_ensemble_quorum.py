"""A quorum: the answer of the members that are there in time, and the names of the others."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import mlp, toy
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.ensembles import quorum
from modelfleet.ensembles.quorum import Collected, Quorum
from modelfleet.errors import BusyError, DeadlineError, InputError, StrategyError
from modelfleet.types import Strategy

X, Y = toy(70)
STRATEGIES: list[Strategy] = ["auto", "interleaved", "threads", "processes"]


class Broken(nn.Module):
    """A model that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("it is broken")


class Spoilt(nn.Module):
    """A model that says NaN of its last rows, or of none."""

    def __init__(self, bad: float = float("nan")) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("bad", torch.tensor(bad))

    def forward(self, x: Tensor) -> Tensor:
        last = x == torch.from_numpy(X[-1])
        return torch.where(last.all(1, keepdim=True), self.bad, self.layer(x))


class Deadly(nn.Module):
    """A model that kills the process that runs it, unless it is the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


class Stuck(nn.Module):
    """A model that waits, in every call, until it is let go."""

    go = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        Stuck.go.wait()
        return self.layer(x)


class Asleep(nn.Module):
    """A model that never comes back in a worker process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home:
            signal.pause()
        return self.layer(x)


@pytest.fixture(autouse=True)
def _nobody_stuck() -> Iterator[None]:
    Stuck.go.clear()
    yield
    Stuck.go.set()


def pass_deadline_after(monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """Have the deadline pass when so many members have answered, whatever the clock says."""
    clock = {"now": 0.0}
    add = Collected.add

    def added(self: Collected, report: Any) -> None:
        add(self, report)
        if len(self.answered) >= answers:
            clock["now"] = 1e6

    monkeypatch.setattr(Collected, "add", added)
    monkeypatch.setattr(quorum, "now", lambda: clock["now"])


def fleet_with(**others: nn.Module) -> mf.Fleet:
    torch.manual_seed(0)
    return mf.Fleet({"a": mlp(), "b": mlp(), "wide": mlp(9), **others})


def mean_of(fleet: mf.Fleet, *names: str) -> np.ndarray:
    return np.mean([fleet.predict(X, members=[name])[name] for name in names], axis=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_member_that_raises_is_absent_and_named(strategy: Strategy) -> None:
    fleet = fleet_with(broken=Broken())
    found = mf.Ensemble(fleet).predict(X, quorum=3, std=True, strategy=strategy, batch_size=16)
    assert found.answered == ("a", "b", "wide")
    assert list(found.missing) == ["broken"]
    assert "it is broken" in found.missing["broken"]
    np.testing.assert_allclose(found.output, mean_of(fleet, "a", "b", "wide"), atol=1e-6)
    every = np.stack([fleet.predict(X, members=[name])[name] for name in found.answered])
    np.testing.assert_allclose(found.std, every.std(0), atol=1e-6)
    with pytest.raises(InputError, match=r"3 of 4 members have answered, and 4 must. Failed: 'broken': .*broken"):
        mf.Ensemble(fleet).predict(X, quorum=1.0, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_member_whose_outputs_are_not_finite_is_absent_from_all_rows(strategy: Strategy) -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet({"one": Spoilt(0.0), "bad": Spoilt(), "two": Spoilt(0.0), "worse": Spoilt(float("inf"))})
    found = mf.Ensemble(fleet).predict(X, quorum=0.5, strategy=strategy, batch_size=16)
    assert list(found.missing) == ["bad", "worse"]
    assert "not finite" in found.missing["bad"]
    np.testing.assert_allclose(found.output, mean_of(fleet, "one", "two"), atol=1e-6)
    assert np.isnan(mf.Ensemble(fleet).predict(X, strategy=strategy)).any()  # without a quorum, as in NumPy


def test_votes_of_those_who_are_there_are_counted() -> None:
    fleet = fleet_with(broken=Broken())
    found = mf.Ensemble(fleet, "vote", weights=[1, 1, 3, 9]).predict(X, quorum=0.5, std=True)
    np.testing.assert_array_equal(found.output, fleet.predict(X, members=["wide"])["wide"].argmax(1))
    assert found.std.min() >= 3 / 5


def test_who_is_late_at_the_deadline_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_with(stuck=Stuck())
    pass_deadline_after(monkeypatch, 3)
    found = mf.Ensemble(fleet).predict(X, quorum=0.7, deadline=60.0, strategy="threads")
    assert found.missing == {"stuck": quorum.LATE}
    Stuck.go.set()
    # The fleet waits until the late one has ended its batch, and is then as before.
    np.testing.assert_allclose(found.output, mean_of(fleet, "a", "b", "wide"), atol=1e-6)
    assert set(fleet.predict(X)) == {"a", "b", "wide", "stuck"}


def test_below_the_quorum_the_error_names_the_late_and_the_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_with(stuck=Stuck(), broken=Broken())
    pass_deadline_after(monkeypatch, 3)
    with pytest.raises(DeadlineError, match=r"3 of 5 members have answered, and 4 must. Late after 60 s: 'stuck'"):
        mf.Ensemble(fleet).predict(X, quorum=4, deadline=60.0, strategy="threads")


def test_with_a_deadline_alone_all_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mf.Ensemble(fleet_with()).predict(X, deadline=600.0)
    assert found.missing == {}
    pass_deadline_after(monkeypatch, 3)
    with pytest.raises(DeadlineError, match="3 of 4 members have answered, and 4 must"):
        mf.Ensemble(fleet_with(stuck=Stuck())).predict(X, deadline=60.0, strategy="threads")


def test_late_processes_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "asleep": Asleep()}, devices="cpu:0,cpu:1")
    pass_deadline_after(monkeypatch, 1)
    found = mf.Ensemble(fleet).predict(X, quorum=1, deadline=60.0, strategy="processes")
    assert found.missing == {"asleep": quorum.LATE}
    np.testing.assert_allclose(found.output, mean_of(fleet, "a"), atol=1e-6)


def test_a_worker_that_dies_takes_only_its_members_with_it() -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "deadly": Deadly()}, devices="cpu:0,cpu:1")
    found = mf.Ensemble(fleet).predict(X, quorum=1, strategy="processes")
    assert "its worker is gone" in found.missing["deadly"]
    assert "SIGKILL" in found.missing["deadly"]
    np.testing.assert_allclose(found.output, mean_of(fleet, "a"), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "expected"), [(0.8, 8), (0.81, 9), (1.0, 10), (1, 1), (10, 10), (None, 10), (0.7, 7), (0.01, 1)]
)
def test_a_quorum_is_a_number_or_a_fraction(given: float | None, expected: int) -> None:
    assert Quorum.of(given, None, 10).needed == expected


@pytest.mark.parametrize(
    "wrong", [{"quorum": 0}, {"quorum": 4}, {"quorum": 1.5}, {"quorum": True}, {"deadline": 0}, {"deadline": "1"}]
)
def test_a_wrong_quorum_or_deadline_is_explained(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected a number of"):
        mf.Ensemble(fleet_with()).predict(X, **wrong)


def test_what_needs_all_values_or_one_loader_has_no_quorum() -> None:
    with pytest.raises(InputError, match="needs all values of a row at once"):
        mf.Ensemble(fleet_with(), "median").predict(X, quorum=1)
    with pytest.raises(StrategyError, match="a quorum or a deadline needs arrays"):
        mf.Ensemble(fleet_with()).predict([(X, Y)], quorum=1)


def test_a_callback_is_told_that_a_quorum_is_not_possible_there() -> None:
    class Asking(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            with pytest.raises(BusyError, match="within another verb"):
                mf.Ensemble(run.fleet).predict(X, quorum=1)
            found.append(mf.Ensemble(run.fleet).predict(X))

    found: list[np.ndarray] = []
    fleet = fleet_with()
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fleet.fit((X, Y), progress=False, callbacks=[Asking()])
    np.testing.assert_allclose(found[0], mf.Ensemble(fleet).predict(X), atol=1e-6)


@pytest.mark.parametrize("strategy", ["auto", "threads"])
def test_programs_are_traced_once_for_all_calls(strategy: Strategy) -> None:
    torch.manual_seed(0)
    ensemble = mf.Ensemble([mlp() for _ in range(4)])
    ensemble.predict(X, quorum=1, strategy=strategy)
    built = len(ensemble._builder._programs)
    ensemble.predict(X, quorum=1, strategy=strategy)
    assert len(ensemble._builder._programs) == built
