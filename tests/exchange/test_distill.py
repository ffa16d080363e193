"""Members that learn from each other's predictions equal a plain loop of deep mutual learning."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exchange.loops import (
    HERE,
    NAMES,
    TOLERANCE,
    LossOf,
    Models,
    Way,
    adams,
    data_of,
    difference,
    fit,
    fleet_in,
    fleet_of,
    nets,
    rows,
    train,
    ways,
)
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf


def outputs_of_others(before: Models, number: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over the others of what they predict, in evaluation mode."""
    found = []
    with torch.no_grad():
        for other, model in enumerate(before):
            if other != number:
                found.append(function(model.eval()(x)))
    return torch.stack(found).mean(0)


def mutual(models: Models, weight: float, temperature: float) -> LossOf:
    def loss_of(before: Models, number: int, x: Tensor, y: Tensor) -> Tensor:
        teachers = outputs_of_others(before, number, x, lambda out: F.softmax(out / temperature, 1))
        output = models[number](x)
        divergence = F.kl_div(F.log_softmax(output / temperature, 1), teachers, reduction="batchmean")
        return F.cross_entropy(output, y) + weight * temperature**2 * divergence

    return loss_of


@ways(HERE)
def test_members_learn_from_the_others_on_shared_rows(way: Way) -> None:
    models, data = nets(), rows(20)
    fleet = fleet_in(way, models)
    fit(fleet, data, mf.Distill(weight=0.7, temperature=2.0), way, epochs=3)
    train(models, [data] * 3, adams(models), 3, loss_of=mutual(models, 0.7, 2.0))
    assert difference(fleet, models) < TOLERANCE


@ways(HERE)
def test_members_learn_from_the_others_on_rows_of_their_own(way: Way) -> None:
    models, data = nets(), data_of(20, 15, 8)
    fleet = fleet_in(way, models)
    fit(fleet, data, mf.Distill(), way, epochs=3)
    train(models, data, adams(models), 3, loss_of=mutual(models, 1.0, 1.0))
    assert difference(fleet, models) < TOLERANCE


@ways(HERE[:2])
def test_regression_members_learn_the_mean_output_of_the_others(way: Way) -> None:
    models = nets()
    data = [(x, x[:, :3] ** 2) for x, _ in data_of(20, 20, 20)]
    fleet = fleet_in(way, models, loss="mse")
    fit(fleet, data, mf.Distill(weight=0.5), way, epochs=3)

    def loss_of(before: Models, number: int, x: Tensor, y: Tensor) -> Tensor:
        others = outputs_of_others(before, number, x, lambda out: out)
        output = models[number](x)
        return F.mse_loss(output, y) + 0.5 * F.mse_loss(output, others)

    train(models, data, adams(models), 3, loss_of=loss_of)
    assert difference(fleet, models) < TOLERANCE


@ways(HERE[:2])
def test_binary_members_compare_the_probability_of_each_output(way: Way) -> None:
    models = nets()
    data = [(x, (x[:, :3] > 0).double()) for x, _ in data_of(20, 20, 20)]
    fleet = fleet_in(way, models, loss="bce_with_logits")
    fit(fleet, data, mf.Distill(temperature=3.0), way, epochs=2)

    def loss_of(before: Models, number: int, x: Tensor, y: Tensor) -> Tensor:
        p = outputs_of_others(before, number, x, lambda out: torch.sigmoid(out / 3))
        output = models[number](x)
        q = torch.sigmoid(output / 3)
        divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        return F.binary_cross_entropy_with_logits(output, y) + 9 * divergence.mean()

    train(models, data, adams(models), 2, loss_of=loss_of)
    assert difference(fleet, models) < TOLERANCE


def test_members_of_unlike_structure_learn_from_each_other() -> None:
    torch.manual_seed(0)
    models: Models = [
        nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double() for width in (3, 9)
    ]
    models.append(nn.Linear(4, 3).double())
    data = data_of(20, 15, 20)
    fleet = fleet_of(models)
    fit(fleet, data, mf.Distill(), epochs=3)
    train(models, data, adams(models), 3, loss_of=mutual(models, 1.0, 1.0))
    assert difference(fleet, models) < TOLERANCE


def test_padded_members_learn_from_each_other_with_weighted_rows() -> None:
    torch.manual_seed(0)
    models: Models = [
        nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)).double() for width in (8, 7, 8)
    ]
    (x, y), weights = rows(20), torch.linspace(0.1, 1.0, 20, dtype=torch.float64)
    fleet = fleet_of(models)
    fit(fleet, (x, y, weights), mf.Distill(), {"strategy": "fused"}, epochs=2)
    optimizers = adams(models)
    for _ in range(2):
        for start in range(0, 20, 5):
            xs, ys, own = (part[start : start + 5] for part in (x, y, weights))
            before = list(map(copy.deepcopy, models))
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                teachers = outputs_of_others(before, number, xs, lambda out: F.softmax(out, 1))
                output = model(xs)
                loss = (own * F.cross_entropy(output, ys, reduction="none")).mean()
                loss = loss + F.kl_div(F.log_softmax(output, 1), teachers, reduction="batchmean")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert difference(fleet, models) < TOLERANCE


def test_a_loss_of_the_users_own_is_told_what_to_compare() -> None:
    def smooth(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.1)

    models, data = nets(), data_of(20, 20, 20)
    fleet = fleet_of(models, loss=smooth)
    with pytest.raises(mf.InputError, match="can't tell what the outputs of member 'a' are by its loss 'smooth'"):
        fit(fleet, data, mf.Distill(), epochs=1)
    fit(fleet, data, mf.Distill(compare="probabilities"), epochs=2)

    def loss_of(before: Models, number: int, x: Tensor, y: Tensor) -> Tensor:
        teachers = outputs_of_others(before, number, x, lambda out: F.softmax(out, 1))
        output = models[number](x)
        return smooth(output, y) + F.kl_div(F.log_softmax(output, 1), teachers, reduction="batchmean")

    train(models, data, adams(models), 2, loss_of=loss_of)
    assert difference(fleet, models) < TOLERANCE


def test_members_that_failed_or_finished_do_not_teach() -> None:
    models, data = nets(), data_of(20, 20, 20)
    data[1][0][0] = float("nan")  # "b" fails in its first step
    fleet = fleet_of(models)
    history = fit(fleet, data, mf.Distill(), epochs=mf.each([3, 3, 1]))
    assert set(history.failed) == {"b"}
    optimizers = adams(models)
    # In the first step, "b" still teaches, as nobody knows that its rows are bad; then "a" and "c" are left.
    for epoch in range(3):
        for start in range(0, 20, 5):
            losses, before = [], list(map(copy.deepcopy, models))
            left = [models[0], models[2]], [before[0], before[2]]
            there = [0, 2] if epoch == 0 else [0]
            for number in there:
                x, y = (part[start : start + 5] for part in data[number])
                if epoch == 0 and start == 0:
                    losses.append(mutual(models, 1.0, 1.0)(before, number, x, y))
                elif epoch == 0:
                    losses.append(mutual(left[0], 1.0, 1.0)(left[1], [0, 2].index(number), x, y))
                else:
                    losses.append(F.cross_entropy(models[number](x), y))
            for number, loss in zip(there, losses, strict=True):
                optimizers[number].zero_grad()
                loss.backward()
                optimizers[number].step()
    models[1].load_state_dict(fleet["b"].state_dict())
    assert difference(fleet, models) < TOLERANCE


def test_a_teacher_whose_outputs_overflow_does_not_spoil_the_others() -> None:
    """Its weights are finite, so that it has not failed when it teaches."""
    models, (x, y) = nets(), rows(20)
    nn.init.constant_(models[1][3].weight, 1e308)
    fleet = fleet_of(models)
    history = fit(fleet, (x, y), mf.Distill(), epochs=1)
    assert set(history.failed) == {"b"}
    left = [models[0], models[2]]
    optimizers = adams(models)
    train(left, [(x, y)] * 2, [optimizers[0], optimizers[2]], 1, loss_of=mutual(left, 1.0, 1.0))
    models[1].load_state_dict(fleet["b"].state_dict())
    assert difference(fleet, models) < TOLERANCE


def test_metrics_and_the_validation_loss_do_not_include_it() -> None:
    data, test = rows(20), rows(12, seed=4)
    fleet = fleet_of(nets(), metrics=["accuracy"], lr=1e-9)
    alone = fleet_of(nets(), metrics=["accuracy"], lr=1e-9)
    history = fit(fleet, data, mf.Distill(weight=5.0), validation=test)
    plain = fit(alone, data, None, validation=test)
    for name in NAMES:
        own, other = history[name], plain[name]
        assert own["loss"][0] > other["loss"][0] + 0.01
        for metric in ("accuracy", "val_loss", "val_accuracy"):
            assert own[metric][0] == pytest.approx(other[metric][0], abs=1e-6)


def test_members_that_learn_from_each_other_beat_lone_ones_on_wrong_labels() -> None:
    """A quarter of the labels is wrong. Alone, a member learns them by heart; the others disagree."""
    test, data = rows(400, seed=100), []
    for number in range(3):
        x, y = rows(60, seed=number)
        wrong = torch.rand(60, generator=torch.Generator().manual_seed(number)) < 0.25
        data.append((x, torch.where(wrong, (y + 1) % 3, y)))
    losses = {}
    for exchange in (None, mf.Distill(weight=2.0)):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3)).double() for _ in range(3)]
        fleet = fleet_of(models, lr=0.05)
        history = fit(fleet, data, exchange, epochs=40, batch_size=20, validation=test)
        losses[exchange is not None] = sum(history.latest("val_loss").values()) / 3
    assert losses[True] < 0.8 * losses[False]


@pytest.mark.parametrize("strategy", ["processes", "data_parallel"])
def test_workers_are_refused(strategy: Any) -> None:
    with pytest.raises(mf.StrategyError, match="Distill is not possible with strategy="):
        fit(fleet_of(nets()), rows(20), mf.Distill(), {"strategy": strategy})
