"""What can't work is refused with an error that says what came, what was expected, and what to do."""

from typing import Any

import pytest
import torch
from tests.graph.comparing import THREE, TWO, assert_same_weights, chain_of, fit, rows, stages, weights
from torch import nn

import modelfleet as mf
from modelfleet.errors import AllFailedError, InputError


def refused(call: Any, *words: str) -> None:
    """The call raises InputError with all of these words."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message


def pair() -> dict[str, nn.Module]:
    return {"a": nn.Linear(4, 5), "b": nn.Linear(5, 3)}


def test_a_cycle() -> None:
    nodes = {**pair(), "c": nn.Linear(3, 4)}
    refused(lambda: mf.Graph(nodes, [("a", "b"), ("b", "c"), ("c", "a")]), "cycle", "a → b → c → a")


def test_an_edge_from_a_node_to_itself() -> None:
    refused(lambda: mf.Graph(pair(), [("a", "a")]), "'a'", "itself")


@pytest.mark.parametrize("edge", [("a", "c"), ("c", "b"), ("aa", "b")])
def test_an_unknown_node(edge: tuple[str, str]) -> None:
    refused(lambda: mf.Graph(pair(), [edge]), "unknown node")


@pytest.mark.parametrize("edge", ["ab", ("a",), ("a", "b", "c"), ("a", 1), None])
def test_what_is_no_edge(edge: Any) -> None:
    refused(lambda: mf.Graph(pair(), [edge]), "edge")


@pytest.mark.parametrize(
    "edges", [[("a", "b"), ("input.z", "b.x")], [("a", "b.x"), ("a", "b.x")], [("a", "b")] * 2]
)
def test_edges_that_do_not_agree_on_the_arguments(edges: Any) -> None:
    refused(lambda: mf.Graph(pair(), edges), "'b'")


def test_unknown_outputs() -> None:
    refused(lambda: mf.Graph(pair(), [("a", "b")], outputs="head"), "unknown node", "head")
    refused(lambda: mf.Graph(pair(), [("a", "b")], outputs=[]), "outputs")


@pytest.mark.parametrize("models", [[], {}])
def test_no_stages(models: Any) -> None:
    refused(lambda: mf.Chain(models), "at least one")


def test_shapes_that_do_not_fit() -> None:
    chain = mf.Chain({"body": nn.Linear(4, 7), "head": nn.Linear(6, 3)}, devices=TWO)
    chain.compile("sgd", "mse", lr=0.1)
    x = torch.zeros(8, 4)
    refused(lambda: fit(chain, (x, x[:, :3])), "'head'", "'body'", "(3, 7)")
    refused(lambda: chain.predict(x, strategy="threads"), "'head'", "7)")


def test_data_that_do_not_fit_the_first_stage() -> None:
    chain = chain_of([stage.float() for stage in stages()])
    refused(lambda: fit(chain, (torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64))), "'0'", "the data", "5)")


def test_more_devices_than_stages() -> None:
    chain = chain_of(None, [f"cpu:{number}" for number in range(4)])
    refused(lambda: fit(chain, rows()), "4 devices", "3 nodes", "row")
    chain = chain_of(None, [["cpu:0"], ["cpu:1"]])
    refused(lambda: fit(chain, rows()), "2 rows", "3 nodes")


def test_devices_by_node() -> None:
    refused(lambda: fit(chain_of(None, {"0": "cpu:0", "1": "cpu:1"}), rows()), "'2'")
    refused(lambda: fit(chain_of(None, {"0": "cpu:0", "1": "cpu:1", "3": "cpu:2"}), rows()), "unknown node", "3")
    refused(lambda: fit(chain_of(None, [["cpu:0", "cpu:0"], ["cpu:1"], ["cpu:1"]]), rows()), "cpu:0")


@pytest.mark.parametrize("wanted", [0, -1, 2.5, True, "4"])
def test_micro_batches_that_are_no_count(wanted: Any) -> None:
    refused(lambda: fit(chain_of(), rows(), micro_batches=wanted), "micro_batches", repr(wanted))


def test_more_micro_batches_than_rows() -> None:
    refused(lambda: fit(chain_of(), rows(), micro_batches=9), "micro_batches is 9", "8 rows")


def test_fewer_micro_batches_than_replicas() -> None:
    chain = chain_of(None, [["cpu:0", "cpu:1", "cpu:2"], ["cpu:3"], ["cpu:4"]])
    refused(lambda: fit(chain, rows(), micro_batches=2), "micro_batches is 2", "3 devices")


def test_fewer_rows_than_replicas() -> None:
    chain = chain_of(None, [["cpu:0", "cpu:1", "cpu:2"], ["cpu:3"], ["cpu:4"]])
    alone = chain_of(None, "cpu:0")
    for one in (chain, alone):
        fit(one, rows(2), batch_size=2)
    assert_same_weights(weights(chain), weights(alone))
    assert chain.predict(rows(1)[0], batch_size=1).shape == (1, 3)


def test_a_model_given_twice() -> None:
    model = nn.Linear(4, 4)
    refused(lambda: mf.Chain([model, nn.Tanh(), model]), "'0'", "'2'", "copy")


def test_weights_that_stages_share() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    refused(lambda: mf.Chain({"embedding": embedding, "head": head}), "'embedding'", "'head'", "weight")


def test_compile_was_forgotten() -> None:
    chain = mf.Chain(stages(), devices=TWO)
    refused(lambda: fit(chain, rows()), "compile", "fit")
    refused(lambda: chain.evaluate(rows()), "compile", "evaluate")


def test_no_loss_and_an_objective() -> None:
    chain = mf.Chain(stages(), devices=TWO)
    refused(lambda: chain.compile("sgd", lr=0.1), "loss")
    refused(lambda: chain.compile("sgd", "mse", objective=lambda model, batch: 0), "objective")
    refused(lambda: chain.compile("sgd", objective=lambda model, batch: 0), "objective")


def test_compile_with_what_graphs_do_not_have() -> None:
    chain = mf.Chain(stages(), devices=TWO)
    refused(lambda: chain.compile("sgd", "mse", precision="fp16"), "fp16", "bf16")
    several: Any = mf.each([1, 2, 3])
    refused(lambda: chain.compile("sgd", "mse", clip_norm=several), "clip_norm")
    refused(lambda: chain.compile("sgd", "mse", lr=mf.each([1, 2])), "2", "3")
    refused(lambda: chain.compile("sgd", {"4": "mse"}), "unknown node")
    refused(lambda: chain.compile("sgd", {}), "loss")
    refused(lambda: chain.compile("sgdd", "mse"), "sgdd")
    refused(lambda: chain.compile("sgd", "mse", learning_rate=0.1), "learning_rate")


@pytest.mark.parametrize("y", [torch.zeros(40, 4), torch.zeros(40, 3, 2)])
def test_a_target_that_does_not_fit(y: torch.Tensor) -> None:
    with pytest.raises((InputError, AllFailedError)) as caught:
        fit(chain_of(loss="mse"), (rows()[0], y))
    assert "2" in str(caught.value)


def test_data_without_a_target() -> None:
    x, y = rows()
    refused(lambda: fit(chain_of(), x), "(x, y)")
    refused(lambda: fit(chain_of(), {"x": x, "y": y}), "(x, y)", "dict")
    refused(lambda: fit(chain_of(), (x, y[:-1])), "39", "40")


def test_targets_of_several_nodes() -> None:
    x, y = rows()
    graph = mf.Graph({"a": stages()[0], "b": nn.Identity()}, [("a", "b")], devices=TWO)
    graph.compile("sgd", {"a": "mse", "b": "mse"})
    refused(lambda: fit(graph, (x, y)), "'a'", "dict")
    refused(lambda: fit(graph, (x, {"a": x})), "'b'")


def test_parts_that_the_data_or_outputs_do_not_have() -> None:
    nodes = {"a": stages()[0], "b": nn.Linear(7, 3).double()}
    x, y = rows()
    graph = mf.Graph(nodes, [("input.left", "a"), ("a", "b")], devices=TWO)
    graph.compile("sgd", "cross_entropy")
    refused(lambda: fit(graph, ({"right": x}, y)), "'left'", "'right'")
    refused(lambda: fit(graph, (x, y)), "'left'", "one tensor")
    graph = mf.Graph(nodes, [("a.hidden", "b")], devices=TWO)
    graph.compile("sgd", "cross_entropy")
    refused(lambda: fit(graph, (x, y)), "'a'", "'hidden'")
    refused(lambda: graph.predict(x), "'a'", "'hidden'")


class Says(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, 4


def test_outputs_that_are_no_tensors() -> None:
    first, second, third = stages()
    refused(lambda: fit(chain_of([first, Says(), second, third]), rows()), "'1'", "int", "tensors")
    refused(lambda: mf.Chain([first, Says()], devices=TWO).predict(rows()[0]), "'1'", "int", "tensors")


@pytest.mark.parametrize(
    "arguments",
    [
        {"pipeline": "2f2b"},
        {"strategy": "fused"},
        {"epochs": 0},
        {"epochs": True},
        {"batch_size": 0},
        {"timeout": 0},
        {"timeout": -1.0},
        {"callbacks": 3},
        {"pipeline": None},
        {"recompute": "0"},
        {"timeout": "long"},
    ],
    ids=str,
)
def test_arguments_of_fit(arguments: dict[str, Any]) -> None:
    refused(lambda: fit(chain_of(), rows(), **arguments), next(iter(arguments)).removesuffix("s"))


def test_recompute_of_an_unknown_node() -> None:
    refused(lambda: fit(chain_of(), rows(), recompute=["3"]), "unknown node '3'")


def test_interleaved_is_for_chains() -> None:
    nodes = {"a": stages()[0], "b": nn.Linear(7, 3).double(), "c": nn.Linear(7, 3).double()}
    graph = mf.Graph(nodes, [("a", "b"), ("a", "c")], outputs="b", devices=TWO)
    graph.compile("sgd", "cross_entropy")
    refused(lambda: fit(graph, rows(), pipeline="interleaved"), "interleaved", "1f1b")


def test_a_device_that_does_not_exist() -> None:
    refused(lambda: mf.Chain(stages(), devices="cpu:-1"), "cpu:-1")
    refused(lambda: fit(chain_of(None, ["cpu:0", "gpu:7"]), rows()), "gpu:7")


def test_validation_that_early_stopping_needs() -> None:
    refused(lambda: fit(chain_of(), rows(), callbacks=[mf.EarlyStopping()]), "val_loss", "validation")


def test_a_draw_that_can_not_be_divided() -> None:
    class Shuffle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn(1 + len(x))[0]

    first, second, third = stages()
    models = [first, Shuffle(), second, third]
    refused(lambda: fit(chain_of(models), rows()), "'1'", "micro_batches=1")
    fit(chain_of(models), rows(), micro_batches=1)


@pytest.mark.parametrize("strategy", ["threads", "processes"])
@pytest.mark.parametrize("devices", [TWO, THREE])
def test_a_loss_that_is_not_finite_leaves_the_last_good_weights(strategy: str, devices: list[str]) -> None:
    if strategy == "processes" and devices is THREE:
        pytest.skip("the same as on two devices")
    x, y = rows(64)
    x = x.clone()
    x[40:48] = float("nan")  # the sixth step
    good = chain_of(None, devices)
    fit(good, (x[:40], y[:40]), shuffle=False, epochs=1)
    chain = chain_of(None, devices)
    with pytest.raises(AllFailedError, match="epoch 1, step 6") as caught:
        fit(chain, (x, y), shuffle=False, epochs=1, strategy=strategy)
    assert_same_weights(weights(chain), weights(good))
    assert caught.value.history.failed["chain"].step == 6
    assert all(parameter.grad is None for name in chain.names for parameter in chain[name].parameters())
