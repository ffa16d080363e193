"""Members with different optimizers in one lane: each has the numbers that it has alone with its own."""

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import toy
from torch import nn
from torch.optim import lr_scheduler

import modelfleet as mf
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.optimizers.slices import Rules
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer
from modelfleet.frameworks.torch.task import Task

Kinds = list[Any]
O = torch.optim  # noqa: E741
X, Y = (torch.tensor(array) for array in toy(26))
DATA = X.double(), Y
TOLERANCE = 1e-10

CASES: dict[str, Kinds] = {
    "adam+sgd": ["adam", "sgd"],
    "sgd": [
        "sgd",
        functools.partial(O.SGD, momentum=0.9),
        functools.partial(O.SGD, momentum=0.8, nesterov=True, weight_decay=0.01),
        functools.partial(O.SGD, momentum=0.7, dampening=0.3, maximize=True),
    ],
    "adamw+rmsprop+adagrad": [
        functools.partial(O.AdamW, amsgrad=True),
        functools.partial(O.RMSprop, centered=True, momentum=0.5),
        functools.partial(O.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1),
    ],
    "lion+radam+nadam": ["lion", functools.partial(O.RAdam, betas=(0.5, 0.9)), "nadam"],
    "adadelta+adamax": ["adadelta", "adamax"],
}
MIXED = CASES["adamw+rmsprop+adagrad"][:2] + CASES["sgd"][:2]


@pytest.fixture(autouse=True)
def double_by_default() -> Iterator[None]:
    # NAdam's running product has the default dtype in torch, whatever the parameter's.
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def net() -> nn.Module:
    # No bias before BatchNorm: its gradient would be the rounding of 0, which Adam divides by itself.
    first = nn.Linear(4, 5, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))


class Pair:
    """A fleet in one lane, and a fleet of one for every member."""

    def __init__(self, kinds: Kinds, factory: Any = net, devices: str = "cpu", **more: Any) -> None:
        self.kinds = kinds * 2
        names = [f"m{number}" for number in range(len(self.kinds))]
        self.factory, self.more = factory, more
        self.recipe = {
            "lr": dict(zip(names, np.linspace(0.01, 0.03, len(names)).tolist(), strict=True)),
            "clip_norm": {name: (None, 0.3, 0.8)[number % 3] for number, name in enumerate(names)},
        }
        self.fleet = mf.Fleet.build(factory, names, seed=3, devices=devices)
        self.alone = {name: mf.Fleet({name: copy.deepcopy(self.fleet[name])}, seed=3) for name in names}
        self.compile(self.fleet, names)
        for name, one in self.alone.items():
            self.compile(one, [name])

    def compile(self, fleet: mf.Fleet, names: list[str]) -> None:
        own = dict(zip(self.lr, self.kinds, strict=True))
        columns = {key: mf.each({name: column[name] for name in names}) for key, column in self.recipe.items()}
        given: dict[str, Any] = {"loss": "cross_entropy", "metrics": ["accuracy"], **columns, **self.more}
        fleet.compile(mf.each({name: own[name] for name in names}), **given)

    @property
    def lr(self) -> dict[str, float]:
        return self.recipe["lr"]

    def fit(self, data: Any = DATA, strategy: Any = "fused", **options: Any) -> mf.History:
        """Fit the fleet and each member alone, and compare."""
        options = {"epochs": 2, "batch_size": 8, "progress": False, **options}
        history = self.fleet.fit(data, strategy=strategy, **options)
        for name, one in self.alone.items():
            own = {
                key: value.values[name] if isinstance(value, mf.Each) and isinstance(value.values, dict) else value
                for key, value in {"data": data, **options}.items()
            }
            try:
                expected = one.fit(own.pop("data"), **own)
            except mf.AllFailedError as error:
                expected = error.history
            assert (name in history.failed) == (name in expected.failed)
            for metric, values in expected[name].items():
                np.testing.assert_allclose(history[name][metric], values, rtol=TOLERANCE, atol=TOLERANCE)
        self.check()
        return history

    def check(self) -> None:
        states = trained(self.fleet)
        for name, one in self.alone.items():
            theirs = one[name].state_dict()
            for key, tensor in self.fleet[name].state_dict().items():
                torch.testing.assert_close(tensor, theirs[key], rtol=TOLERANCE, atol=TOLERANCE)
            (expected,) = trained(one).values()
            sgd = self.fleet._live_lanes.groups.tasks[name].task.optimizer_name.startswith("sgd")
            # SGD alone has no buffer if its momentum is 0, and its count only says if it has one.
            allowed = ("optimizer/step/", "optimizer/momentum_buffer/") if sgd else ()
            assert all(key.startswith(allowed) for key in states[name].keys() ^ expected.keys())
            for key, tensor in expected.items():
                if not (sgd and key.startswith("optimizer/step/")):
                    torch.testing.assert_close(
                        states[name][key],
                        tensor,
                        rtol=TOLERANCE,
                        atol=TOLERANCE,
                        msg=lambda m, key=key, name=name: f"{name} {key}: {m}",
                    )

    @property
    def engine(self) -> FusedEngine:
        (lane,) = self.fleet._lanes
        assert isinstance(lane.engine, FusedEngine)
        return lane.engine


def trained(fleet: mf.Fleet) -> dict[str, dict[str, torch.Tensor]]:
    """What a saved fleet would have of every member's optimizer."""
    return {
        name: {f"{part}/{key}": tensor[row] for part, own in one.state.items() for key, tensor in own.items()}
        for names, one in fleet._live_lanes.training_states()
        for row, name in enumerate(names)
    }


@pytest.mark.parametrize("kinds", CASES.values(), ids=CASES.keys())
def test_every_member_of_a_lane_steps_with_its_own_optimizer(kinds: Kinds) -> None:
    pair = Pair(kinds)
    (lane,) = pair.fleet.plan(DATA, batch_size=8).lanes
    assert set(lane.members) == set(pair.fleet.names)
    pair.fit()
    pair.fit(epochs=1)  # goes on
    assert len(pair.engine._rules.all) > 1


@pytest.mark.parametrize("kinds", CASES.values(), ids=CASES.keys())
def test_members_that_stop_early_leave_the_others_their_optimizers(kinds: Kinds) -> None:
    pair = Pair(kinds)
    epochs = {name: 1 if number % len(kinds) == 0 else 3 + number for number, name in enumerate(pair.alone)}
    pair.fit(epochs=mf.each(epochs))
    pair.fit()


def test_a_lane_whose_last_members_have_one_optimizer() -> None:
    pair = Pair(["adam", "sgd", "lion"])
    pair.fit(epochs=mf.each({name: 4 if number in (1, 4) else 1 for number, name in enumerate(pair.alone)}))
    pair.fit()


@pytest.mark.parametrize("kinds", [CASES["adam+sgd"], CASES["lion+radam+nadam"]])
def test_a_member_that_diverges_is_set_aside(kinds: Kinds) -> None:
    pair = Pair(kinds)
    bad = DATA[0].clone()
    bad[5] = torch.nan
    data = mf.each({name: (bad if name == "m2" else DATA[0], Y) for name in pair.alone})
    assert set(pair.fit(data, shuffle=False).failed) == {"m2"}
    pair.fit()


@pytest.mark.parametrize("kinds", [MIXED, CASES["lion+radam+nadam"]])
def test_members_with_different_rows(kinds: Kinds) -> None:
    pair = Pair(kinds)
    rows = {name: 26 - 2 * number for number, name in enumerate(pair.alone)}
    pair.fit(mf.each({name: (DATA[0][:count], Y[:count]) for name, count in rows.items()}))


@pytest.mark.slow
def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "now")
    pair = Pair(MIXED)
    pair.fit(epochs=1)
    assert pair.engine.program == "compiled"


def test_a_step_of_slices_is_two_kinds_of_programs() -> None:
    pair = Pair(MIXED)
    pair.fit()
    kinds = [family[0] for family in pair.engine.programs._programs]
    assert kinds.count("packed_gradients") == 2  # of 8 rows, and of the last 2
    assert "train" not in kinds
    pair = Pair(CASES["lion+radam+nadam"])
    pair.fit()
    kinds = [family[0] for family in pair.engine.programs._programs]
    assert kinds.count("gradients") == 2
    assert "train" not in kinds


def test_state_moves_between_lanes() -> None:
    pair = Pair(MIXED)
    pair.fit()
    assert len(pair.fleet._lanes) == 1
    pair.fit(strategy="interleaved")
    assert len(pair.fleet._lanes) == len(pair.alone)
    pair.fit()
    assert len(pair.fleet._lanes) == 1
    pair.fleet.predict(DATA[0])
    pair.fit()


@pytest.mark.slow
def test_in_processes() -> None:
    pair = Pair(MIXED, devices="cpu:0,cpu:1")
    pair.fit(strategy="processes", epochs=mf.each({name: 2 + i % 2 for i, name in enumerate(pair.alone)}))
    pair.fit(strategy="processes")


@pytest.mark.slow
def test_rows_over_several_devices() -> None:
    def rows_apart() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))

    pair = Pair(CASES["adam+sgd"], rows_apart, devices="cpu:0,cpu:1")
    pair.fit(strategy="data_parallel")


def test_halved_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(["adam", "sgd", functools.partial(O.SGD, momentum=0.9)])
    train = FusedEngine.train

    def small_device(self: FusedEngine, hyper: Any, active: torch.Tensor, batch: Any, *rest: Any) -> None:
        if batch.size == 2 and len(active) > 3:  # the last step of an epoch, so that there is state already
            raise torch.OutOfMemoryError("pretended")
        train(self, hyper, active, batch, *rest)

    monkeypatch.setattr(FusedEngine, "train", small_device)
    pair.fit()
    assert len(pair.fleet._lanes) == 0


def test_a_saved_fleet_goes_on(tmp_path: Path) -> None:
    pair = Pair(MIXED)
    pair.fit()
    pair.fleet.save(tmp_path)
    states = trained(pair.fleet)
    pair.fleet = mf.load(tmp_path, net)
    assert {name: set(own) for name, own in trained(pair.fleet).items()} == {
        name: set(own) for name, own in states.items()
    }
    pair.fit()


def test_a_broken_off_fit_is_resumed(tmp_path: Path) -> None:
    class Killed(mf.Callback):
        def __init__(self, die: int) -> None:
            self.die = die

        def on_step_end(self, run: Any) -> None:
            if run.step == self.die:
                raise RuntimeError("killed")

    whole, broken = Pair(MIXED), Pair(MIXED)
    whole.fit()
    folder = mf.Checkpoint(tmp_path, every_steps=1)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False, "strategy": "fused"}
    with pytest.raises(RuntimeError, match="killed"):
        broken.fleet.fit(DATA, **options, callbacks=[folder, Killed(6)])
    again = Pair(MIXED)
    again.fleet.fit(DATA, **options, callbacks=[mf.Checkpoint(tmp_path, every_steps=1), Killed(0)])
    again.alone = whole.alone
    again.check()
    other = Pair(MIXED[::-1])
    with pytest.raises(mf.StoreError, match="another run: its tasks are"):
        other.fleet.fit(DATA, **options, callbacks=[mf.Checkpoint(tmp_path, every_steps=1), Killed(0)])


def test_a_member_that_gets_another_optimizer_starts_anew_and_the_others_go_on() -> None:
    pair = Pair(CASES["adam+sgd"])
    pair.fit()
    for fleet in (pair.fleet, pair.alone["m1"]):
        fleet.compile("lion", "cross_entropy", metrics=["accuracy"], lr=0.02, members=["m1"])
    pair.fit()
    assert trained(pair.fleet)["m1"].keys() & {"optimizer/exp_avg/0.weight", "optimizer/exp_avg_sq/0.weight"} == {
        "optimizer/exp_avg/0.weight"
    }


def test_recipes_of_their_own_share_a_lane_too() -> None:
    fleet = mf.Fleet.build(net, ["a", "b", "c"])
    fleet.compile("adam", "cross_entropy")
    fleet.compile("sgd", "cross_entropy", clip_norm=0.1, members=["b"])
    assert [lane.members for lane in fleet.plan().lanes] == [("a", "c", "b")]
    fleet.compile("sgd", "mse", members=["b"])
    assert [lane.members for lane in fleet.plan().lanes] == [("a", "c"), ("b",)]


def test_schedules_of_each_members_own_optimizer() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, step_size_up=2, cycle_momentum=momentum(optimizer))

    def momentum(optimizer: torch.optim.Optimizer) -> bool:
        return bool(optimizer.param_groups[0].get("momentum"))

    Pair(MIXED, schedule=schedule).fit()
    Pair(MIXED, schedule="cosine").fit()


class Parts(nn.Module):
    """A model with a parameter that takes no part, a frozen one, a scalar, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) * self.turn).real * self.scale)


@pytest.mark.parametrize("kinds", [CASES["adam+sgd"], MIXED])
def test_unused_frozen_scalar_and_complex_parameters(kinds: Kinds) -> None:
    pair = Pair(kinds, Parts)
    pair.fit()
    for one in (pair.fleet, *pair.alone.values()):
        for name in one.names:
            one[name].first.bias.requires_grad_(True)
    pair.fit()
    for one in (pair.fleet, *pair.alone.values()):
        for name in one.names:
            one[name].last.weight.requires_grad_(False)
    pair.fit()


def test_scaled_losses() -> None:
    torch.set_default_dtype(torch.float32)

    def single() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def fleet_of(names: list[str]) -> mf.Fleet:
        fleet = mf.Fleet.build(single, names, seed=2)
        own = {"a": "adam", "b": "sgd", "c": "adam", "d": "sgd"}
        fleet.compile(mf.each({name: own[name] for name in names}), "cross_entropy", lr=0.02, precision="fp16")
        fleet.fit((X.float(), Y), epochs=2, batch_size=8, progress=False)
        return fleet

    fleet = fleet_of(["a", "b", "c", "d"])
    assert len(fleet._lanes) == 1
    for name in fleet.names:
        expected = fleet_of([name])[name].state_dict()
        for key, tensor in fleet[name].state_dict().items():
            torch.testing.assert_close(tensor, expected[key], rtol=2e-3, atol=2e-4)


def test_every_optimizers_hyperparameters_are_in_the_history() -> None:
    pair = Pair(["adam", functools.partial(O.SGD, momentum=0.9)])
    own = pair.fit().hyperparameters
    assert "momentum" not in own["m0"]
    assert [own[name]["lr"] for name in own] == list(pair.lr.values())


def test_slices_are_neighbouring_slots_of_one_rule() -> None:
    adam, sgd = Task(Optimizer("adam", {"amsgrad": False})), Task(Optimizer("sgd", {"nesterov": False}))
    clipped = Task(adam.optimizer, clip=True)
    same = Task(Optimizer("adam", {"amsgrad": False}))
    rules = Rules([adam, same, sgd, clipped])
    assert [own.rows for own in rules.slices(np.arange(4))] == [(0, 2), (2, 1), (3, 1)]
    assert [own.rows for own in rules.slices(np.array([1, 0]))] == [None]
    assert [(own.rule, own.rows) for own in rules.slices(np.array([2, 0, 1]))] == [(1, (0, 1)), (0, (1, 2))]
    assert [own.tolist() for own in rules.together([3, 2, 1, 0])] == [[0], [1], [2, 3]]
