"""Graphs with several parents, children, inputs, outputs and losses have the numbers of a loop written by hand."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph.comparing import SEED, THREE, TWO, assert_same_weights, fit, rows, weights
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf

WAYS: list[dict[str, Any]] = [
    {},
    {"pipeline": "gpipe", "recompute": True},
    {"pipeline": "zero-bubble", "micro_batches": 3},
    {"micro_batches": 1},
]
ways = pytest.mark.parametrize("options", WAYS, ids=lambda way: "-".join(map(str, way.values())) or "default")
Nodes = dict[str, nn.Module]
Step = Callable[[Nodes, Tensor, Any], Tensor]


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def by_hand(
    nodes: Nodes, x: Any, y: Any, loss: Step, *, steps: int = 20, clip: float | None = None
) -> list[float]:
    """Train by hand with SGD on the whole batch; return the losses."""
    params = [parameter for node in nodes.values() for parameter in node.parameters()]
    optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss(nodes, x, y)
        found.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        losses.append(found.item())
    return losses


def assert_as_by_hand(
    nodes: Nodes,
    edges: list[Any],
    x: Any,
    y: Any,
    step: Step,
    *,
    outputs: Any = None,
    loss: Any = "cross_entropy",
    devices: Any = TWO,
    clip: float | None = None,
    weights_of_rows: Tensor | None = None,
    **options: Any,
) -> mf.Graph:
    """Train a graph, and the same models by hand on whole batches. Losses and weights are the same."""
    copies = copy.deepcopy(nodes)
    wanted = by_hand(copies, x, y, step, clip=clip)
    graph = mf.Graph(nodes, edges, outputs=outputs, devices=devices, seed=SEED)
    graph.compile("sgd", loss, lr=0.1, momentum=0.9, clip_norm=clip)
    data = (x, y) if weights_of_rows is None else (x, y, weights_of_rows)
    history = fit(graph, data, epochs=20, batch_size=40, shuffle=False, **options)
    assert history["graph"]["loss"] == pytest.approx(wanted, rel=1e-10)
    assert_same_weights(weights(graph), {f"{n}.{k}": v for n, m in copies.items() for k, v in weights(m).items()})
    return graph


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(10, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(torch.cat([left, 2 * right], 1))


class Parts(nn.Module):
    """Returns a dict of a dict, and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(4, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.linear(x))
        return {"features": h, "more": (h.square(), h.exp()), "unused": h.sum(1)}


@ways
def test_several_parents_with_named_arguments(options: dict) -> None:
    torch.manual_seed(0)
    nodes = {"a": linear(4, 5), "b": nn.Sequential(linear(4, 5), nn.Tanh()), "join": Join()}
    edges = [("b", "join.right"), ("a", "join.left")]
    assert_as_by_hand(
        nodes, edges, *rows(), lambda n, x, y: F.cross_entropy(n["join"](n["a"](x), n["b"](x)), y), **options
    )


@ways
def test_several_parents_by_position(options: dict) -> None:
    torch.manual_seed(0)
    nodes = {"a": linear(4, 5), "b": nn.Sequential(linear(4, 5), nn.Tanh()), "join": Join()}
    edges = [("b", "join.1"), ("a", "join.0")]
    assert_as_by_hand(
        nodes, edges, *rows(), lambda n, x, y: F.cross_entropy(n["join"](n["a"](x), n["b"](x)), y), **options
    )


@ways
def test_parts_of_outputs_go_over_edges_of_their_own(options: dict) -> None:
    torch.manual_seed(0)
    nodes = {"parts": Parts(), "middle": linear(5, 5), "join": Join()}
    edges = [("parts.features", "middle"), ("parts.features", "join.left"), ("middle", "join.right")]

    def step(n: Nodes, x: Tensor, y: Tensor) -> Tensor:
        h = n["parts"](x)["features"]
        return F.cross_entropy(n["join"](h, n["middle"](h)), y)

    assert_as_by_hand(nodes, edges, *rows(), step, devices=THREE, **options)


@ways
def test_a_part_may_be_a_tuple_that_becomes_arguments(options: dict) -> None:
    torch.manual_seed(0)
    nodes: Nodes = {"parts": Parts(), "join": Join()}
    edges = [("parts.more", "join")]
    assert_as_by_hand(
        nodes, edges, *rows(), lambda n, x, y: F.cross_entropy(n["join"](*n["parts"](x)["more"]), y), **options
    )


class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(3.0).clamp_(-1, 1))


@ways
@pytest.mark.parametrize("devices", ["cpu:0", TWO, THREE])
def test_a_child_that_writes_into_what_others_read(options: dict, devices: object) -> None:
    torch.manual_seed(0)
    nodes = {"trunk": linear(4, 5), "writer": WritesInPlace(), "join": Join()}
    edges = [("trunk", "writer"), ("writer", "join.right"), ("trunk", "join.left")]

    def step(n: Nodes, x: Tensor, y: Tensor) -> Tensor:
        h = n["trunk"](x)
        return F.cross_entropy(n["join"](h, n["writer"](h.clone())), y)

    assert_as_by_hand(nodes, edges, *rows(), step, devices=devices, **options)


@ways
def test_detached_edges_carry_no_gradient(options: dict) -> None:
    torch.manual_seed(0)
    nodes = {"trunk": linear(4, 5), "probe": linear(5, 3), "head": linear(5, 3)}
    edges = [mf.Edge("trunk", "probe", detach=True), ("trunk", "head")]

    def step(n: Nodes, x: Tensor, y: Any) -> Tensor:
        h = n["trunk"](x)
        return F.cross_entropy(n["probe"](h.detach()), y["probe"]) + F.cross_entropy(n["head"](h), y["head"])

    x, y = rows()
    assert_as_by_hand(nodes, edges, x, {"probe": y, "head": y}, step, outputs=["probe", "head"], **options)


@ways
@pytest.mark.parametrize("clip", [None, 0.1])
def test_several_losses_are_divided_each_by_its_own_count(options: dict, clip: float | None) -> None:
    torch.manual_seed(0)
    nodes = {
        "trunk": nn.Sequential(linear(4, 5), nn.Tanh()),
        "kind": linear(5, 3),
        "size": linear(5, 2),
        "odd": linear(5, 3),
    }
    edges = [("trunk", "kind"), ("trunk", "size"), ("trunk", "odd")]
    class_weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    x, classes = rows()
    y = {"kind": classes, "size": x[:, :2].clone(), "odd": torch.where(torch.arange(40) < 25, -100, classes)}

    def step(n: Nodes, x: Tensor, y: Any) -> Tensor:
        h = n["trunk"](x)
        kind = F.cross_entropy(n["kind"](h), y["kind"], class_weights)
        return kind + F.mse_loss(n["size"](h), y["size"]) + F.cross_entropy(n["odd"](h), y["odd"])

    loss = {
        "kind": nn.CrossEntropyLoss(class_weights),
        "size": "mse",
        "odd": nn.CrossEntropyLoss(ignore_index=-100),
    }
    devices = {"trunk": ["cpu:0", "cpu:1"], "kind": "cpu:2", "size": "cpu:2", "odd": "cpu:1"}
    if options.get("micro_batches") == 1:
        devices["trunk"] = ["cpu:0"]
    assert_as_by_hand(nodes, edges, x, y, step, loss=loss, devices=devices, clip=clip, **options)


@ways
def test_an_inner_node_may_have_a_loss_too(options: dict) -> None:
    torch.manual_seed(0)
    nodes = {"trunk": linear(4, 3), "head": nn.Sequential(nn.Tanh(), linear(3, 3))}
    x, y = rows()

    def step(n: Nodes, x: Tensor, y: Any) -> Tensor:
        h = n["trunk"](x)
        return F.mse_loss(h, y["trunk"]) + F.cross_entropy(n["head"](h), y["head"])

    loss = {"trunk": "mse", "head": "cross_entropy"}
    assert_as_by_hand(nodes, [("trunk", "head")], x, {"trunk": x[:, :3], "head": y}, step, loss=loss, **options)


@ways
def test_sample_weights_with_several_losses(options: dict) -> None:
    torch.manual_seed(0)
    nodes = {"trunk": linear(4, 5), "a": linear(5, 3), "b": linear(5, 4)}
    x, classes = rows()
    given = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def step(n: Nodes, x: Tensor, y: Any) -> Tensor:
        h = n["trunk"](x)
        a = F.cross_entropy(n["a"](h), y["a"], reduction="none")
        b = F.mse_loss(n["b"](h), y["b"], reduction="none").mean(1)
        return ((a + b) * given).mean()

    loss = {"a": "cross_entropy", "b": "mse"}
    edges = [("trunk", "a"), ("trunk", "b")]
    y = {"a": classes, "b": x}
    assert_as_by_hand(nodes, edges, x, y, step, loss=loss, weights_of_rows=given, **options)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(3, 5, dtype=torch.float64)

    def forward(self, index: Tensor, scale: Tensor) -> Tensor:
        return self.inner(index) * scale[:, None]


@ways
def test_parts_of_the_data_go_to_the_nodes_that_name_them(options: dict) -> None:
    torch.manual_seed(0)
    nodes = {"numbers": linear(4, 5), "table": Table(), "join": Join()}
    edges = [
        ("input.x", "numbers"),
        ("input.kind", "table.index"),
        ("input.scale", "table.scale"),
        ("numbers", "join.left"),
        ("table", "join.right"),
    ]
    numbers, classes = rows()
    x = {"x": numbers, "kind": classes, "scale": numbers[:, 0].clone()}

    def step(n: Nodes, x: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(n["join"](n["numbers"](x["x"]), n["table"](x["kind"], x["scale"])), y)

    graph = assert_as_by_hand(nodes, edges, x, (classes + 1) % 3, step, **options)
    with torch.no_grad():
        wanted = nodes["join"](nodes["numbers"](x["x"]), nodes["table"](x["kind"], x["scale"]))
    torch.testing.assert_close(torch.from_numpy(graph.predict(x)), wanted)


class Meets(nn.Module):
    """A layer that goes on when its twin on another device has come as far. The plan's trial is not waited for."""

    barrier = threading.Barrier(2, timeout=60)

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.barrier.wait()
        return self.linear(x)


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "zero-bubble"])
def test_branches_on_devices_of_their_own_run_at_the_same_time(pipeline: Any) -> None:
    nodes = {"a": Meets(), "b": Meets(), "join": Join()}
    edges = [("a", "join.left"), ("b", "join.right")]
    graph = mf.Graph(nodes, edges, outputs="join", devices={"a": "cpu:0", "b": "cpu:1", "join": "cpu:0"})
    graph.compile("sgd", "cross_entropy", lr=0.1)
    fit(graph, rows(), epochs=1, micro_batches=4, pipeline=pipeline)
    assert graph.predict(rows()[0], micro_batches=4).shape == (40, 3)


def test_predict_returns_the_outputs_of_every_node_that_was_named() -> None:
    nodes = {"trunk": linear(4, 5), "a": linear(5, 3), "parts": Parts(), "b": linear(5, 2)}
    graph = mf.Graph(nodes, [("trunk", "a"), ("parts.features", "b")], outputs=["a", "b"], devices=THREE)
    x, _ = rows()
    found = graph.predict(x, batch_size=7)
    assert list(found) == ["a", "b"]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found["a"]), nodes["a"](nodes["trunk"](x)))
        torch.testing.assert_close(torch.from_numpy(found["b"]), nodes["b"](nodes["parts"](x)["features"]))


def test_evaluate_is_what_the_losses_say() -> None:
    nodes = {"trunk": linear(4, 5), "a": linear(5, 3), "b": linear(5, 4)}
    x, y = rows()
    graph = mf.Graph(nodes, [("trunk", "a"), ("trunk", "b")], devices=TWO)
    graph.compile("sgd", {"a": "cross_entropy", "b": "mse"}, lr=0.1)
    found = graph.evaluate((x, {"a": y, "b": x}), batch_size=7)
    with torch.no_grad():
        h = nodes["trunk"](x)
        a, b = F.cross_entropy(nodes["a"](h), y).item(), F.mse_loss(nodes["b"](h), x).item()
    assert found == pytest.approx({"loss": a + b, "a_loss": a, "b_loss": b})
