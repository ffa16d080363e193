"""Named schedules against torch's own or a closed form, and factories against the scheduler run by hand."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from modelfleet.each import each
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.optimizers.hyperparameters import columns, resolve
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer
from modelfleet.frameworks.torch.schedules import Schedule, Schedules
from modelfleet.frameworks.torch.task import Task

RATES = [0.1, 0.02, 0.3]
NAMES = ["a", "b", "c"]
PER_EPOCH = np.array([4, 3, 7])
EPOCHS = np.array([6, 5, 2])
TOTAL = PER_EPOCH * EPOCHS  # 24, 15 and 14 steps


def compiled(name: str = "sgd", **given: Any) -> tuple[Optimizer, dict[str, np.ndarray]]:
    optimizer, hyper = resolve(name, {"lr": each(RATES), **given})
    return optimizer, columns(hyper, NAMES)


def schedules(schedule: object, name: str = "sgd", **given: Any) -> Schedules:
    optimizer, hyper = compiled(name, **given)
    own = schedule if isinstance(schedule, list) else [schedule] * len(NAMES)
    return Schedules(own, hyper, [Task(optimizer)] * 3, PER_EPOCH, EPOCHS, names=NAMES)


def rates(schedule: object, row: int) -> list[float]:
    """A member's learning rate at each of its steps, its neighbours being elsewhere."""
    at = schedules(schedule).at
    return [at(np.where(np.arange(3) == row, step, 2))["lr"][row] for step in range(TOTAL[row])]


def torch_rates(
    make: Callable[[torch.optim.Optimizer], torch_schedulers.LRScheduler], row: int, per_epoch: bool = False
) -> list[float]:
    """What torch gives, stepping the scheduler after every batch or every epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATES[row])
    scheduler = make(optimizer)
    seen = []
    for step in range(1, TOTAL[row] + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not per_epoch or step % PER_EPOCH[row] == 0:
            scheduler.step()
    return seen


@pytest.mark.parametrize("row", range(3))
def test_cosine_is_torchs_cosine_annealing(row: int) -> None:
    make = functools.partial(torch_schedulers.CosineAnnealingLR, T_max=TOTAL[row], eta_min=RATES[row] * 0.1)
    np.testing.assert_allclose(rates(Schedule("cosine", final=0.1), row), torch_rates(make, row), rtol=1e-12)


@pytest.mark.parametrize("row", range(3))
def test_linear_is_torchs_linear(row: int) -> None:
    def make(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
        return torch_schedulers.LinearLR(optimizer, 1.0, 0.25, total_iters=int(TOTAL[row]))

    np.testing.assert_allclose(rates(Schedule("linear", final=0.25), row), torch_rates(make, row), rtol=1e-12)


@pytest.mark.parametrize("row", range(3))
def test_step_is_torchs_step_at_the_ends_of_epochs(row: int) -> None:
    make = functools.partial(torch_schedulers.StepLR, step_size=2, gamma=0.5)
    expected = torch_rates(make, row, per_epoch=True)
    np.testing.assert_allclose(rates(Schedule("step", every=2, factor=0.5), row), expected, rtol=1e-12)


def test_step_falls_after_each_third_of_the_epochs_unless_told_otherwise() -> None:
    np.testing.assert_allclose(rates("step", 0), [0.1] * 8 + [0.01] * 8 + [0.001] * 8, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"pct_start": 0.5, "div_factor": 10.0, "final_div_factor": 100.0}])
@pytest.mark.parametrize("row", range(3))
def test_onecycle_is_torchs_onecycle(row: int, options: dict[str, Any]) -> None:
    def make(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
        return torch_schedulers.OneCycleLR(optimizer, RATES[row], int(TOTAL[row]), cycle_momentum=False, **options)

    np.testing.assert_allclose(rates(Schedule("onecycle", **options), row), torch_rates(make, row), rtol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_onecycle_is_finite_however_short(steps: int) -> None:
    optimizer, hyper = compiled()
    halves = Schedule("onecycle", pct_start=0.5)  # of two steps: the peak is at the very first, where torch fails
    own = ["onecycle", halves, halves]
    short = Schedules(own, hyper, [Task(optimizer)] * 3, np.full(3, steps), np.ones(3, dtype=int), names=NAMES)
    for step in range(steps + 2):
        lr = short.at(np.full(3, step))["lr"]
        assert np.all((lr > 0) & (lr <= RATES))


@pytest.mark.parametrize(("warmup", "steps"), [(6, 6), (0.25, 6), (0.0, 0)])
def test_warm_up_rises_from_zero_and_the_rest_is_stretched_over_what_remains(warmup: float, steps: int) -> None:
    expected = [
        step / steps if step < steps else 0.5 + 0.5 * math.cos(math.pi * (step - steps) / (24 - steps))
        for step in range(24)
    ]
    np.testing.assert_allclose(rates(Schedule("cosine", warmup=warmup), 0), 0.1 * np.array(expected), rtol=1e-12)


def test_a_constant_schedule_warms_up_too() -> None:
    np.testing.assert_allclose(
        rates(Schedule("constant", warmup=4), 1)[:6], 0.02 * np.array([0, 0.25, 0.5, 0.75, 1, 1])
    )


def test_after_the_last_step_the_rate_stays_at_its_end() -> None:
    at = schedules(Schedule("cosine", final=0.5)).at
    np.testing.assert_allclose(at(TOTAL)["lr"], np.array(RATES) / 2)
    np.testing.assert_allclose(at(TOTAL + 100)["lr"], np.array(RATES) / 2)


def test_each_member_may_have_its_own_schedule() -> None:
    make = functools.partial(torch_schedulers.ExponentialLR, gamma=0.5)
    mixed = schedules(["linear", make, Schedule("linear", final=0.5, warmup=2)])
    mixed.end_epoch([{"loss": 1.0}] * 3)
    after = mixed.at(np.array([12, 3, 8]))
    np.testing.assert_allclose(after["lr"], [0.05, 0.01, 0.3 * 0.75])
    assert after["momentum"] is mixed.at(np.array([13, 3, 8]))["momentum"]


def test_nothing_new_is_made_when_nothing_changes() -> None:
    optimizer, hyper = compiled()
    unscheduled = Schedules([None] * 3, hyper, [Task(optimizer)] * 3, PER_EPOCH, EPOCHS, names=NAMES)
    assert unscheduled.at(np.array([5, 5, 5])) is hyper
    steps = schedules(Schedule("step", every=1))
    first = steps.at(np.array([0, 0, 0]))
    assert steps.at(np.array([2, 1, 3])) is first
    kept = first["lr"].copy()
    assert steps.at(np.array([4, 1, 3])) is not first
    assert np.array_equal(first["lr"], kept)  # what was handed out does not change under its holder
    made = schedules(functools.partial(torch_schedulers.StepLR, step_size=2))
    before = made.at(np.array([0, 0, 0]))
    made.end_epoch([{"loss": 1.0}] * 3)
    assert made.at(np.array([4, 3, 7])) is before
    made.end_epoch([{"loss": 1.0}] * 3)
    assert made.at(np.array([8, 6, 14])) is not before


LOSSES = [1.0, 0.9, 0.95, 0.95, 0.95, 0.5, 0.6, 0.6, 0.6, 0.6]


def chained(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
    warm = torch_schedulers.LinearLR(optimizer, 0.1, 1.0, total_iters=3)
    return torch_schedulers.SequentialLR(optimizer, [warm, torch_schedulers.ExponentialLR(optimizer, 0.7)], [3])


FACTORIES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "class": functools.partial(torch_schedulers.MultiStepLR, milestones=[1, 4]),
    "lambda": lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "sequence": chained,
    "restarts": functools.partial(torch_schedulers.CosineAnnealingWarmRestarts, T_0=3),
    "plateau": functools.partial(torch_schedulers.ReduceLROnPlateau, patience=1, factor=0.5),
}


@pytest.mark.parametrize("metric", ["loss", "val_loss"])
@pytest.mark.parametrize("kind", FACTORIES)
def test_a_factorys_scheduler_steps_once_per_epoch(kind: str, metric: str) -> None:
    ours = schedules(FACTORIES[kind], "adam")
    for row, lr in enumerate(RATES):
        ours.restore([[], [], []])
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        theirs = FACTORIES[kind](optimizer)
        for epoch, loss in enumerate(LOSSES):
            assert ours.at(PER_EPOCH * epoch)["lr"][row] == optimizer.param_groups[0]["lr"]
            optimizer.step()
            theirs.step(*[loss] if kind == "plateau" else [])
            told = [{"loss": 7.0, "accuracy": 0.0}] * 3
            told[row] = {"loss": loss} if metric == "loss" else {"loss": 7.0, "val_loss": loss}
            ours.end_epoch(told)


@pytest.mark.parametrize(("name", "given"), [("sgd", {"momentum": 0.9}), ("adamw", {})])
@pytest.mark.parametrize("kind", ["onecycle", "cyclic"])
def test_a_scheduler_for_batches_steps_per_batch_and_moves_momentum(
    name: str, given: dict[str, Any], kind: str
) -> None:
    def make(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
        if kind == "onecycle":
            return torch_schedulers.OneCycleLR(optimizer, max_lr=0.5, total_steps=30)
        return torch_schedulers.CyclicLR(optimizer, base_lr=0.01, max_lr=0.5, step_size_up=4)

    ours = schedules(make, name, **given)
    torch_class = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
    optimizer = torch_class([torch.nn.Parameter(torch.zeros(1))], lr=RATES[1], **given)
    theirs = make(optimizer)
    for step in range(20):
        now = ours.at(np.array([0, step, step // 2]))
        group = optimizer.param_groups[0]
        assert now["lr"][1] == group["lr"]
        if name == "sgd":
            assert now["momentum"][1] == group["momentum"]
        else:
            assert (now["beta1"][1], now["beta2"][1]) == group["betas"]
        optimizer.step()
        theirs.step()
        if step == 9:
            ours.end_epoch([{"loss": 1.0}] * 3)


def test_a_scheduler_for_batches_can_go_back() -> None:
    ours = schedules(functools.partial(torch_schedulers.OneCycleLR, max_lr=0.5, total_steps=24), "adam")
    early = ours.at(np.array([3, 3, 3]))
    assert ours.at(np.array([3, 20, 3]))["lr"].tolist() != early["lr"].tolist()
    back = ours.at(np.array([3, 3, 3]))
    assert all(np.array_equal(back[name], column) for name, column in early.items())


def test_a_member_that_took_no_part_in_an_epoch_keeps_its_rate() -> None:
    ours = schedules(functools.partial(torch_schedulers.ExponentialLR, gamma=0.5))
    ours.end_epoch([{"loss": 1.0}, {}, {"loss": 1.0}])
    np.testing.assert_allclose(ours.at(PER_EPOCH)["lr"], [0.05, 0.02, 0.15])


def test_lion_has_schedulers_though_torch_has_no_lion() -> None:
    ours = schedules(functools.partial(torch_schedulers.OneCycleLR, max_lr=0.2, total_steps=30), "lion")
    assert ours.at(np.array([0, 0, 0]))["beta1"].tolist() == [0.95] * 3
    assert ours.at(np.array([8, 8, 8]))["lr"].tolist() == [0.2] * 3


@pytest.mark.parametrize("kind", [*FACTORIES, "onecycle", "named"])
def test_a_restored_schedule_goes_on_as_the_unbroken_one(kind: str) -> None:
    others = {
        "onecycle": functools.partial(torch_schedulers.OneCycleLR, max_lr=0.2, total_steps=100),
        "named": Schedule("cosine", warmup=3),
    }
    schedule = FACTORIES.get(kind) or others[kind]

    def epoch(of: Schedules, index: int) -> list[dict[str, list[float]]]:
        seen = [of.at(np.array([4 * index + step] * 3)) for step in range(4)]
        of.end_epoch([{"loss": LOSSES[index]}, {"loss": 1.0}, {"loss": 1.0, "val_loss": LOSSES[-index]}])
        return [{name: column.tolist() for name, column in columns.items()} for columns in seen]

    unbroken = schedules(schedule, "adam")
    before = [epoch(unbroken, index) for index in range(5)]
    kept = json.loads(json.dumps(unbroken.state()))
    after = [epoch(unbroken, index) for index in range(5, 10)]
    resumed = schedules(schedule, "adam")
    resumed.restore(kept)
    assert resumed.state() == kept
    assert [epoch(resumed, index) for index in range(5, 10)] == after
    assert resumed.state() == unbroken.state()
    assert before != after  # else a schedule that was never restored would pass


def test_bad_schedules_are_named() -> None:
    with pytest.raises(InputError, match=r"unknown schedule 'cosin'. Did you mean 'cosine'"):
        schedules("cosin")
    with pytest.raises(InputError, match=r"option of the schedule 'cosine' 'finale'. Did you mean 'final'"):
        Schedule("cosine", finale=0.1)
    with pytest.raises(InputError, match="schedule 'step': every is 0, expected a number of epochs"):
        Schedule("step", every=0)
    with pytest.raises(InputError, match="warmup is -1, expected steps"):
        Schedule("linear", warmup=-1)
    with pytest.raises(InputError, match="expected a name"):
        schedules(3)
    with pytest.raises(InputError, match=r"member 'a': .*StepLR.* could not make a scheduler.*functools.partial"):
        schedules(torch_schedulers.StepLR)
    with pytest.raises(InputError, match=r"member 'a': .* returned None, expected a scheduler"):
        schedules(lambda optimizer: None)


def test_a_scheduler_past_its_end_is_named_with_its_member() -> None:
    short = schedules(
        functools.partial(torch_schedulers.OneCycleLR, max_lr=0.2, total_steps=5, cycle_momentum=False)
    )
    with pytest.raises(InputError, match="member 'b': its scheduler can't continue: Tried to step 6"):
        short.at(np.array([5, 6, 5]))


def test_momentum_can_be_scheduled_only_where_there_is_some() -> None:
    make = functools.partial(torch_schedulers.OneCycleLR, max_lr=0.2, total_steps=50)
    with pytest.raises(
        InputError, match=r"member 'a': the schedule sets momentum to 0.95.*Give compile a momentum"
    ):
        schedules(make, "sgd")
    assert schedules(make, "sgd", momentum=0.5).at(np.zeros(3))["momentum"].tolist() == [0.95] * 3


def test_a_plateau_without_a_loss_is_refused() -> None:
    with pytest.raises(InputError, match=r"member 'a': ReduceLROnPlateau needs a loss, got \['accuracy'\]"):
        schedules(FACTORIES["plateau"]).end_epoch([{"accuracy": 0.5}] * 3)
