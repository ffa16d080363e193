"""evaluate and predict again on data of the same form: both quick ways give what the lanes gave at first."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.frameworks.torch.test_stamps import CHANGES, Scaled
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet import repeating
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.direct import DirectModels

X = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 80)


@pytest.fixture(params=["loop", "fused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One of the quick ways, taken wherever it can be."""
    monkeypatch.setattr(repeating._Known, "choose", lambda self: request.param)
    return request.param


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def fleet_of(make: Callable[[], nn.Module], members: int = 3) -> mf.Fleet:
    torch.manual_seed(0)
    fleet = mf.Fleet([make() for _ in range(members)])
    fleet.compile("sgd", "cross_entropy", lr=0.1, metrics=["accuracy"])
    return fleet


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each call that a quick way answers."""
    calls: list[str] = []
    record = repeating._Known.record

    def counted(self: repeating._Known, way: Any, seconds: float) -> None:
        calls.append(way)
        record(self, way, seconds)

    monkeypatch.setattr(repeating._Known, "record", counted)
    monkeypatch.setattr(repeating._Known, "short", False)
    return calls


@pytest.mark.parametrize("rows", [1, 5, 80])
@pytest.mark.parametrize("members", [1, 3])
def test_repeated_calls_give_the_same_answers(
    way: str, rows: int, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    fleet = fleet_of(net, members)
    x, y = X[:rows], Y[:rows]
    values, outputs = fleet.evaluate((x, y)), fleet.predict(x)
    for _ in range(3):
        for name, output in fleet.predict(x).items():
            np.testing.assert_allclose(output, outputs[name], rtol=1e-5, atol=1e-6)
        for name, own in fleet.evaluate((x, y)).items():
            assert own == pytest.approx(values[name], rel=1e-5)
    fused = way == "fused" and members > 1
    assert set(calls) == {"fused" if fused else "loop"}
    assert len(calls) == 6


def test_the_quicker_way_is_taken_after_both_were_timed() -> None:
    known = repeating._Known(None, None, None, None, None, False)  # pyrefly: ignore
    taken = []
    for _ in range(12):
        taken.append(known.choose())
        known.record(taken[-1], 1.0 if taken[-1] == "fused" else 3.5)
    assert taken == ["fused"] * 4 + ["loop"] * 4 + ["fused"] * 4
    known.record("fused", 9.0)  # something else was in the way
    assert known.choose() == "fused"
    for _ in range(40):
        known.record("fused", 9.0)  # it has become slower
    assert known.choose() == "loop"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1])
def test_every_change_of_a_model_is_seen(way: str, change: Callable[[Scaled], None], which: int) -> None:
    torch.manual_seed(0)
    models = [Scaled(), Scaled(), Scaled()]
    fleet = mf.Fleet(models)
    for _ in range(3):
        fleet.predict(X)
    change(models[which])
    for _ in range(3):
        found = fleet.predict(X)
        for model, output in zip(models, found.values(), strict=True):
            alone = copy.deepcopy(model).eval()
            np.testing.assert_allclose(output, alone(torch.from_numpy(X)).detach().numpy(), rtol=1e-4, atol=1e-5)


class Noisy(nn.Module):
    """A model that draws random numbers in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, training=True)


class Writing(Noisy):
    """A model that writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2.0))


class Mixing(Noisy):
    """A model whose rows feel each other."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return found - found.mean(0)


class Passing(Noisy):
    """A model that returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Grouped(Noisy):
    """A model with several outputs."""

    def forward(self, x: Tensor) -> Any:
        return {"a": self.layer(x), "b": x + 1}


@pytest.mark.parametrize("make", [Noisy, Writing, Mixing, Passing, Grouped])
def test_unusual_models_get_the_same_answers_at_every_call(way: str, make: type[Noisy]) -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet([make(), make()])
    x = X.copy()
    first = fleet.predict(x)
    for _ in range(3):
        found = fleet.predict(x)
        torch.testing.assert_close(found, first, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(x, X)
    if make is Passing:
        found["0"][:] = 0.0  # pyrefly: ignore
        np.testing.assert_array_equal(found["1"], X)


class Counting(nn.Module):
    """A model that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_a_model_that_counts_its_calls_counts_each_once(way: str) -> None:
    models = [Counting(), Counting()]
    fleet = mf.Fleet(models)
    fleet.predict(X[:5])
    before = [model.calls for model in models]
    for _ in range(3):
        fleet.predict(X[:5])
    assert [model.calls - own for model, own in zip(models, before, strict=True)] == [3, 3]


def test_ignored_labels_and_metrics_by_batch_count_as_in_the_first_call(way: str) -> None:
    y = np.where(np.arange(80) < 20, -100, Y)  # most of the first batch of 32
    fleet = fleet_of(net)
    first = fleet.evaluate((X, y))
    for _ in range(3):
        assert fleet.evaluate((X, y)) == {name: pytest.approx(own, rel=1e-5) for name, own in first.items()}
    fleet.compile("sgd", "cross_entropy", lr=0.1, metrics=[lambda output, target: output.max()])
    first = fleet.evaluate((X, Y))
    for _ in range(3):
        assert fleet.evaluate((X, Y)) == {name: pytest.approx(own, rel=1e-5) for name, own in first.items()}


def test_bad_targets_are_refused_at_every_call(way: str) -> None:
    fleet = fleet_of(net)
    for _ in range(3):
        fleet.evaluate((X, Y))
    for _ in range(2):
        with pytest.raises(InputError, match="the target in row 7 is 9"):
            fleet.evaluate((X, np.where(np.arange(80) == 7, 9, Y)))
    fleet.compile("sgd", "bce_with_logits", lr=0.1)
    targets = np.zeros((80, 3), np.float32)
    for _ in range(3):
        fleet.evaluate((X, targets))
    with pytest.raises(InputError, match=r"the target in row 0 is 2\.0"):
        fleet.evaluate((X, targets + 2))


@pytest.mark.parametrize(
    "context",
    [nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
)
def test_modes_and_contexts_stay_as_they_are_and_change_nothing(way: str, context: Callable[[], Any]) -> None:
    fleet = fleet_of(net)
    expected = fleet.predict(X)
    modes = {name: [module.training for module in fleet[name].modules()] for name in fleet}
    assert any(any(own) for own in modes.values())
    for _ in range(3):
        with context():
            grad = torch.is_grad_enabled()
            torch.testing.assert_close(fleet.predict(X), expected, rtol=1e-5, atol=1e-6)
            assert torch.is_grad_enabled() == grad
    assert modes == {name: [module.training for module in fleet[name].modules()] for name in fleet}


def test_answers_follow_a_fit_a_drop_and_a_new_member(way: str) -> None:
    fleet = fleet_of(net)

    def check() -> None:
        for _ in range(3):
            for name, output in fleet.predict(X).items():
                alone = copy.deepcopy(fleet[name]).eval()
                expected = alone(torch.from_numpy(X)).detach().numpy()
                np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)

    check()
    fleet.fit((X, Y), epochs=2, progress=False)
    check()
    fleet.drop("1")
    check()
    fleet.add("new", net())
    check()
    assert list(fleet.predict(X)) == ["0", "2", "new"]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int32])
def test_arrays_of_every_dtype_and_read_only_ones_are_taken(way: str, kind: type) -> None:
    x = (10 * X).astype(kind)
    x.flags.writeable = False
    fleet = mf.Fleet([nn.Sequential(Cast(), net()) for _ in range(2)])
    first = fleet.predict(x)
    for _ in range(3):
        torch.testing.assert_close(fleet.predict(x), first, rtol=1e-5, atol=1e-6)


class Cast(nn.Module):
    """Takes any numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_members_whose_models_change_before_every_call_are_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating._Known, "choose", lambda self: "fused")
    calls = count_calls(monkeypatch)
    fleet = fleet_of(net)
    for _ in range(12):
        with torch.no_grad():
            next(fleet["0"].parameters()).mul_(1.1)
        found = fleet.predict(X[:5])["0"]
        expected = copy.deepcopy(fleet["0"]).eval()(torch.from_numpy(X[:5])).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert calls.count("loop") >= 8  # reading the weights of all lanes again costs more than the loop


def test_what_is_not_usable_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DirectModels] = []
    plain = DirectModels.__init__

    def counted(self: DirectModels, *args: Any) -> None:
        made.append(self)
        plain(self, *args)

    monkeypatch.setattr(DirectModels, "__init__", counted)
    fleet = mf.Fleet([Noisy(), Noisy()])
    for _ in range(5):
        fleet.predict(X[:5])
    assert len(made) == 1


TABLE = np.ones((200, 200), np.float32)  # too large to be compared at every step


class Reading(nn.Module):
    """A model that reads an array that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(TABLE[0, 0])


def test_what_a_forward_reads_elsewhere_is_read_at_every_call(way: str) -> None:
    fleet = mf.Fleet([Reading(), Reading()])
    before = [fleet.predict(X[:5]) for _ in range(4)][-1]
    TABLE[0, 0] = 3.0
    after = fleet.predict(X[:5])
    TABLE[0, 0] = 1.0
    for name in fleet:
        np.testing.assert_allclose(after[name], 3 * before[name], rtol=1e-5)


@pytest.mark.parametrize("size", [True, [4], 0, 2.0])
def test_a_bad_batch_size_is_refused_at_every_call(way: str, size: Any) -> None:
    fleet = mf.Fleet([net(), net()])
    for _ in range(3):
        fleet.predict(X[:5], batch_size=1)
        fleet.predict(X[:5])
    with pytest.raises(InputError, match="batch_size"):
        fleet.predict(X[:5], batch_size=size)
