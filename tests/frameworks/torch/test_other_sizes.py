"""Batches of many sizes: programs that follow from those of a few sizes compute what the model computes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.tracing.other_sizes import OtherGraphError, differing_sizes, predicted

LENGTHS = [4, 6, 10, 7, 8]
MEMBERS = 2


class Net(nn.Module):
    """A network over batches `(row, step, 3)`."""

    def __init__(self, parts: dict[str, nn.Module], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part.double())
        self.last = nn.Linear(4, 3).double()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, x))


def _gru() -> nn.Module:
    return Net({"gru": nn.GRU(3, 4, batch_first=True)}, lambda net, x: net.gru(x)[0][:, -1])


def _lstm() -> nn.Module:
    layer = nn.LSTM(3, 2, 2, dropout=0.3, bidirectional=True, batch_first=True)
    return Net({"lstm": layer}, lambda net, x: net.lstm(x)[0].mean(1))


def _transformer() -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x) + net.position.weight[: x.shape[1]]
        return net.layer(x).mean(1)

    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True)
    return Net({"first": nn.Linear(3, 4), "position": nn.Embedding(16, 4), "layer": layer}, run)


def _convolution() -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return F.dropout(net.norm(net.first(x.transpose(1, 2))).relu(), 0.2, net.training).amax(-1)

    return Net({"first": nn.Conv1d(3, 4, 3, padding=1), "norm": nn.BatchNorm1d(4)}, run)


EVEN = {"gru": _gru, "lstm": _lstm, "transformer": _transformer, "convolution": _convolution}


def _square() -> nn.Module:
    """A mean over all pairs of steps: its gradient is divided by the square of the length."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.second(torch.tanh(x @ x.transpose(1, 2)).mean((1, 2)).unsqueeze(-1))

    return Net({"first": nn.Linear(3, 4), "second": nn.Linear(1, 4)}, run)


def _root() -> nn.Module:
    return Net({"first": nn.Linear(3, 4)}, lambda net, x: net.first(x).sum(1) / x.shape[1] ** 0.5)


def _branch() -> nn.Module:
    """What the Python does shows only in a number, at a length that is not among the first ones."""

    def run(net: Any, x: Tensor) -> Tensor:
        return net.first(x).mean(1) * (3.0 if x.shape[1] == 8 else 2.0)

    return Net({"first": nn.Linear(3, 4)}, run)


def _halves() -> nn.Module:
    return Net({"first": nn.Linear(3, 4)}, lambda net, x: net.first(x)[:, : x.shape[1] // 2].mean(1))


def _table() -> nn.Module:
    """A constant of another library, for each length."""

    def run(net: Any, x: Tensor) -> Tensor:
        waves = torch.from_numpy(np.sin(np.arange(x.shape[1]) * 12.0 / x.shape[1]))
        return (net.first(x) * waves[:, None]).mean(1)

    return Net({"first": nn.Linear(3, 4)}, run)


class _Scale(torch.autograd.Function):
    """What its backward pass does at a length shows in no call."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = 2.0 if inputs[0].shape[1] == 8 else 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.factor

    generate_vmap_rule = True


def _own_function() -> nn.Module:
    return Net({"first": nn.Linear(3, 4)}, lambda net, x: _Scale.apply(net.first(x)).mean(1))


def _hook() -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (2.0 if grad.shape[-2] == 8 else 1.0))
        return x.mean(1)

    return Net({"first": nn.Linear(3, 4)}, run)


UNEVEN = {
    "square": _square,
    "root": _root,
    "branch": _branch,
    "halves": _halves,
    "table": _table,
    "own function": _own_function,
    "hook": _hook,
}


def _batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(5, length, 3, dtype=torch.float64, generator=random),
            torch.randint(0, 3, (5,), generator=random),
        )
        for length in LENGTHS
    ]


def _trained(make: Callable[[], nn.Module], strategy: Any) -> tuple[dict[str, Tensor], int]:
    fleet = mf.Fleet.build(make, MEMBERS, seed=0)
    fleet.compile("adam", "cross_entropy", lr=0.01, clip_norm=1.0)
    fleet.fit(_batches(), validation=_batches(), epochs=1, strategy=strategy, progress=False)
    found = {f"{name} {key}": value for name in fleet.names for key, value in fleet[name].state_dict().items()}
    engine: Any = fleet._live_lanes.lanes[0].engine
    traces = engine.programs.traces if strategy == "fused" else 0
    return found, traces


def _assert_as_alone(make: Callable[[], nn.Module]) -> int:
    (found, traces), (expected, _) = _trained(make, "fused"), _trained(make, "interleaved")
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10, msg=key)
    return traces


@pytest.mark.parametrize("kind", EVEN)
def test_after_a_few_sizes_nothing_is_traced(kind: str) -> None:
    # Train and evaluate programs of three sizes, and the update. The numbers of attention's dropout grow with the
    # square, which takes one more train program.
    assert _assert_as_alone(EVEN[kind]) == (8 if kind == "transformer" else 7)


@pytest.mark.parametrize("kind", UNEVEN)
def test_what_does_not_grow_evenly_is_traced(kind: str) -> None:
    _assert_as_alone(UNEVEN[kind])


def test_a_program_that_follows_is_forgotten_with_what_the_python_reads() -> None:
    fleet = mf.Fleet.build(_gru, MEMBERS, seed=0)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fleet.fit(_batches(), strategy="fused", progress=False)
    alone = mf.Fleet.build(_gru, MEMBERS, seed=0)
    alone.compile("sgd", "cross_entropy", lr=0.1)
    alone.fit(_batches(), strategy="interleaved", progress=False)

    def last(net: Any, x: Tensor) -> Tensor:
        return net.gru(x)[0].sum(1)

    for own, strategy in ((fleet, "fused"), (alone, "interleaved")):
        for name in own.names:
            own[name].run = last
        own.fit(_batches(), strategy=strategy, progress=False)  # pyrefly: ignore[bad-argument-type]
    for name in fleet.names:
        for key, value in alone[name].state_dict().items():
            torch.testing.assert_close(fleet[name].state_dict()[key], value, rtol=1e-9, atol=1e-10)


def test_sizes_and_numbers_that_grow_evenly() -> None:
    forms = [((5, size, 3), (5,)) for size in (4, 6, 10, 8)]
    assert differing_sizes(forms) == (4, 6, 10, 8)
    assert differing_sizes([*forms[:3], ((6, 8, 3), (6,))]) is None
    assert differing_sizes([*forms[:3], ((5, 1, 3), (5,))]) is None
    assert predicted((9, 13, 21), (4, 6, 10, 8)) == 17
    assert predicted((16, 36, 100, 49), (4, 6, 10, 7, 8)) == 64
    for values, sizes in (
        ((16, 36, 100), (4, 6, 10, 8)),
        ((64, 216, 1000, 343), (4, 6, 10, 7, 8)),
        ((2, 3, 5), (4, 6, 10, 7)),
        ((1, 3, 7), (4, 6, 10, 8)),
    ):
        with pytest.raises(OtherGraphError):
            predicted(values, sizes)
    with pytest.raises(OtherGraphError):
        predicted((9, 13, 21), (4, 6, 10, 8), 18)
