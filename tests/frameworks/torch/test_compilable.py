"""Which part of a program a compiler can make quicker, as measured by running it operation by operation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.frameworks.torch.compiling import compilable


def graph_of(step: Callable[..., Tensor], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(step, tracing_mode="fake")(*inputs)


def seconds(monkeypatch: pytest.MonkeyPatch, graph: fx.GraphModule, *inputs: Tensor) -> float:
    """The result, on a clock that advances by one second whenever it is read."""
    clock = iter(range(1000))
    monkeypatch.setattr(compilable.time, "perf_counter", lambda: float(next(clock)))
    return compilable.compilable_seconds(graph, inputs)


def test_products_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3, 3)
    assert seconds(monkeypatch, graph_of(lambda x: torch.bmm(x, x), x), x) == 0.0
    assert seconds(monkeypatch, graph_of(lambda x: torch.bmm(x, x).relu().exp(), x), x) == 2.0


def test_draws_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.ones(1, 1, dtype=torch.int32)
    step = graph_of(lambda w: torch.ops.modelfleet.words.default(w, w, w, w), words)
    assert seconds(monkeypatch, step, words) == 0.0
