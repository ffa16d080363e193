"""What a graph can't do right is refused, and what a model raises late names the model."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.graph.comparing import TWO, chain_of, fit, rows
from torch import Tensor, nn

import modelfleet as mf


class Counting(nn.Module):
    """A layer with a buffer, which it may share with another one."""

    def __init__(self, width: int, outputs: int, seen: Tensor, *, counts: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(width, outputs, dtype=torch.float64)
        self.register_buffer("seen", seen)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.seen.add_(1)
        return self.layer(x) * 0.5


@pytest.mark.parametrize("counts", [True, False])
def test_a_buffer_of_two_nodes_may_be_read_but_not_changed(counts: bool) -> None:
    seen = torch.zeros(())
    models = [Counting(4, 6, seen, counts=False), Counting(6, 3, seen, counts=counts)]
    if not counts:
        fit(chain_of(models, TWO), rows(16), epochs=1)
        return
    with pytest.raises(
        mf.InputError, match="nodes '0' and '1' share the buffer 'seen', which the training changes"
    ):
        fit(chain_of(models, TWO), rows(16), epochs=1, micro_batches=1)


class Late(nn.Module):
    """A layer whose backward pass fails for large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y, large = self.layer(x), bool((x.abs() > 1e3).any())
        if y.requires_grad:
            y.register_hook(lambda gradient: _refuse() if large else gradient)
        return y


def _refuse() -> Tensor:
    raise ValueError("too large")


@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("strategy", ["threads", "processes"])
def test_an_error_of_a_backward_pass_names_the_node(strategy: str, pipeline: Any) -> None:
    x, y = rows(24)
    x[20] *= 1e6
    chain = chain_of([nn.Linear(4, 6, dtype=torch.float64), Late()], TWO)
    with pytest.raises(mf.InputError, match=r"member '1'.*the backward pass of Late.*too large at test_refusals"):
        fit(chain, (x, y), shuffle=False, strategy=strategy, pipeline=pipeline)


def test_an_error_of_a_loss_names_the_node() -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        return output["score"].mean()

    with pytest.raises(mf.InputError, match="member '2' can't take this batch"):
        fit(chain_of(loss=loss), rows(16))


class Returns(nn.Module):
    """A stage that returns something else than a tensor."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "node '0' returns None, but tensors go"), (np.zeros((40, 4)), "node '0' returns a ndarray, but")],
)
def test_a_stage_returns_tensors(value: Any, words: str) -> None:
    with pytest.raises(mf.InputError, match=words) as caught:
        fit(chain_of([Returns(value), nn.Linear(4, 3)], TWO), rows(16))
    assert "shapes fit" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_positions_of_arguments_have_no_gaps() -> None:
    nodes = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    with pytest.raises(mf.InputError, match="the edges into 'b' give its arguments 5, and none gives argument 0"):
        mf.Graph(nodes, [("a", "b.5")])


def test_an_example_has_rows() -> None:
    with pytest.raises(mf.InputError, match="the example has no rows"):
        mf.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, torch.zeros(0, 4))
