"""What exchanges refuse, before the first step, and with which words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exchange.loops import data_of, fit, fleet_of, net, nets, rows
from torch import nn

import modelfleet as mf

average: Any = mf.Average  # what is wrong here is wrong for a type checker, too
gossip: Any = mf.Gossip
exploit: Any = mf.Exploit
distill: Any = mf.Distill


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: average(0), "every is 0, expected a whole number, 1 or more"),
        (lambda: gossip(every_steps=True), "every_steps is True"),
        (lambda: average(1.5), "every is 1.5"),
        (lambda: average(2, every_steps=2), "got both every and every_steps"),
        (lambda: average(weights=[1, 2]), "weights is \\[1, 2\\]; expected mf.each"),
        (lambda: average(weights="steps"), "weights is 'steps'"),
        (lambda: average(outer=0.7), "outer is 0.7; expected mf.Outer"),
        (lambda: average(groups="ab"), "groups is 'ab'; expected lists of names"),
        (lambda: average(groups=["ab"]), "expected lists of names"),
        (lambda: gossip(groups=[["a"], ["b", "a"]]), "groups has 'a' twice"),
        (lambda: mf.Outer(lr=0), "lr is 0, expected a number above 0"),
        (lambda: mf.Outer(momentum=1.0), "momentum is 1.0, expected a number from 0 up to 1"),
        (lambda: exploit(fraction=0.6), "fraction is 0.6"),
        (lambda: exploit(perturb={"lr": ()}), "perturb\\['lr'\\] is \\(\\); expected factors above 0"),
        (lambda: exploit(perturb={"lr": 0.8}), "perturb\\['lr'\\] is 0.8"),
        (lambda: exploit("speed"), "speed"),
        (lambda: distill(0), "weight is 0, expected a number above 0"),
        (lambda: distill(temperature=-1.0), "temperature is -1.0"),
        (lambda: distill(compare="all"), "compare is 'all'"),
    ],
)
def test_arguments_out_of_range(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(mf.InputError, match=words):
        make()


@pytest.mark.parametrize("given", [object(), [mf.Callback()], "average", mf.Average])
def test_what_is_no_exchange(given: Any) -> None:
    with pytest.raises(mf.InputError, match=r"exchange is .*; expected mf\.Average"):
        fit(fleet_of(nets()), rows(20), given)


def test_two_distillations() -> None:
    with pytest.raises(mf.InputError, match="several Distill"):
        fit(fleet_of(nets()), rows(20), [mf.Distill(), mf.Distill(2.0)])


@pytest.mark.parametrize("exchange", [mf.Average(), mf.Gossip(), mf.Exploit("loss"), mf.Average(outer=mf.Outer())])
def test_members_of_unlike_structure(exchange: mf.Exchange) -> None:
    fleet = fleet_of([net(6), net(6), net(4)])
    words = r"members 'a' and 'c' can't exchange their state: '0\.weight' is \(6, 4\) float64 in 'a', and \(4, 4\)"
    with pytest.raises(mf.InputError, match=words):
        fit(fleet, data_of(20, 20, 20), exchange)


def test_members_with_other_parameters_or_optimizers() -> None:
    fleet = fleet_of([net(), net(), nn.Linear(4, 3).double()])
    with pytest.raises(mf.InputError, match=r"'a' has '0\.weight', and 'c' has not"):
        fit(fleet, data_of(20, 20, 20), mf.Average())
    fleet = fleet_of(nets(), optimizer=mf.each(["adam", "sgd", "adam"]), lr=0.1)
    fit(fleet, data_of(20, 20, 20), mf.Average())  # optimizers are not averaged
    with pytest.raises(mf.InputError, match="members 'a' and 'b' can't exchange their state: 'a' has"):
        fit(fleet, data_of(20, 20, 20), mf.Exploit("loss"))


def test_padded_members_of_unequal_widths() -> None:
    """Members of unequal widths may share a lane, padded. Their own shapes count."""
    widths = {"a": 8, "b": 7, "c": 8}
    fleet = mf.Fleet(
        {name: nn.Sequential(nn.Linear(4, w), nn.ReLU(), nn.Linear(w, 3)) for name, w in widths.items()}
    )
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    x, y = rows(20)
    with pytest.raises(mf.InputError, match=r"'a' and 'b' can't .* \(8, 4\) float32 in 'a', and \(7, 4\)"):
        fit(fleet, (x.float(), y), mf.Average())
    fit(fleet, (x.float(), y), mf.Average(groups=[["a", "c"]]), {"strategy": "fused"})
    assert torch.equal(fleet["a"][0].weight, fleet["c"][0].weight)
    assert fleet["b"][0].weight.shape == (7, 4)


def test_names_that_no_member_has() -> None:
    fleet, data = fleet_of(nets()), data_of(20, 20, 20)
    with pytest.raises(mf.InputError, match="unknown member in the groups of Average 'd'"):
        fit(fleet, data, mf.Average(groups=[["a", "d"]]))
    with pytest.raises(mf.InputError, match="weights of Average: each"):
        fit(fleet, data, mf.Average(weights=mf.each([1.0, 2.0])))
    with pytest.raises(mf.InputError, match="the weight of member 'b' is -1"):
        fit(fleet, data, mf.Average(weights=mf.each([1, -1, 1])))
    with pytest.raises(mf.InputError, match=r"unknown hyperparameter of member 'a' .* 'rate'"):
        fit(fleet, data, mf.Exploit("loss", perturb={"rate": (0.8, 1.25)}))


def test_rows_that_are_not_known() -> None:
    x, y = rows(20)
    with pytest.raises(mf.InputError, match="number of rows of member 'a', which its loader does not say"):
        fit(fleet_of(nets()), lambda: iter([(x, y)]), mf.Average(weights="rows"), batch_size=None)


def test_metrics_that_will_not_be_recorded() -> None:
    fleet, data = fleet_of(nets()), data_of(20, 20, 20)
    with pytest.raises(mf.InputError, match="Exploit compares 'val_loss', which this fit will not record"):
        fit(fleet, data, mf.Exploit())
    with pytest.raises(mf.InputError, match="Exploit compares 'accuracy', which this fit will not record"):
        fit(fleet, data, mf.Exploit("accuracy"), epochs=2)


def test_a_hyperparameter_that_was_compiled_as_zero_can_not_grow() -> None:
    exploit = mf.Exploit("loss", perturb={"weight_decay": lambda value, draw: 0.1})
    with pytest.raises(mf.InputError, match=r"weight_decay of member '.' would become 0.1, but was compiled as 0"):
        fit(fleet_of(nets()), data_of(20, 20, 20), exploit, epochs=2)


def test_distill_needs_a_loss_and_outputs_of_one_shape() -> None:
    def objective(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(mf.InputError, match="'a' was compiled without a loss"):
        fit(fleet_of(nets(), loss=None, objective=objective), rows(20), mf.Distill())
    unlike = fleet_of([net(), net(), nn.Linear(4, 5).double()])
    with pytest.raises(
        mf.InputError, match=r"outputs of member 'c' are \(5,\) for a row, and those of 'a' are \(3,\)"
    ):
        fit(unlike, rows(20), mf.Distill())
    x, y = rows(20)
    binary = fleet_of([nn.Sequential(net(), nn.Sigmoid()) for _ in range(3)], loss="bce")
    with pytest.raises(mf.InputError, match="the outputs of member 'a' are probabilities \\(loss \"bce\"\\)"):
        fit(binary, (x, nn.functional.one_hot(y, 3).double()), mf.Distill())
