"""Lean graphs give what the graphs they were made from give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.frameworks.torch.tracing.simplify import simplify


def traced(step: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(step, tracing_mode="fake")(*inputs)


def operations(graph: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


def repeated(x: Tensor) -> Tensor:
    return sum(((x + torch.tensor(0.5)) ** 2 for _ in range(3)), start=x)


def written_between(x: Tensor) -> Tensor:
    before = x.exp()
    x.copy_(x * 2)
    return before + x.exp()


def written_copies(x: Tensor) -> Tensor:
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    first.add_(x).mul_(3)
    return torch.cat([first, second])


def written_constants(x: Tensor) -> Tensor:
    return torch.stack([torch.tensor(0.5).add_(x.sum()), torch.tensor(0.5)])


def written_views(x: Tensor) -> Tensor:
    first, second = x * 2, x * 2
    first[0] = 5.0
    return first + second


def statistics(x: Tensor) -> Tensor:
    mean, variance = torch.zeros(3), torch.zeros(3)
    result = nn.functional.batch_norm(x.view(2, 3), mean, variance, training=True)
    return torch.cat([result, torch.stack([mean, variance])])


def kinds(x: Tensor) -> Tensor:
    return torch.stack([(x.long() * 1).float(), x.long() * 1.0, (x.long() * True).float()])


STEPS = [repeated, written_between, written_copies, written_constants, written_views, statistics, kinds]


@pytest.mark.parametrize("step", STEPS)
def test_a_lean_graph_gives_the_same(step: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6)
    before = operations(graph := traced(step, x))
    simplify(graph)
    given, expected = x.clone(), x.clone()
    assert torch.equal(graph(given), step(expected))
    assert torch.equal(given, expected)  # what is written to an input, too
    assert operations(graph) <= before


def test_what_is_asked_for_again_is_computed_once() -> None:
    graph = traced(repeated, torch.randn(6))
    simplify(graph)
    assert operations(graph) == 5  # one sum, one square, three additions


def test_random_numbers_are_drawn_anew() -> None:
    graph = traced(lambda x: torch.rand_like(x) - torch.rand_like(x), torch.randn(6))
    simplify(graph)
    assert graph(torch.randn(6)).abs().max() > 0
