"""Averaged members equal a plain loop that averages by hand, wherever their steps are taken."""

import copy

import numpy as np
import pytest
import torch
from tests.exchange.loops import (
    HERE,
    IN_WORKERS,
    NAMES,
    TOLERANCE,
    Way,
    adams,
    average,
    data_of,
    difference,
    fit,
    fleet_in,
    fleet_of,
    give,
    net,
    nets,
    rows,
    train,
    ways,
)
from torch import Tensor, nn

import modelfleet as mf


def averaging(models: list[nn.Module], shares: list[float] | None = None) -> None:
    mean = average(models, shares)
    for model in models:
        give(model, mean)


@ways(HERE, IN_WORKERS)
def test_members_average_after_steps(way: Way) -> None:
    models, data = nets(), data_of(20, 20, 20)
    fleet = fleet_in(way, models)
    fit(fleet, data, mf.Average(every_steps=3), way, epochs=3)
    train(models, data, adams(models), 3, after_step=lambda step: averaging(models) if step % 3 == 0 else None)
    assert difference(fleet, models) < TOLERANCE


@ways(HERE, IN_WORKERS)
def test_members_average_after_epochs_by_their_rows(way: Way) -> None:
    models, data = nets(), data_of(20, 15, 8)
    fleet = fleet_in(way, models)
    fit(fleet, data, mf.Average(every=2, weights="rows"), way, epochs=4)
    shares = [20.0, 15.0, 8.0]
    train(
        models,
        data,
        adams(models),
        4,
        after_epoch=lambda epoch: averaging(models, shares) if epoch % 2 == 0 else None,
    )
    assert difference(fleet, models) < TOLERANCE


@ways(HERE[:2], IN_WORKERS[:1])
def test_members_of_unequal_epochs_average_after_steps(way: Way) -> None:
    models, data = nets(), data_of(20, 15, 10)
    fleet = fleet_in(way, models)
    fit(fleet, data, mf.Average(every_steps=3), way, epochs=2)
    train(models, data, adams(models), 2, after_step=lambda step: averaging(models) if step % 3 == 0 else None)
    assert difference(fleet, models) < TOLERANCE


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@ways(HERE[:2], IN_WORKERS[:1])
def test_the_outer_optimizer_is_sgd_with_nesterov_momentum(way: Way, momentum: float) -> None:
    (model,), data = nets(1), data_of(20, 20, 20)
    models = [copy.deepcopy(model) for _ in NAMES]
    fleet = fleet_in(way, models)
    fit(fleet, data, mf.Average(outer=mf.Outer(lr=0.7, momentum=momentum)), way, epochs=4)

    common = copy.deepcopy(models[0])
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=momentum, nesterov=momentum > 0)

    def exchange(epoch: int) -> None:
        mean = average(models)
        for name, parameter in common.named_parameters():
            parameter.grad = parameter.detach() - mean[name]
        outer.step()
        for model in models:
            give(model, {**mean, **{name: p.detach() for name, p in common.named_parameters()}})

    train(models, data, adams(models), 4, after_epoch=exchange)
    assert difference(fleet, models) < TOLERANCE


def test_an_outer_rate_of_one_without_momentum_is_the_plain_average() -> None:
    data = data_of(20, 20, 20)
    plain, outer = fleet_of(nets()), fleet_of(nets())
    fit(plain, data, mf.Average(), epochs=3)
    fit(outer, data, mf.Average(outer=mf.Outer(lr=1.0, momentum=0.0)), epochs=3)
    assert difference(outer, [plain[name] for name in plain.names]) < TOLERANCE


@ways(HERE[:2])
def test_groups_average_within_themselves(way: Way) -> None:
    torch.manual_seed(0)
    models = [net(6), net(4), net(6)]
    data = data_of(20, 20, 20)
    fleet = fleet_of(models)
    strategy = {} if way["strategy"] == "fused" else way
    fit(fleet, data, mf.Average(groups=[["a", "c"], ["b"]]), strategy, epochs=3)
    train(models, data, adams(models), 3, after_epoch=lambda epoch: averaging([models[0], models[2]]))
    assert difference(fleet, models) < TOLERANCE


def test_weights_may_be_given_and_zero_leaves_a_member_out_of_the_average() -> None:
    models, data = nets(), data_of(20, 20, 20)
    fleet = fleet_of(models)
    fit(fleet, data, mf.Average(weights=mf.each({"a": 3, "b": 1, "c": 0})), epochs=2)
    train(models, data, adams(models), 2, after_epoch=lambda epoch: averaging(models, [3.0, 1.0, 0.0]))
    assert difference(fleet, models) < TOLERANCE


@ways(HERE[:2], IN_WORKERS[:1])
def test_members_that_failed_stopped_or_finished_are_absent(way: Way) -> None:
    models, data = nets(), data_of(20, 20, 20)
    data[1][0][12] = float("nan")  # "b" fails in the third step of its first epoch
    fleet = fleet_in(way, models)
    history = fit(fleet, data, mf.Average(every_steps=1), way, epochs=mf.each([3, 3, 2]))
    assert set(history.failed) == {"b"}
    failed_at = 2

    def exchange(step: int) -> None:
        there = [0, 1, 2] if step <= failed_at else [0, 2] if step <= 8 else [0]
        averaging([models[number] for number in there])

    cut = [data[0], (data[1][0][:10], data[1][1][:10]), data[2]]
    optimizers = adams(models)
    step = 0
    for epoch in range(3):
        for start in range(0, 20, 5):
            for number in [0, *([1] if epoch == 0 else []), *([2] if epoch < 2 else [])]:
                x, y = (part[start : start + 5] for part in cut[number])
                if len(x):
                    optimizers[number].zero_grad()
                    nn.functional.cross_entropy(models[number](x), y).backward()
                    optimizers[number].step()
            step += 1
            exchange(step)
    assert difference(fleet, models) < TOLERANCE


def test_integer_buffers_and_frozen_weights_stay_each_members_own() -> None:
    models, data = nets(), data_of(20, 15, 10)
    for number, model in enumerate(models):
        model[0].bias.requires_grad_(False)
        nn.init.constant_(model[0].bias, float(number))
    fleet = fleet_of(models)
    fit(fleet, data, mf.Average(), epochs=2)
    counts = [int(fleet[name][2].num_batches_tracked) for name in fleet.names]
    assert counts == [8, 6, 4]
    assert [float(fleet[name][0].bias[0]) for name in fleet.names] == [0.0, 1.0, 2.0]


def test_bfloat16_weights_are_averaged_to_the_nearest_number() -> None:
    models = [nn.Linear(4, 3).bfloat16() for _ in range(3)]
    fleet = mf.Fleet(dict(zip(NAMES, copy.deepcopy(models), strict=True)))
    fleet.compile("sgd", "mse", lr=0.0)
    x, _ = rows(10)
    fit(fleet, (x.bfloat16(), x[:, :3].bfloat16()), mf.Average(), epochs=1)
    mean: Tensor = torch.stack([model.weight for model in models]).double().mean(0).bfloat16()
    for name in fleet.names:
        assert fleet[name].weight.dtype == torch.bfloat16
        assert torch.equal(fleet[name].weight, mean)


def test_averaged_members_beat_lone_ones_on_data_that_are_split_by_class() -> None:
    """Each member sees two of three classes, and is asked for all."""
    x, y = rows(240, seed=9)
    data = [(x[y != number], y[y != number]) for number in range(3)]
    shortest = min(len(own) for own, _ in data)
    data = [(own[:shortest], target[:shortest]) for own, target in data]
    test = rows(300, seed=10)
    accuracy = {}
    for exchange in (None, mf.Average(every_steps=4)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        fleet = fleet_of([model] * 3, lr=0.02)
        fit(fleet, data, exchange, epochs=15)
        right = [(np.argmax(out, 1) == test[1].numpy()).mean() for out in fleet.predict(test[0]).values()]
        accuracy[exchange is not None] = float(np.mean(right))
    assert accuracy[False] + 0.1 < accuracy[True]
