"""Narrow products and softmaxes, which uncompiled graphs compute the other way round."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from modelfleet.frameworks.torch.tracing.in_place import in_place
from modelfleet.frameworks.torch.tracing.simplify import simplify

aten = torch.ops.aten
MEMBERS, ROWS, INNER = 3, 20, 8


def traced(step: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    simplify(graph)
    return graph


def shapes(graph: fx.GraphModule, target: object) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.target is target]


def inputs(columns: int, rows: int = ROWS) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((MEMBERS, rows, INNER), (MEMBERS, INNER, columns), (MEMBERS, 1, columns))
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def classify(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    output = torch.bmm(x, weight) + bias
    log = torch.log_softmax(output, -1)
    chosen = log.gather(2, torch.zeros_like(log[..., :1], dtype=torch.int64)).squeeze(2)
    gradient = aten._log_softmax_backward_data(torch.ones_like(log), log, 2, log.dtype)
    return chosen, torch.bmm(x.mT, gradient), torch.bmm(gradient, weight.mT), gradient.reshape(MEMBERS, -1)


def attend(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    scores = torch.softmax(torch.bmm(x, weight) + bias, 2)
    return scores, aten._softmax_backward_data(scores.cos(), scores, -1, scores.dtype)


@pytest.mark.parametrize("step", [classify, attend])
@pytest.mark.parametrize("columns", [1, 10, 15, 16, 30])
@pytest.mark.parametrize("rows", [4, ROWS])
def test_the_numbers_stay(step: Callable[..., object], columns: int, rows: int) -> None:
    given = inputs(columns, rows)
    graph = traced(step, *given)
    for found, wanted in zip(in_place(graph)(*given), graph(*given), strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_narrow_results_are_computed_with_rows_side_by_side() -> None:
    graph = in_place(traced(classify, *inputs(10)))
    assert shapes(graph, aten.baddbmm.default) == [(MEMBERS, 10, ROWS)]
    assert shapes(graph, aten._log_softmax.default) == [(MEMBERS, 10, ROWS)]
    assert shapes(graph, aten._log_softmax_backward_data.default) == [(MEMBERS, 10, ROWS)]


def test_wide_results_stay_as_they_are() -> None:
    graph = in_place(traced(classify, *inputs(16)))
    assert shapes(graph, aten.baddbmm.default) == [(MEMBERS, ROWS, 16)]
    assert shapes(graph, aten._log_softmax.default) == [(MEMBERS, ROWS, 16)]


def test_a_softmax_over_rows_stays_as_it_is() -> None:
    def over_rows(x: Tensor) -> Tensor:
        return F.softmax(x, 1)

    x = torch.randn(MEMBERS, ROWS, 10)
    graph = in_place(traced(over_rows, x))
    assert shapes(graph, aten._softmax.default) == [(MEMBERS, ROWS, 10)]
    assert torch.equal(graph(x), F.softmax(x, 1))


def test_a_result_that_is_written_to_through_a_view_keeps_its_layout() -> None:
    def write(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = torch.bmm(x, weight)
        product.view(-1)[::2].mul_(2.0)
        return product + bias

    given = inputs(10)
    graph = traced(write, *given)
    torch.testing.assert_close(in_place(graph)(*given), write(*given))


def best_class(scores: Tensor) -> tuple[Tensor, Tensor]:
    return scores.argmax(2), scores.argmax(-1, keepdim=True)


def test_the_best_of_few_classes_is_that_of_argmax() -> None:
    nan, inf = math.nan, math.inf
    unusual = [
        [1, nan, nan],
        [nan, 2, 3],
        [2, 2, 1],
        [1, 2, 2],
        [-inf, -inf, -inf],
        [0.0, -0.0, 0.0],
        [inf, nan, inf],
    ]
    scores = torch.tensor(unusual * 3).repeat(MEMBERS, 1, 1)
    for given in (scores, scores.mT.contiguous().mT):
        graph = in_place(traced(best_class, given))
        assert shapes(graph, aten.argmax.default) == []
        for found, wanted in zip(graph(given), best_class(given), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def test_an_argmax_over_many_numbers_or_another_axis_stays() -> None:
    scores = torch.randn(MEMBERS, ROWS, 10)
    for step, given in (
        (lambda x: x.argmax(2), torch.randn(MEMBERS, ROWS, 16)),
        (lambda x: x.argmax(1), scores),
        (lambda x: x.argmax(), scores),
    ):
        graph = in_place(traced(step, given))
        assert len(shapes(graph, aten.argmax.default)) == 1
        assert torch.equal(graph(given), step(given))


def attend_by_kernel(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    query = (torch.bmm(x, weight) + bias).tanh().unsqueeze(1)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)[0]


def by_strides(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    output = (torch.bmm(x, weight) + bias).tanh()
    return output.as_strided((MEMBERS, 2), (output.stride(0), 1))


@pytest.mark.parametrize("step", [attend_by_kernel, by_strides])
def test_what_is_read_by_its_strides_is_not_turned(step: Callable[..., object]) -> None:
    given = inputs(10)
    graph = in_place(traced(step, *given))
    torch.testing.assert_close(graph(*given), step(*given), rtol=1e-12, atol=1e-12)
