"""Recurrences as operations: equal to torch's own layers, with all derivatives, and one node for any length."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import modelfleet as mf
from modelfleet.frameworks.torch.compiling.decision import MAX_NODES, too_large
from modelfleet.frameworks.torch.fused.runner import ShapeTimes
from modelfleet.frameworks.torch.tracing.recurrent import RECURRENT_RULES
from modelfleet.frameworks.torch.tracing.scans import DECOMPOSITIONS, count_operations

Kind = type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]
KINDS: list[tuple[Kind, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.GRU, {}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu"}),
]
FORMS: list[dict[str, Any]] = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
X = torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layer_of(kind: Kind, options: dict[str, Any]) -> nn.RNNBase:
    torch.manual_seed(1)
    return kind(3, 6, **options).double()


def by_rules(layer: nn.RNNBase, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The outputs and the last states of a layer, flat, by its rule."""
    plain = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}[
        layer.mode
    ]
    rows = x.shape[0 if layer.batch_first else 1]
    zeros = torch.zeros(layer.num_layers * (1 + layer.bidirectional), rows, 6, dtype=x.dtype)
    state = (zeros, zeros) if layer.mode == "LSTM" else zeros
    options = layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first
    return torch.cat([found.flatten() for found in RECURRENT_RULES[plain](x, state, weights, *options)])


def by_torch(layer: nn.RNNBase, x: Tensor) -> Tensor:
    output, state = layer(x)
    states = state if isinstance(state, tuple) else (state,)
    return torch.cat([output.flatten(), *(one.flatten() for one in states)])


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize(("kind", "own"), KINDS, ids=str)
def test_outputs_and_gradients_are_torch_s_own(kind: Kind, own: dict[str, Any], options: dict[str, Any]) -> None:
    layer = layer_of(kind, {**own, **options})
    weights = list(layer.parameters())
    x = X.clone().requires_grad_()
    expected, found = by_torch(layer, x), by_rules(layer, x, weights)
    factors = torch.linspace(-1, 1, len(expected), dtype=x.dtype)  # every output has a gradient of its own
    wanted = torch.autograd.grad((expected * factors).sum(), [x, *weights])
    given = torch.autograd.grad((found * factors).sum(), [x, *weights])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(given, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "own"), KINDS[:3], ids=str)
def test_second_derivatives_are_right(kind: Kind, own: dict[str, Any]) -> None:
    layer = layer_of(kind, own)
    weights = [weight.detach() for weight in layer.parameters()]
    x = X[:3, :1].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: by_rules(layer, x, weights).sin(), (x,))


@pytest.mark.parametrize(("kind", "own"), KINDS, ids=str)
def test_members_get_their_own_derivatives_under_vmap(kind: Kind, own: dict[str, Any]) -> None:
    layers = [layer_of(kind, own) for _ in range(3)]
    for number, layer in enumerate(layers):
        with torch.no_grad():
            for weight in layer.parameters():
                weight.mul_(1 + 0.1 * number)
    stacked = [torch.stack(own).detach() for own in zip(*(layer.parameters() for layer in layers), strict=True)]

    def penalty(weights: list[Tensor]) -> Tensor:
        slope = torch.func.grad(lambda x: by_rules(layers[0], x, weights).sin().sum())(X)
        return (slope**2).sum()

    found = torch.func.vmap(torch.func.grad(penalty))(stacked)
    for number, layer in enumerate(layers):
        x = X.clone().requires_grad_()
        outputs = by_rules(layer, x, list(layer.parameters()))
        (slope,) = torch.autograd.grad(outputs.sin().sum(), x, create_graph=True)
        expected = torch.autograd.grad((slope**2).sum(), list(layer.parameters()), allow_unused=True)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[number], torch.zeros_like(ours[number]) if theirs is None else theirs)


class Last(nn.Module):
    """A recurrent layer whose last output is classified."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.layer = kind(3, 6, num_layers=2, dropout=0.25, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def batches(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, length, 3, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))
        for length in lengths
    ]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_batches_of_several_lengths_are_trained_as_alone(kind: Kind) -> None:
    def build() -> nn.Module:
        return Last(kind).double()

    data = batches([3, 5, 7, 3, 5, 9])
    fleet = mf.Fleet.build(build, 3, seed=0)
    fleet.compile("adam", "cross_entropy", lr=1e-2)
    fleet.fit(data, strategy="fused", progress=False)
    alone = mf.Fleet.build(build, 3, seed=0)
    alone.compile("adam", "cross_entropy", lr=1e-2)
    alone.fit(data, strategy="interleaved", progress=False)
    for name in fleet:
        for ours, theirs in zip(fleet[name].parameters(), alone[name].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_graph_has_as_many_nodes_for_every_length() -> None:
    layer = layer_of(nn.GRU, {})
    weights = [weight.detach() for weight in layer.parameters()]

    def graph(length: int) -> torch.fx.GraphModule:
        return make_fx(lambda x: by_rules(layer, x, weights), tracing_mode="fake", _allow_non_fake_inputs=True)(
            torch.zeros(length, 4, 3, dtype=torch.float64)
        )

    short, long = graph(4), graph(40)
    assert len(short.graph.nodes) == len(long.graph.nodes)
    assert count_operations(long) > 5 * count_operations(short)  # what a compiler will see
    assert not too_large(count_operations(long))
    assert too_large(count_operations(graph(MAX_NODES)))


def test_recurrences_are_written_out_for_the_compiler() -> None:
    layer = layer_of(nn.LSTM, {})
    weights = [weight.detach() for weight in layer.parameters()]
    traced = make_fx(lambda x: by_rules(layer, x, weights), decomposition_table=DECOMPOSITIONS)(X)
    assert not [node for node in traced.graph.nodes if node.target in DECOMPOSITIONS]
    torch.testing.assert_close(traced(X), by_torch(layer, X), rtol=1e-12, atol=1e-12)


def test_a_shape_that_comes_rarely_is_not_traced_to_be_compiled() -> None:
    times = ShapeTimes()
    assert times.of("a", (1000, 9.0)) == (0, None)
    for number in range(10):
        times.add("ab"[number == 0], 0.5 if number else 3.0)
    assert times.of("a", (1000, 9.0)) == (900, 0.5)
    assert times.of("b", (1000, 9.0)) == (100, 3.0)
    assert times.of("b", (1000, None)) == (0, None)
