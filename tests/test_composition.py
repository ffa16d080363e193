"""A member's result is its own: who else is there, where it stands and how lanes run makes no difference."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import modelfleet as mf
from modelfleet import testing
from modelfleet.types import Strategy

SEED = 9
# Fused lanes of 1, 3 and 64 gave the very same bits when this was written, and taking turns was 1e-7 off.
# That is the kernels' doing and no promise: other widths may add up in another order.
ROUNDING = 1e-5


def net() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))


def wide_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


def normed_net() -> nn.Module:
    # Without the bias that BatchNorm takes back out, and that Adam would fill with noise.
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def rows(count: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, 6, generator=generator)
    return x, torch.randint(0, 3, (count,), generator=generator)


def rate(name: str) -> float:
    """A learning rate of each member's own, wherever it is."""
    return 1e-3 * (1 + sum(name.encode()) % 7)


def fleet_of(names: Iterable[str], factory: Callable[[], nn.Module] = net, **how: Any) -> mf.Fleet:
    fleet = mf.Fleet.build(factory, names, seed=SEED)
    fleet.compile("adam", "cross_entropy", lr=mf.each({name: rate(name) for name in fleet.names}), **how)
    return fleet


def alone(fleet: mf.Fleet, name: str, data: Any, **how: Any) -> nn.Module:
    """The member as it is now, trained by a plain loop."""
    given: dict[str, Any] = {"optimizer": "adam", "loss": "cross_entropy", "lr": rate(name)}
    return testing.alone(fleet[name], name, data, seed=SEED, **given, **how)


def assert_same(model: nn.Module, expected: nn.Module, most: float = ROUNDING) -> None:
    difference, where = testing.largest_difference(model, expected)
    assert difference <= most, where


def assert_all_as_alone(fleet: mf.Fleet, expected: dict[str, nn.Module], most: float = ROUNDING) -> None:
    for name in fleet.names:
        assert_same(fleet[name], expected[name], most)


# --- who else is there


@cache
def me_among(*names: str) -> nn.Module:
    """The member "me" after two epochs in a fleet of these; nobody is to change it."""
    fleet = fleet_of(names)
    fleet.fit(rows(16), epochs=2, batch_size=8, strategy="fused", progress=False)
    return fleet["me"]


@pytest.fixture
def by_itself() -> nn.Module:
    """The member "me" after two epochs in a fleet of one."""
    return me_among("me")


NEIGHBOURS: dict[str, Sequence[str]] = {
    "of 3": ["a", "me", "b"],
    "of 3, first": ["me", "c", "d"],
    "of 3, last, among others": ["e", "f", "me"],
    "of 64": [*(f"n{i}" for i in range(40)), "me", *(f"n{i}" for i in range(40, 63))],
}


@pytest.mark.parametrize("names", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_and_place_make_no_difference(names: Sequence[str], by_itself: nn.Module) -> None:
    assert_same(me_among(*names), by_itself)


def test_place_and_neighbours_change_no_bit_in_lanes_of_one_width() -> None:
    assert testing.largest_difference(me_among("me", "c", "d"), me_among("e", "f", "me"))[0] == 0


def test_a_fleet_of_one_is_the_same_as_alone(by_itself: nn.Module) -> None:
    assert_same(by_itself, alone(fleet_of(["me"]), "me", rows(16), epochs=2, batch_size=8))


def test_taking_turns_makes_no_difference(by_itself: nn.Module) -> None:
    fleet = fleet_of(["a", "me", "b"])
    fleet.fit(rows(16), epochs=2, batch_size=8, strategy="interleaved", progress=False)
    assert [lane.names for lane in fleet._lanes or []] == [["a"], ["me"], ["b"]]
    assert_same(fleet["me"], by_itself)


def test_members_of_another_structure_make_no_difference(by_itself: nn.Module) -> None:
    fleet = fleet_of(["a", "me", "b"])
    fleet.add("wide", wide_net())
    fleet.add("wider", wide_net())
    fleet.compile("adam", "cross_entropy", lr=mf.each({name: rate(name) for name in fleet.names}))
    expected = alone(fleet, "wider", rows(16), epochs=2, batch_size=8)
    fleet.fit(rows(16), epochs=2, batch_size=8, progress=False)
    assert [lane.members for lane in fleet.plan().lanes] == [("a", "me", "b"), ("wide", "wider")]
    assert_same(fleet["me"], by_itself)
    assert_same(fleet["wider"], expected)


def test_rows_that_all_see_in_one_order_are_the_same_as_alone() -> None:
    fleet = fleet_of(list("abc"))
    expected = {n: alone(fleet, n, rows(16), epochs=2, batch_size=8, shuffle=False) for n in fleet.names}
    fleet.fit(rows(16), epochs=2, batch_size=8, shuffle=False, strategy="fused", progress=False)
    assert_all_as_alone(fleet, expected)


def test_two_fits_are_one_long_one() -> None:
    fleet = fleet_of(list("abc"))
    expected = {name: alone(fleet, name, rows(16), epochs=3, batch_size=8) for name in fleet.names}
    fleet.fit(rows(16), epochs=1, batch_size=8, progress=False)
    fleet.fit(rows(16), epochs=2, batch_size=8, progress=False)
    assert_all_as_alone(fleet, expected)


def test_an_objective_is_the_same_as_alone() -> None:
    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        margin = model(x) - nn.functional.one_hot(y, 3)
        return margin.square().mean(), {"size": margin.abs().mean()}

    fleet = mf.Fleet.build(net, list("abc"), seed=SEED)
    how: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "objective": objective}
    expected = testing.alone(fleet["b"], "b", rows(16), seed=SEED, batch_size=8, **how)
    fleet.compile(**how)
    fleet.fit(rows(16), batch_size=8, strategy="fused", progress=False)
    assert_same(fleet["b"], expected)


# --- data of each member's own

LENGTHS = {"a": 6, "b": 20, "c": 14, "d": 8}


@pytest.mark.parametrize("factory", [net, wide_net, normed_net])
def test_each_member_sees_its_own_rows_and_no_others(factory: Callable[[], nn.Module]) -> None:
    """Padded rows are weighted out where they can be, and with BatchNorm they are never seen."""
    data = {name: rows(count, seed=count) for name, count in LENGTHS.items()}
    fleet = fleet_of(LENGTHS, factory)
    expected = {name: alone(fleet, name, data[name], epochs=2, batch_size=4) for name in LENGTHS}
    fleet.fit(mf.each(data), epochs=2, batch_size=4, strategy="fused", progress=False)
    assert_all_as_alone(fleet, expected)


@pytest.mark.parametrize("factory", [wide_net, normed_net])
def test_batches_of_each_members_own_size(factory: Callable[[], nn.Module]) -> None:
    sizes = {"a": 4, "b": 10, "c": 7}
    fleet = fleet_of(sizes, factory)
    expected = {name: alone(fleet, name, rows(20), epochs=2, batch_size=size) for name, size in sizes.items()}
    fleet.fit(rows(20), epochs=2, batch_size=mf.each(sizes), strategy="fused", progress=False)
    assert_all_as_alone(fleet, expected)


# --- how long, how fast, how far


def test_epochs_of_each_members_own() -> None:
    epochs = {"a": 1, "b": 4, "c": 2, "d": 0}
    fleet = fleet_of(epochs)
    expected = {name: alone(fleet, name, rows(16), epochs=n, batch_size=8) for name, n in epochs.items()}
    history = fleet.fit(rows(16), epochs=mf.each(epochs), batch_size=8, progress=False)
    assert_all_as_alone(fleet, expected)
    assert {name: len(history[name]["loss"]) for name in "abc"} == {"a": 1, "b": 4, "c": 2}


def test_clipping_is_by_each_members_own_norm() -> None:
    norms = {"a": 0.02, "b": None, "c": 1.0}
    fleet = mf.Fleet.build(net, norms, seed=SEED)
    expected = {
        name: testing.alone(
            fleet[name],
            name,
            rows(16),
            seed=SEED,
            optimizer="sgd",
            loss="cross_entropy",
            lr=0.1,
            clip_norm=norm,
        )
        for name, norm in norms.items()
    }
    fleet.compile("sgd", "cross_entropy", lr=0.1, clip_norm=mf.each(norms))
    fleet.fit(rows(16), strategy="fused", progress=False)
    assert_all_as_alone(fleet, expected)


def test_schedules_of_each_members_own() -> None:
    steps = 2 * 4  # 16 rows in batches of 8, four epochs
    by_epoch = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=steps, cycle_momentum=False)
    # What compile is told, and torch's own form of it with when it steps.
    schedules: dict[str, tuple[Any, Any, Literal["epoch", "step"]]] = {
        "a": ("cosine", partial(lr_scheduler.CosineAnnealingLR, T_max=steps), "step"),
        "b": (by_epoch, by_epoch, "epoch"),
        "c": (None, None, "epoch"),
        "d": (cycle, cycle, "step"),
        "e": (
            "linear",
            partial(lr_scheduler.LinearLR, start_factor=1, end_factor=0, total_iters=steps),
            "step",
        ),
    }
    fleet = mf.Fleet.build(net, schedules, seed=SEED)
    how: dict[str, Any] = {"epochs": 4, "batch_size": 8}
    expected = {
        name: testing.alone(
            fleet[name],
            name,
            rows(16),
            seed=SEED,
            optimizer="sgd",
            loss="cross_entropy",
            lr=0.05,
            schedule=schedule,
            schedule_per=per,
            **how,
        )
        for name, (_, schedule, per) in schedules.items()
    }
    fleet.compile(
        "sgd",
        "cross_entropy",
        lr=0.05,
        schedule=mf.each({name: told for name, (told, _, _) in schedules.items()}),
    )
    fleet.fit(rows(16), strategy="fused", progress=False, **how)
    assert_all_as_alone(fleet, expected)


# --- precision


def test_bf16_is_the_same_as_alone_under_autocast() -> None:
    """bfloat16 keeps 8 bits, so that sums in another order may differ by 0.4 %; over four steps no more."""
    fleet = mf.Fleet.build(net, list("abc"), seed=SEED)
    how: dict[str, Any] = {"epochs": 2, "batch_size": 8}
    task: dict[str, Any] = {"optimizer": "sgd", "loss": "cross_entropy", "lr": 0.1}
    expected = {
        name: testing.alone(fleet[name], name, rows(16), seed=SEED, precision="bf16", **task, **how)
        for name in fleet.names
    }
    exact = testing.alone(fleet["a"], "a", rows(16), seed=SEED, **task, **how)
    fleet.compile(**task, precision="bf16")
    fleet.fit(rows(16), strategy="fused", progress=False, **how)
    assert_all_as_alone(fleet, expected, 4e-3)
    assert fleet["a"][1].weight.dtype == torch.float32
    assert testing.largest_difference(fleet["a"], exact)[0] > 1e-4  # it was not float32 all along


def test_an_overflow_in_fp16_skips_that_members_step_only() -> None:
    data = {"a": rows(16), "loud": rows(16, scale=200.0), "c": rows(16, seed=1)}
    fleet = mf.Fleet.build(wide_net, data, seed=SEED)
    how: dict[str, Any] = {"epochs": 4, "batch_size": 8}
    task: dict[str, Any] = {"optimizer": "sgd", "loss": "cross_entropy", "lr": 0.01, "precision": "fp16"}
    expected = {
        name: testing.alone(fleet[name], name, own, seed=SEED, **task, **how) for name, own in data.items()
    }
    fleet.compile(**task)
    history = fleet.fit(mf.each(data), strategy="fused", progress=False, **how)
    assert not history.failed
    assert fleet._lanes is not None
    (lane,) = fleet._lanes
    a, loud, c = lane.engine.steps_taken()
    assert a == c == 8
    assert 0 < loud < 8
    assert_all_as_alone(fleet, expected, 2e-3)  # float16 keeps 11 bits


class _Idle(nn.Module):
    """A model with a layer that its forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_parameters_without_a_gradient_are_left_alone_as_torch_leaves_them(strategy: Strategy) -> None:
    fleet = mf.Fleet.build(_Idle, list("abc"), seed=SEED)
    how: dict[str, Any] = {"epochs": 2, "batch_size": 8}
    task: dict[str, Any] = {"optimizer": "adamw", "loss": "cross_entropy", "lr": 0.1, "weight_decay": 0.1}
    before = fleet["a"].idle.weight.detach().clone()
    expected = {name: testing.alone(fleet[name], name, rows(16), seed=SEED, **task, **how) for name in fleet.names}
    fleet.compile(**task)
    fleet.fit(rows(16), strategy=strategy, progress=False, **how)
    assert_all_as_alone(fleet, expected, ROUNDING)
    assert torch.equal(fleet["a"].idle.weight, before)
