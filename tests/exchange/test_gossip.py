"""Pairs of members average their weights, drawn from the fleet's seed."""

import copy

import numpy as np
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
    nets,
    rows,
    train,
    ways,
)
from torch import nn

import modelfleet as mf
from modelfleet.exchange.gossip import pairs


class Pairs(mf.Gossip):
    """Gossip that notes who averaged with whom."""

    def __init__(self, every: int | None = None, *, every_steps: int | None = None) -> None:
        super().__init__(every, every_steps=every_steps)
        self.seen: list[tuple[str, str]] = []

    def exchange(self, run: mf.ExchangeRun) -> None:
        before = run.weights(run.active)["3.bias"]
        super().exchange(run)
        after = run.weights(run.active)["3.bias"]
        moved = [name for name, one, other in zip(run.active, before, after, strict=True) if (one != other).any()]
        self.seen.append((moved[0], moved[1]))


@ways(HERE, IN_WORKERS[:1])
def test_pairs_average_and_the_odd_one_stays_alone(way: Way) -> None:
    models, data = nets(), data_of(20, 20, 20)
    fleet, gossip = fleet_in(way, models), Pairs(every_steps=2)
    fit(fleet, data, gossip, way, epochs=4)
    drawn = iter(gossip.seen)

    def exchange(step: int) -> None:
        if step % 2 == 0:
            pair = [models[NAMES.index(name)] for name in next(drawn)]
            mean = average(pair)
            for model in pair:
                give(model, mean)

    train(models, data, adams(models), 4, after_step=exchange)
    assert difference(fleet, models) < TOLERANCE
    assert len(gossip.seen) == 8
    assert len(set(gossip.seen)) > 1


def test_the_same_seed_draws_the_same_pairs_and_another_one_others() -> None:
    def seen(seed: int) -> list[tuple[str, str]]:
        fleet = mf.Fleet(dict(zip(NAMES, map(copy.deepcopy, nets()), strict=True)), seed=seed)
        fleet.compile("sgd", "cross_entropy", lr=0.01)
        gossip = Pairs(every_steps=1)
        fit(fleet, data_of(20, 20, 20), gossip, epochs=3)
        return gossip.seen

    assert seen(0) == seen(0) != seen(1)


def test_pairs_are_disjoint() -> None:
    names = list("abcdefg")
    found = pairs(names, np.array([3, 1, 6, 0, 2, 5, 4]))
    assert found == ["d", "b", "g", "a", "c", "f"]


def test_two_members_of_a_group_gossip_and_one_alone_does_not() -> None:
    models, data = nets(), data_of(20, 20, 20)
    fleet = fleet_of(models)
    fit(fleet, data, mf.Gossip(groups=[["c", "a"], ["b"]]), epochs=2)

    def exchange(epoch: int) -> None:
        pair: list[nn.Module] = [models[0], models[2]]
        mean = average(pair)
        for model in pair:
            give(model, mean)

    train(models, data, adams(models), 2, after_epoch=exchange)
    assert difference(fleet, models) < TOLERANCE


def test_gossiping_members_beat_lone_ones_on_data_that_are_split_by_class() -> None:
    """Each member sees two of three classes, and is asked for all."""
    x, y = rows(240, seed=9)
    data = [(x[y != number][:140], y[y != number][:140]) for number in range(3)]
    test = rows(300, seed=10)
    accuracy = {}
    for exchange in (None, mf.Gossip(every_steps=2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        fleet = fleet_of([model] * 3, lr=0.02)
        fit(fleet, data, exchange, epochs=15)
        right = [(np.argmax(out, 1) == test[1].numpy()).mean() for out in fleet.predict(test[0]).values()]
        accuracy[exchange is not None] = float(np.mean(right))
    assert accuracy[False] + 0.1 < accuracy[True]
