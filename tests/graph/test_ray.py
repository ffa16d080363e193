"""A chain on a Ray cluster: two real nodes, with a stage each."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.clusters import two_nodes
from tests.graph.test_lost_ranks import Trap
from tests.helpers import toy
from torch import nn

import modelfleet as mf
from modelfleet.errors import RankLostError

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


def trained(devices: str) -> tuple[list[float], np.ndarray, mf.Chain]:
    """The losses of a chain, what it predicts then, and the chain."""
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(X.shape[1], 16), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(16, int(Y.max()) + 1),
    ]
    chain = mf.Chain(stages, devices=devices)
    chain.compile("adam", "cross_entropy", lr=0.01)
    history = chain.fit((X, Y), epochs=2, batch_size=16, micro_batches=4, progress=False)
    return history["chain"]["loss"], chain.predict(X), chain


def test_stages_on_two_nodes_learn_what_they_learn_here(cluster: Any) -> None:
    losses, outputs, chain = trained("ray:0,ray:1")
    expected, expected_outputs, _ = trained("cpu")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
    timeline = chain.last_plan.measured if chain.last_plan is not None else None
    assert timeline is not None
    ends = {event.rank: event.end for event in timeline.events if event.operation.node == "step"}
    assert ends[0] == pytest.approx(ends[1])  # by one clock
    assert timeline.peak_bytes is not None


def test_a_stage_whose_node_kills_it_is_named_and_a_checkpoint_goes_on(cluster: Any, tmp_path: Path) -> None:
    def chain_of(end: nn.Module, devices: str) -> mf.Chain:
        torch.manual_seed(0)
        stages = [nn.Linear(X.shape[1], 16), nn.Sequential(nn.Linear(16, int(Y.max()) + 1), end)]
        chain = mf.Chain(stages, devices=devices)
        chain.compile("adam", "cross_entropy", lr=0.01)
        return chain

    options: dict[str, Any] = {"epochs": 4, "batch_size": 8, "micro_batches": 2, "progress": False}
    checkpoint = mf.Checkpoint(tmp_path / "run", every_steps=1)
    with pytest.raises(
        RankLostError, match=r"'1' on ray:1 was lost.* Meanwhile rank 0 .*waited for .*(micro-batch|sum)"
    ):
        chain_of(Trap(10, int(signal.SIGKILL)), "ray:0,ray:1").fit((X, Y), callbacks=[checkpoint], **options)
    again, whole = chain_of(nn.Identity(), "cpu:0,cpu:1"), chain_of(nn.Identity(), "cpu:0,cpu:1")
    again.fit((X, Y), callbacks=[mf.Checkpoint(tmp_path / "run", every_steps=1)], **options)
    whole.fit((X, Y), **options)
    for name in whole.names:
        for one, other in zip(again[name].parameters(), whole[name].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
