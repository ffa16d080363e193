"""Exchanges of a user's own: what they see and change, and when they are called."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.exchange.loops import (
    HERE,
    IN_WORKERS,
    TOLERANCE,
    Way,
    adams,
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

import modelfleet as mf


class Calls(mf.Exchange):
    """Notes when it is called, and calls a function."""

    def __init__(self, do: Callable[[mf.ExchangeRun], None] = lambda run: None, **when: Any) -> None:
        super().__init__(**when)
        self.do, self.seen = do, []

    def exchange(self, run: mf.ExchangeRun) -> None:
        self.seen.append((run.epoch, run.step, run.number, run.active))
        self.do(run)


def test_it_is_called_after_epochs_or_steps_and_before_callbacks() -> None:
    order: list[str] = []

    class Last(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            order.append("callback")

    by_epoch = Calls(lambda run: order.append("exchange"), every=2)
    by_step = Calls(every_steps=3)
    fit(fleet_of(nets()), rows(20), [by_epoch, by_step], epochs=4, callbacks=[Last()])
    names = ("a", "b", "c")
    assert by_epoch.seen == [(2, 8, 0, names), (4, 16, 1, names)]
    assert [seen[1:3] for seen in by_step.seen] == [(3, 0), (6, 1), (9, 2), (12, 3), (15, 4)]
    assert order == ["callback", "exchange", "callback", "callback", "exchange", "callback"]


@ways(HERE, IN_WORKERS)
def test_arrays_have_the_layout_of_the_models(way: Way) -> None:
    """The first row of the first layer's weights is moved from each member to the next."""
    models, data = nets(), data_of(20, 20, 20)

    def shift(run: mf.ExchangeRun) -> None:
        names = run.active[::-1]
        weights = run.weights(names)
        assert weights["0.weight"].shape == (3, 6, 4)
        assert weights["2.running_mean"].shape == (3, 6)
        assert "2.running_mean" not in run.weights(names, buffers=False)
        moved = weights["0.weight"]
        moved[:, 0] = np.roll(moved[:, 0], 1, axis=0)
        run.write(names, {"0.weight": moved})

    fleet = fleet_in(way, models)
    fit(fleet, data, Calls(shift, every_steps=2), way, epochs=2)

    def by_hand(step: int) -> None:
        if step % 2 == 0:
            values = [model.state_dict()["0.weight"].clone() for model in models]
            for number, model in enumerate(models):  # in the order c, b, a: "b" gets that of "c"
                mine = values[number].clone()
                mine[0] = values[(number + 1) % 3][0]
                give(model, {"0.weight": mine})

    train(models, data, adams(models), 2, after_step=by_hand)
    assert difference(fleet, models) < TOLERANCE


@ways(HERE[:2], IN_WORKERS[:1])
def test_optimizer_state_and_hyperparameters_can_be_written(way: Way) -> None:
    models, data = nets(), data_of(20, 20, 20)

    def forget(run: mf.ExchangeRun) -> None:
        state = run.optimizer_state(["b"])
        assert state["exp_avg/0.weight"].shape == (1, 6, 4)
        run.write_optimizer_state(["b"], {"exp_avg/0.weight": np.zeros_like(state["exp_avg/0.weight"])})
        run.set_hyperparameters("b", {"lr": run.hyperparameters("b")["lr"] / 2})

    fleet = fleet_in(way, models)
    fit(fleet, data, Calls(forget), way, epochs=3)
    optimizers = adams(models)

    def by_hand(epoch: int) -> None:
        parameter = models[1][0].weight
        optimizers[1].state[parameter]["exp_avg"].zero_()
        optimizers[1].param_groups[0]["lr"] /= 2

    train(models, data, optimizers, 3, after_epoch=by_hand)
    assert difference(fleet, models) < TOLERANCE


def test_draws_depend_on_the_fleets_seed_and_the_number_of_the_exchange() -> None:
    drawn: list[tuple[list[float], list[int]]] = []
    look = Calls(lambda run: drawn.append((run.uniform(4).tolist(), run.permutation(4).tolist())))
    for _ in range(2):
        fit(fleet_of(nets()), rows(20), look, epochs=2)
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3]
    assert drawn[0] != drawn[1]
    numbers = [number for uniform, _ in drawn for number in uniform]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 8


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
@pytest.mark.parametrize(
    ("do", "words"),
    [
        (
            lambda run: run.write(run.active, {"0.weight": np.zeros((3, 1, 4))}),
            r"would become \(1, 4\); expected \(6, 4\)",
        ),
        (
            lambda run: run.write(run.active, {"0.weight": np.zeros((2, 6, 4))}),
            r"is \(2, 6, 4\) of float64 for 3 members",
        ),
        (lambda run: run.write(run.active, {"0.weight": "zeros"}), "expected an array of numbers"),
        (lambda run: run.write(run.active, {"0.bias": np.zeros(3)}), r"would become \(\); expected \(6,\)"),
        (lambda run: run.weights([]), r"the members are \[\]; expected a list"),
        (lambda run: run.weights("a"), "the members are 'a'; expected a list"),
        (lambda run: run.set_hyperparameters("a", {"lr": "0.1"}), "lr of member 'a' would become '0.1'"),
    ],
)
def test_what_does_not_fit_the_members_is_refused(do: Any, words: str, strategy: str) -> None:
    with pytest.raises(mf.InputError, match=words):
        fit(fleet_of(nets()), rows(20), Calls(do), {"strategy": strategy})


def test_unknown_weights_are_named() -> None:
    wrong = Calls(lambda run: run.write(["a"], {"0.wait": np.zeros((1, 6, 4))}))
    with pytest.raises(mf.InputError, match=r"unknown weight of member 'a' '0\.wait'\. Did you mean '0.weight'"):
        fit(fleet_of(nets()), rows(20), wrong)


def test_a_member_that_rests_can_be_written() -> None:
    """A member that has finished is not among the active ones, but has its state."""

    def give_first(run: mf.ExchangeRun) -> None:
        assert run.active == (("a", "b", "c") if run.epoch == 1 else ("a", "b"))
        run.write(["c"], {"3.bias": run.weights(["a"])["3.bias"]})

    fleet = fleet_of(nets(), lr=0.0)
    fit(fleet, data_of(20, 20, 20), Calls(give_first), epochs=mf.each([3, 3, 1]))
    assert torch.equal(fleet["c"][3].bias, fleet["a"][3].bias)


def test_a_class_without_exchange_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Exchange has no method exchange"):
        fit(fleet_of(nets()), rows(20), mf.Exchange())
