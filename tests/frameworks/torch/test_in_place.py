"""Memory that traced graphs reuse when they run uncompiled: the numbers stay the same, bit for bit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import modelfleet as mf
from modelfleet.frameworks.torch.tracing.in_place import IN_PLACE, in_place
from modelfleet.frameworks.torch.tracing.simplify import simplify

aten = torch.ops.aten
Step = Callable[..., object]


def traced(step: Step, *inputs: Tensor) -> fx.GraphModule:
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    simplify(graph)
    return graph


def run(graph: Callable[..., object], *inputs: Tensor) -> list[Tensor]:
    own = [tensor.clone() for tensor in inputs]
    results = graph(*own)
    return [*(results if isinstance(results, list | tuple) else [results]), *own]


def reuses(graph: fx.GraphModule) -> int:
    return sum(node.target in IN_PLACE.values() for node in graph.graph.nodes)


def chain(x: Tensor, y: Tensor) -> object:
    return ((x * y + 1.0).sqrt() / 2.0).tanh()


def returned(x: Tensor, y: Tensor) -> object:
    product = x * y
    return product, product + 1.0


def read_again(x: Tensor, y: Tensor) -> object:
    product = x * y
    later = product + y
    return later * product


def seen_through_a_view(x: Tensor, y: Tensor) -> object:
    product = x * y
    turned = product.transpose(0, 1)
    later = product + y
    return later.transpose(0, 1) * turned


def seen_through_a_reshape(x: Tensor, y: Tensor) -> object:
    product = x * y
    flat = product.reshape(-1)
    later = product.exp()
    return later.sum() + flat


def mixed_with_its_own_transpose(x: Tensor, y: Tensor) -> object:
    product = x * y
    return product + product.transpose(0, 1)


def squared(x: Tensor, y: Tensor) -> object:
    total = x + y
    return total * total


def broadcast(x: Tensor, y: Tensor) -> object:
    return (x.sum(0, keepdim=True) * 2.0) * y


def promoted(x: Tensor, y: Tensor) -> object:
    return (x.half() * 2.0) * y.double()


def of_an_argument(x: Tensor, y: Tensor) -> object:
    return x.sqrt() + y.abs()


def masked(x: Tensor, y: Tensor) -> object:
    x.copy_(torch.where(y > 0.5, x * 2.0, x))
    y.copy_(torch.where(x > 0.5, y, x))  # keeps another tensor than it writes to
    return x + y


def masked_and_read_between(x: Tensor, y: Tensor) -> object:
    chosen = torch.where(y > 0.5, y * 3.0, x)
    before = x * 2.0
    x.copy_(chosen)
    return before


def times_one_and_written(x: Tensor, y: Tensor) -> object:
    copied = aten.mul.Scalar(x, 1)
    copied.add_(y)
    return copied, aten.mul.Scalar(y > 0.5, 1)


STEPS = (
    times_one_and_written,
    chain,
    returned,
    read_again,
    seen_through_a_view,
    seen_through_a_reshape,
    mixed_with_its_own_transpose,
    squared,
    broadcast,
    promoted,
    of_an_argument,
    masked,
    masked_and_read_between,
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_graph_that_reuses_memory_gives_the_same_bits(step: Step) -> None:
    torch.manual_seed(0)
    inputs = torch.rand(4, 4), torch.rand(4, 4)
    graph = traced(step, *inputs)
    again = in_place(graph)
    for _ in range(2):  # nothing of the first run is left in the second
        for expected, found in zip(run(step, *inputs), run(again, *inputs), strict=True):
            assert torch.equal(expected, found)
    for expected, found in zip(run(step, *inputs), run(graph, *inputs), strict=True):
        assert torch.equal(expected, found)  # the graph itself is for the compiler, and stays as it was


def test_memory_is_reused_where_nothing_needs_it_afterwards() -> None:
    inputs = torch.rand(4, 4), torch.rand(4, 4)
    assert reuses(in_place(traced(chain, *inputs))) == 4
    assert reuses(in_place(traced(squared, *inputs))) == 1
    for step in (returned, read_again, seen_through_a_view, mixed_with_its_own_transpose):
        graph = in_place(traced(step, *inputs))
        first = next(node for node in graph.graph.nodes if node.op == "call_function")
        assert not any(user.target in IN_PLACE.values() for user in first.users if user.args[0] is first), step


def test_a_masked_update_is_written_at_once() -> None:
    inputs = torch.rand(4, 4), torch.rand(4, 4)
    targets = [node.target for node in in_place(traced(masked, *inputs)).graph.nodes]
    assert targets.count(aten.where.self_out) == 1
    assert targets.count(aten.copy_.default) == 1


def test_operations_without_effect_are_removed() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        same = x.expand(4, 4).reshape(4, 4).transpose(0, 1).transpose(1, 0)
        return aten.mul.Scalar(same, 1) @ y

    graph = traced(step, torch.rand(4, 4), torch.rand(4, 4))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [aten.mm.default]


def test_traced_graphs_leave_nothing_in_torchs_cache_of_sources() -> None:
    known = set(fx.graph_module._loader.eval_cache)
    x = np.random.default_rng(0).standard_normal((8, 3))
    fleet = mf.Fleet.build(lambda: nn.Linear(3, 1), 2)
    fleet.compile("sgd", "mse", lr=0.1)
    fleet.fit((x, x[:, :1]), batch_size=4, strategy="fused", progress=False)
    fleet.predict(x)
    assert set(fx.graph_module._loader.eval_cache) == known


def moving_average(x: Tensor, y: Tensor) -> object:
    x.copy_((x * 0.5).add(y))
    return x.sum()


def old_values_needed(x: Tensor, y: Tensor) -> object:
    new = x * 0.5 + y
    difference = x - new
    x.copy_(new)
    return difference


def old_values_needed_through_a_view(x: Tensor, y: Tensor) -> object:
    turned = x.transpose(0, 1)
    x.copy_(x * 0.5 + y)
    return turned * 2.0, (turned + y).sum()


def old_view_read_between(x: Tensor, y: Tensor) -> object:
    turned = x.transpose(0, 1)
    new = x * 0.5
    both = turned + new
    x.copy_(new)
    return both


@pytest.mark.parametrize(
    ("step", "copies"),
    [
        (moving_average, 0),
        (old_values_needed, 1),
        (old_values_needed_through_a_view, 1),
        (old_view_read_between, 1),
    ],
)
def test_a_new_state_is_computed_in_the_old_one_if_nobody_needs_that(step: Step, copies: int) -> None:
    inputs = torch.randn(3, 3), torch.randn(3, 3)
    graph = traced(step, *inputs)
    reusing = in_place(graph)
    assert sum(node.target is aten.copy_.default for node in reusing.graph.nodes) == copies
    for mine, theirs in zip(run(reusing, *inputs), run(graph, *inputs), strict=True):
        assert torch.equal(mine, theirs)


def test_a_batched_product_adds_its_bias() -> None:
    shapes = (2, 3, 4), (2, 4, 5), (2, 1, 5)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    graph = traced(lambda x, y, bias: bias + torch.bmm(x, y), *inputs)
    reusing = in_place(graph)
    targets = [node.target for node in reusing.graph.nodes]
    assert aten.baddbmm.default in targets
    assert aten.bmm.default not in targets
    torch.testing.assert_close(run(reusing, *inputs), run(graph, *inputs), rtol=0, atol=1e-14)
