"""Hyperparameters that are worked out for many steps at a time are those of each step."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.helpers import mlp, toy
from torch.optim import lr_scheduler

import modelfleet as mf
from modelfleet.frameworks.torch.optimizers.hyperparameters import columns, resolve
from modelfleet.frameworks.torch.schedules import Schedules
from modelfleet.frameworks.torch.task import Task
from modelfleet.lanes.lane import Columns
from modelfleet.runs.columns_ahead import STEPS_AHEAD, ColumnsAhead
from modelfleet.runs.factors import Factors

NAMES = ["a", "b", "c", "d"]
OPTIMIZER, HYPER = resolve("sgd", {"lr": mf.each([0.1, 0.2, 0.3, 0.4]), "momentum": 0.9})
COLUMNS = columns(HYPER, NAMES)
SCHEDULES = [
    "cosine",
    mf.Schedule("linear", warmup=5),
    partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=7),
    partial(lr_scheduler.StepLR, step_size=1),
]


def schedules() -> Schedules:
    return Schedules(SCHEDULES, COLUMNS, [Task(OPTIMIZER)] * 4, np.full(4, 200), np.full(4, 3), names=NAMES)


def same(mine: Columns, other: Columns) -> bool:
    return all(np.array_equal(mine[name], other[name]) for name in other)


def test_they_are_those_of_each_step_whoever_takes_part() -> None:
    expected: list[list[Columns]] = []
    factors = Factors(NAMES, COLUMNS)
    ahead, each = ColumnsAhead(schedules(), factors, expected.append), schedules()
    steps = np.zeros(4, dtype=np.int64)
    generator = np.random.default_rng(0)
    stepping = np.ones(4, dtype=bool)
    for number in range(400):
        if generator.random() < 0.05:
            stepping = generator.random(4) < 0.7
            stepping[number % 4] = True
        if number == 150:
            factors.change(1, {"lr": 0.5})
        found = ahead.at(steps, stepping, None if number % 2 else 100)
        wanted = factors.applied(each.at(steps))
        assert same({k: v[stepping] for k, v in found.items()}, {k: v[stepping] for k, v in wanted.items()})
        steps += stepping
    assert len(expected) < 80, "many steps at a time"


def test_they_are_worked_out_once_for_many_steps() -> None:
    expected: list[list[Columns]] = []
    ahead = ColumnsAhead(schedules(), Factors(NAMES, COLUMNS), expected.append)
    everybody = np.ones(4, dtype=bool)
    for number in range(100):
        assert ahead.at(np.full(4, number), everybody, 100 - number) is expected[-1][number % STEPS_AHEAD]
    assert [len(columns) for columns in expected] == [STEPS_AHEAD, 100 - STEPS_AHEAD]


def test_a_scheduler_that_ends_raises_at_the_step_after_its_last() -> None:
    watched = []

    class Watch(mf.Callback):
        def on_step_end(self, run: Any) -> None:
            watched.append(run)

    fleet = mf.Fleet.build(mlp, 2, seed=0)
    schedule = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=7)
    fleet.compile("sgd", "cross_entropy", momentum=0.9, schedule=schedule)
    with pytest.raises(mf.InputError, match="Tried to step 8 times"):
        fleet.fit(toy(40), batch_size=4, progress=False, strategy="fused", callbacks=[Watch()])
    assert len(watched) == 8
