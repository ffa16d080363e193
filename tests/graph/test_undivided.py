"""Models that were split, hybrids and graphs equal the undivided model, in threads and in gloo processes."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph.comparing import (
    RECIPE,
    SEED,
    assert_as_undivided,
    assert_same_history,
    assert_same_weights,
    fit,
    rows,
    stages,
    undivided,
    weights,
)
from tests.graph.split_models import Encoder, ResNet, images, make_bert, sentences, words
from tests.graph.test_graphs import Join, Nodes, assert_as_by_hand, linear
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf

WAYS = ["threads", pytest.param("processes", marks=pytest.mark.slow)]
in_threads_and_processes = pytest.mark.parametrize("strategy", WAYS)


def resnet() -> nn.Module:
    """A ResNet whose norms see one row at a time, so that micro-batches change nothing."""
    model = ResNet()
    for block in model.blocks:
        block.norm = nn.GroupNorm(2, 8)
    return model


def without_labels(count: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in sentences(count).items() if name != "labels"}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "transformer": (lambda: Encoder(0.2), words, {"micro_batches": 4, "pipeline": "zero-bubble"}),
    "resnet": (resnet, lambda count: images(count).double(), {"micro_batches": 4}),
    "resnet with BatchNorm": (ResNet, lambda count: images(count).double(), {"micro_batches": 1}),
    "bert": (make_bert, without_labels, {"micro_batches": 4, "recompute": True}),
}


def few(x: Any) -> Any:
    return {name: own[:4] for name, own in x.items()} if isinstance(x, dict) else x[:4]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_was_split_trains_as_if_it_were_whole(name: str) -> None:
    make, inputs, options = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    x, y = inputs(40), torch.arange(40) % 3
    whole, cut = copy.deepcopy(model), mf.split(model, 2, few(x))
    wanted = undivided(whole, (x, y))
    start = weights(model)
    for strategy in ("threads", "processes"):  # a split takes longer than a fit
        model.load_state_dict(start)
        chain = mf.Chain(cut, devices="cpu:0,cpu:1", seed=SEED)
        chain.compile(**RECIPE)
        assert_same_history(fit(chain, (x, y), strategy=strategy, **options), wanted, 1e-10)
        assert_same_weights(weights(model), weights(whole))
        assert chain.last_plan is not None
        assert chain.last_plan.strategy == strategy


@in_threads_and_processes
def test_a_hybrid_with_unequal_rows(strategy: str) -> None:
    options = {"strategy": strategy, "micro_batches": 4}
    devices = [["cpu:0", "cpu:1"], ["cpu:2"], ["cpu:2"]]
    assert_as_undivided(stages(dropout=0.3), rows(), devices=devices, options=options)


@in_threads_and_processes
def test_float32(strategy: str) -> None:
    models = stages(dropout=0.3, dtype=torch.float32)
    assert_as_undivided(models, rows(dtype=torch.float32), devices="cpu:0,cpu:1", options={"strategy": strategy})


@in_threads_and_processes
def test_a_graph_with_a_detached_edge_fan_out_and_fan_in(strategy: str) -> None:
    torch.manual_seed(0)
    nodes: Nodes = {
        "first": linear(4, 4),
        "a": linear(4, 5),
        "b": nn.Sequential(linear(4, 5), nn.Tanh()),
        "join": Join(),
    }
    edges = [("first", "a"), mf.Edge("first", "b", detach=True), ("a", "join.left"), ("b", "join.right")]

    def step(n: Nodes, x: Tensor, y: Tensor) -> Tensor:
        h = n["first"](x)
        return F.cross_entropy(n["join"](n["a"](h), n["b"](h.detach())), y)

    devices = {"first": "cpu:0", "a": "cpu:0", "b": "cpu:1", "join": "cpu:1"}
    assert_as_by_hand(nodes, edges, *rows(), step, outputs="join", devices=devices, strategy=strategy)


class Lengths:
    """A loader whose batches have sentences of other lengths each time, and whose last batch is short."""

    def __iter__(self) -> Any:
        random = np.random.default_rng(0)
        for length, count in ((6, 8), (3, 8), (6, 8), (9, 5)):
            yield torch.from_numpy(random.integers(0, 17, (count, length))), torch.arange(count) % 3


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1))


@in_threads_and_processes
def test_shapes_that_change_from_batch_to_batch(strategy: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
    models = [model.double() for model in (nn.Embedding(17, 8), layer, Mean())]
    options = {"strategy": strategy, "micro_batches": 4}
    shared = {"batch_size": None, "epochs": 5}
    assert_as_undivided(models, Lengths(), devices="cpu:0,cpu:1", options=options, shared=shared)
