"""Members with different optimizers of which one is left: it goes on as it would alone."""

from itertools import permutations

import pytest
import torch
from tests.helpers import mlp, toy

import modelfleet as mf

X, Y = (torch.tensor(array) for array in toy(24))
DATA = X.double(), Y
OPTIMIZERS = ("adam", "sgd", "rmsprop", "adagrad", "lion", "nadam", "adadelta")


def weights_of(names: list[str], optimizers: list[str], epochs: list[int], data: object) -> list[torch.Tensor]:
    """Train a fleet, and return the weights of its last member."""
    fleet = mf.Fleet.build(lambda: mlp(5).double(), names, seed=3)
    fleet.compile(mf.each(optimizers), "cross_entropy", lr=0.01)
    history = fleet.fit(data, epochs=mf.each(epochs), batch_size=8, progress=False, strategy="fused")
    assert names[-1] not in history.failed, history.failed
    return [value.clone() for value in fleet[names[-1]].state_dict().values()]


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("first", "last"), list(permutations(OPTIMIZERS, 2)))
def test_the_last_member_of_a_lane_goes_on(first: str, last: str) -> None:
    found = weights_of(["a", "b"], [first, last], [1, 3], DATA)
    compare(found, weights_of(["b"], [last], [3], DATA))


def test_a_member_that_fails_leaves_the_only_one_with_another_optimizer_alone() -> None:
    bad = X.double().clone()
    bad[20, 1] = float("nan")
    data = mf.each([(bad, Y), DATA])
    found = weights_of(["a", "b"], ["adam", "sgd"], [3, 3], data)
    compare(found, weights_of(["b"], ["sgd"], [3], DATA))


def test_of_three_optimizers_two_are_left() -> None:
    found = weights_of(["a", "b", "c"], ["adam", "rmsprop", "sgd"], [1, 3, 3], DATA)
    compare(found, weights_of(["c"], ["sgd"], [3], DATA))
