"""A chain on a Ray cluster: two real nodes, with a stage each."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.clusters import two_nodes
from tests.helpers import toy
from torch import nn

import modelfleet as mf

pytest.importorskip("ray")
# Ray leaves files and sockets to the collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

X, Y = toy(40)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def trained(devices: str) -> tuple[list[float], np.ndarray]:
    """The losses of a chain, and what it predicts then."""
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(X.shape[1], 16), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(16, int(Y.max()) + 1),
    ]
    chain = mf.Chain(stages, devices=devices)
    chain.compile("adam", "cross_entropy", lr=0.01)
    history = chain.fit((X, Y), epochs=2, batch_size=16, micro_batches=4, progress=False)
    return history["chain"]["loss"], chain.predict(X)


def test_stages_on_two_nodes_learn_what_they_learn_here(cluster: Any) -> None:
    losses, outputs = trained("ray:0,ray:1")
    expected, expected_outputs = trained("cpu")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
