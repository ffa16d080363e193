"""What depends on steady inputs alone is computed when they change. The numbers are those of the whole graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.frameworks.torch.tracing import steady
from modelfleet.frameworks.torch.tracing.simplify import simplify
from modelfleet.frameworks.torch.tracing.steady import SteadyGraph, split_steady, uncompiled

Step = Callable[[Tensor, Tensor], list[Tensor]]


def scaled(x: Tensor, rates: Tensor) -> list[Tensor]:
    scale = torch.where(rates == 1, 0.0, 1.0 / (1.0 - rates))
    return [x * scale.unsqueeze(1), x + torch.arange(3.0)]


def returned(x: Tensor, rates: Tensor) -> list[Tensor]:
    scale = rates * 2.0
    return [x * scale.unsqueeze(1), scale]


def written(x: Tensor, rates: Tensor) -> list[Tensor]:
    scale = rates * 2.0
    scale[0] = x.sum()
    return [x * scale.unsqueeze(1)]


def written_through_a_view(x: Tensor, rates: Tensor) -> list[Tensor]:
    scale = rates + 1.0
    scale.unsqueeze(1).copy_(x[:, :1])
    return [x * scale.unsqueeze(1)]


def not_steady(x: Tensor, rates: Tensor) -> list[Tensor]:
    return [x * rates.unsqueeze(1)]


def traced(step: Step) -> fx.GraphModule:
    graph = make_fx(step, tracing_mode="fake")(torch.rand(2, 3), torch.rand(2))
    simplify(graph)
    return graph


def parts(step: Step) -> tuple[list[str], list[str]] | None:
    """The names of the operations in both parts of a step."""
    graph = traced(step).graph
    found = split_steady(graph, [1])
    return None if found is None else (operations(found[0]), operations(graph))


def operations(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("step", [scaled, returned, written, written_through_a_view, not_steady])
def test_the_numbers_are_those_of_the_graph(step: Step) -> None:
    run, expected = uncompiled(traced(step), [1]), traced(step)
    rates = torch.rand(2)
    for _ in range(3):
        x = torch.rand(2, 3)
        for found, wanted in zip(run(x.clone(), rates), expected(x.clone(), rates.clone()), strict=True):
            assert torch.equal(found, wanted)


def test_small_operations_on_numbers_run_once() -> None:
    found = parts(scaled)
    assert found is not None
    once, every_time = found
    assert {"eq", "where", "arange"} <= set(once)
    assert every_time == ["mul", "add"] or every_time == ["mul_1", "add"]


@pytest.mark.parametrize("step", [written, written_through_a_view])
def test_what_is_written_to_is_computed_every_time(step: Step) -> None:
    found = parts(step)
    assert found is None or not {"mul", "add"} & set(found[0])


def test_a_result_that_is_returned_is_computed_every_time() -> None:
    found = parts(returned)
    assert found is None or "mul" not in found[0]


def test_another_tensor_or_another_number_is_noticed() -> None:
    run, x = uncompiled(traced(scaled), [1]), torch.rand(2, 3)
    rates = torch.tensor([0.5, 0.0])
    first = run(x, rates)[0]
    assert torch.equal(run(x, torch.tensor([0.0, 0.5]))[0], x * torch.tensor([[1.0], [2.0]]))
    assert torch.equal(run(x, rates)[0], first)
    rates[0] = 0.75
    assert torch.equal(run(x, rates)[0], x * torch.tensor([[4.0], [1.0]]))


def test_large_results_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "MAX_BYTES", 0)
    assert not isinstance(getattr(uncompiled(traced(scaled), [1]), "__self__", None), SteadyGraph)
