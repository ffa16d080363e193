"""An ensemble on a Ray cluster: the nodes combine their own members."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.clusters import two_nodes
from tests.helpers import mlp, toy

import modelfleet as mf

pytest.importorskip("ray")
# Ray leaves files and sockets to the collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

X, _ = toy(40)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with two_nodes():
        yield


def fleet_on(devices: str) -> mf.Fleet:
    """Two groups, so that each node has one."""
    torch.manual_seed(0)
    return mf.Fleet({"a": mlp(), "b": mlp(), "drop": mlp(7, 0.3)}, devices=devices)


@pytest.mark.parametrize("combine", ["mean", "median", "vote"])
def test_the_nodes_combine_their_members(combine: Any) -> None:
    one, two = fleet_on("cpu"), fleet_on("ray")
    expected = mf.Ensemble(one, combine).predict(X, std=True)
    for strategy in ("auto", "processes"):
        for ours, theirs in zip(
            mf.Ensemble(two, combine).predict(X, std=True, batch_size=16, strategy=strategy), expected, strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_quorum_of_actors() -> None:
    two = fleet_on("ray")
    torch.nn.init.constant_(next(two["b"].parameters()), float("nan"))
    found = mf.Ensemble(two).predict(X, quorum=2, strategy="processes")
    assert list(found.missing) == ["b"]
    expected = np.mean([own for name, own in two.predict(X).items() if name != "b"], axis=0)
    np.testing.assert_allclose(found.output, expected, atol=1e-6)
