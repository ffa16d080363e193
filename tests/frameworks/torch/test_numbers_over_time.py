"""Members that differ in numbers, over their lives: changed, saved, resumed, stopped early, elsewhere."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frameworks.torch import numbers
from tests.frameworks.torch.test_numbers import mlp
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.fused.programs import Programs

RATES = [0.1, 0.5, 0.0, 0.3]
SMOOTHED = [functools.partial(F.cross_entropy, label_smoothing=s) for s in (0.1, 0.0, 0.3, 0.2)]


def net(rate: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 3), nn.Dropout(0.25))


def fleet_of(only: str | None = None, make: numbers.Make = net) -> mf.Fleet:
    return numbers.compiled(numbers.build(make, RATES), only, loss=mf.each(SMOOTHED))


def fit(fleet: mf.Fleet, epochs: int = 3, **options: Any) -> mf.History:
    return fleet.fit(numbers.rows(), epochs=epochs, batch_size=8, progress=False, **options)


def assert_as_alone(fleet: mf.Fleet, alone: Callable[[str], mf.Fleet], bound: float = 1e-10) -> None:
    for name in fleet.names:
        theirs = alone(name)[name].state_dict()
        for key, tensor in fleet[name].state_dict().items():
            numbers.near(tensor, theirs[key], bound, f"{key} of {name}")


def trained_alone(name: str, epochs: int = 3, **options: Any) -> mf.Fleet:
    fleet = fleet_of(name)
    fit(fleet, epochs, **options)
    return fleet


def lanes(fleet: mf.Fleet) -> int:
    return len(fleet.plan(numbers.rows(), batch_size=8).lanes)


class Anneal(mf.Callback):
    """Changes the rates of some members at the end of every epoch, each in its own way."""

    def __init__(self, fleet: mf.Fleet, members: list[str] | None = None) -> None:
        self._fleet, self._members = fleet, members

    def on_epoch_end(self, run: Any) -> None:
        for name in self._members or self._fleet.names:
            if name in self._fleet.names:
                layer: Any = self._fleet[name][2]
                layer.p = min(layer.p + 0.1 * (1 + int(name[1:])), 0.9)


@pytest.mark.parametrize("members", [None, ["m1"]], ids=["all", "one"])
def test_numbers_that_a_callback_changes_are_read_again(members: list[str] | None) -> None:
    def trained(name: str | None = None) -> mf.Fleet:
        fleet = fleet_of(name)
        fit(fleet, 4, callbacks=[Anneal(fleet, members)], **({} if name else {"strategy": "fused"}))
        return fleet

    assert_as_alone(trained(), trained)


def test_equal_members_may_become_different() -> None:
    def trained(name: str | None = None) -> mf.Fleet:
        fleet = numbers.compiled(numbers.build(lambda _: net(0.2), RATES), name, loss="cross_entropy")
        fit(fleet, 4, callbacks=[Anneal(fleet)], **({} if name else {"strategy": "fused"}))
        return fleet

    assert_as_alone(trained(), trained)


def test_annealed_numbers_are_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    original = Programs._make

    def counting(self: Any, kind: str, *args: Any) -> Any:
        made.append(kind)
        return original(self, kind, *args)

    monkeypatch.setattr(Programs, "_make", counting)
    fleet = fleet_of()
    fit(fleet, 1)
    before = len(made)
    fit(fleet, 4, callbacks=[Anneal(fleet)])
    assert len(made) == before


class Weighted(nn.Module):
    """A loss whose weights are a plain tensor."""

    def __init__(self, weight: list[float]) -> None:
        super().__init__()
        self.weight = torch.tensor(weight, dtype=torch.float64)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, self.weight)


def test_weights_that_are_written_to_are_read_again() -> None:
    def trained(name: str | None = None) -> mf.Fleet:
        losses = [Weighted([1.0, 1.0, place + 1.0]) for place in range(len(RATES))]

        class Heavier(mf.Callback):
            def on_epoch_end(self, run: Any) -> None:
                losses[1].weight[0] = 5.0

        fleet = numbers.compiled(numbers.build(net, RATES), name, loss=mf.each(losses))
        fit(fleet, callbacks=[Heavier()])
        return fleet

    fleet = trained()
    assert lanes(fleet) == 1
    assert_as_alone(fleet, trained)


def test_members_that_change_more_than_a_number_are_refused() -> None:
    fleet = fleet_of()

    class Change(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            fleet["m1"][1] = nn.ReLU()  # type: ignore[index]

    with pytest.raises(mf.StrategyError, match=r"'m1' no longer has the structure of 'm0': class of 1"):
        fit(fleet, callbacks=[Change()])


def test_saved_and_loaded_members_go_on(tmp_path: Path) -> None:
    fleet = fleet_of()
    fit(fleet, 2)
    fleet.save(tmp_path)
    rates = iter(RATES)
    loaded = mf.load(tmp_path, lambda: net(next(rates)).double())
    assert lanes(loaded) == 1
    fit(loaded, 1)

    def alone(name: str) -> mf.Fleet:
        single = trained_alone(name, 2)
        fit(single, 1)
        return single

    assert_as_alone(loaded, alone)


def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path) -> None:
    alive = False

    class Die(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            if not alive:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fit(fleet_of(), callbacks=[mf.Checkpoint(tmp_path, every_steps=2), Die()])
    fleet, alive = fleet_of(), True
    fit(fleet, callbacks=[mf.Checkpoint(tmp_path, every_steps=2), Die()])
    assert_as_alone(fleet, trained_alone)


def test_members_that_stop_early_leave_the_others_their_numbers() -> None:
    epochs = {"m0": 1, "m1": 4, "m2": 1, "m3": 2}
    fleet = fleet_of()
    fit(fleet, mf.each(epochs))  # type: ignore[arg-type]
    fit(fleet, 1)
    evaluated = fleet.evaluate(numbers.rows(), batch_size=8)

    def alone(name: str) -> mf.Fleet:
        single = trained_alone(name, epochs[name])
        fit(single, 1)
        numbers.near(
            list(evaluated[name].values()),
            list(single.evaluate(numbers.rows(), batch_size=8)[name].values()),
            1e-10,
            name,
        )
        return single

    assert_as_alone(fleet, alone)


def test_members_with_rows_of_their_own() -> None:
    x, y = numbers.rows()
    data = {f"m{place}": (x[place:], y[place:]) for place in range(len(RATES))}

    def trained(name: str | None = None) -> mf.Fleet:
        fleet = fleet_of(name)
        own = mf.each({key: value for key, value in data.items() if name in (None, key)})
        fleet.fit(own, validation=own, epochs=2, batch_size=8, progress=False)
        return fleet

    assert_as_alone(trained(), trained)


def test_a_lane_that_runs_out_of_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    train, widths = FusedEngine.train, set()

    def small_device(self: FusedEngine, hyper: Any, active: Tensor, *rest: Any) -> None:
        if len(active) > 2:
            raise torch.OutOfMemoryError("pretended")
        widths.add(len(active))
        train(self, hyper, active, *rest)

    monkeypatch.setattr(FusedEngine, "train", small_device)
    fleet = fleet_of()
    fit(fleet)
    assert widths == {2}
    assert_as_alone(fleet, trained_alone)


def test_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = mf.Fleet(numbers.build(net, RATES), devices="cpu:0,cpu:1")
    fleet.compile("adam", mf.each(SMOOTHED), lr=0.01)
    fit(fleet, strategy="processes")
    assert_as_alone(fleet, trained_alone)


@pytest.mark.parametrize("rates", [[0.1, 0.5, 0.2, 0.3], RATES], ids=["fused", "with a rate of 0"])
def test_over_several_devices_by_rows(rates: list[float]) -> None:
    fleet = mf.Fleet(numbers.build(net, rates), devices="cpu:0,cpu:1")
    fleet.compile("adam", mf.each(SMOOTHED), lr=0.01)
    fit(fleet, strategy="data_parallel")

    def alone(name: str) -> mf.Fleet:
        single = numbers.compiled(numbers.build(net, rates), name, loss=mf.each(SMOOTHED))
        fit(single)
        return single

    assert_as_alone(fleet, alone)


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "now")
    fleet = fleet_of()
    assert lanes(fleet) == 1
    fit(fleet)
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    assert_as_alone(fleet, trained_alone)


def test_in_bf16() -> None:
    def make(rate: float) -> nn.Module:
        return mlp(nn.Dropout(rate), nn.LeakyReLU(rate), nn.LayerNorm(8, eps=1e-5 + rate))

    def fleet(only: str | None = None) -> mf.Fleet:
        models = numbers.build(make, RATES, torch.float32)
        own = numbers.compiled(models, only, loss=mf.each(SMOOTHED), precision="bf16")
        data = numbers.rows(dtype=torch.float32)
        assert len(own.plan(data, batch_size=8).lanes) == 1
        own.fit(data, epochs=1, batch_size=8, progress=False)
        return own

    # The gradients of bf16 are rounded to three digits, and Adam's first steps have the size of the rate.
    assert_as_alone(fleet(), fleet, 2e-3)


def test_a_clone_and_a_late_member_have_their_own_numbers() -> None:
    fleet = fleet_of()
    fit(fleet, 1)
    fleet.clone("m1", as_="m9")
    assert lanes(fleet) == 1
    fit(fleet, 1)
    for key, tensor in fleet["m9"].state_dict().items():
        assert tensor.shape == fleet["m1"].state_dict()[key].shape
