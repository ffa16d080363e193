"""The fleet as its users meet it: who is in it, and what its verbs do."""

import copy
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, close, equal, fit, fleet_of, mlp, toy, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet import testing

X, Y = toy(20)


def tensors(rows: int = 20) -> tuple[Tensor, Tensor]:
    x, y = toy(rows)
    return torch.from_numpy(x), torch.from_numpy(y)


# --- who is in it


def test_a_mapping_names_the_members_and_a_sequence_counts_them() -> None:
    models = [mlp(), mlp()]
    named = mf.Fleet({"b": models[0], "a": models[1]})
    counted = mf.Fleet(tuple(models))
    assert (named.names, counted.names) == (["b", "a"], ["0", "1"])
    assert named["b"] is models[0]
    assert counted["1"] is models[1]
    assert (len(named), list(named), "a" in named, "c" in named) == (2, ["b", "a"], True, False)
    assert repr(named) == "<Fleet of 2: Sequential on cpu>"


def test_built_members_have_weights_of_their_own_seed() -> None:
    three, two = mf.Fleet.build(mlp, 3, seed=1), mf.Fleet.build(mlp, ["2", "0"], seed=1)
    assert equal(weights(three["2"]), weights(two["2"]))
    assert not equal(weights(three["2"]), weights(three["0"]))
    assert not equal(weights(three["2"]), weights(mf.Fleet.build(mlp, 3, seed=2)["2"]))


def test_building_leaves_the_callers_generator_alone() -> None:
    before = torch.get_rng_state()
    mf.Fleet.build(mlp, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_build_gives_each_member_its_own_keywords() -> None:
    fleet = mf.Fleet.build(mlp, ["a", "b"], width=mf.each({"b": 5, "a": 7}), dropout=0.5)
    assert [fleet[name][0].out_features for name in "ab"] == [7, 5]
    assert fleet["b"][2].p == 0.5


def test_an_index_gives_the_very_object_with_the_new_weights() -> None:
    model = mlp()
    before = weights(model)
    fleet = mf.Fleet({"a": model, "b": mlp()})
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fit(fleet, (X, Y))
    assert fleet["a"] is model
    assert not equal(weights(model), before)


def test_dropping_a_member_looks_at_no_other_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, whole = (mf.Fleet.build(mlp, 4, seed=3) for _ in range(2))
    for one in (fleet, whole):
        one.compile("adam", "cross_entropy", lr=0.01)
        fit(one, (X, Y))
    with monkeypatch.context() as patch:
        for name in ("signature", "signatures", "prepare"):
            patch.setattr(f"modelfleet.frameworks.torch.{name}", None)
        fleet.drop("2")
        fit(fleet, (X, Y))
    fit(whole, (X, Y))
    assert [lane.names for lane in fleet._lanes] == [["0", "1", "3"]]
    assert all(close(weights(fleet[name]), weights(whole[name])) for name in fleet.names)


def test_dropping_the_first_of_a_group_leaves_no_trace_of_it() -> None:
    fleet = mf.Fleet({"a": mlp(4), "b": mlp(4), "c": mlp(5), "d": mlp(5)})
    fleet.compile("adam", "cross_entropy", lr=0.01)
    for gone in ("c", "a"):
        fit(fleet, (X, Y))
        fleet.drop(gone)
        assert f"'{gone}'" not in str(fleet.plan((X, Y), batch_size=8))
    fit(fleet, (X, Y))


def test_add_drop_and_clone_carry_the_optimizers_state_on() -> None:
    recipe: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
    unbroken = fleet_of(["a", "b"], **recipe)
    fit(unbroken, (X, Y), epochs=3)

    fleet = fleet_of(["a", "b"], **recipe)
    fit(fleet, (X, Y))
    fleet.add("c", mlp())
    fit(fleet, (X, Y))
    model = fleet["c"]
    assert fleet.drop("c") is model
    assert fleet.names == ["a", "b"]
    fleet.clone("a", as_="twin")
    fit(fleet, (X, Y), shuffle=True)
    assert close(weights(fleet["a"]), weights(unbroken["a"]))
    assert close(weights(fleet["b"]), weights(unbroken["b"]))


def test_a_clone_begins_where_the_other_is_and_goes_its_own_way() -> None:
    fleet = fleet_of(["a"], momentum=0.9)
    fit(fleet, (X, Y), shuffle=False)
    fleet.clone("a", as_="b")
    assert equal(weights(fleet["a"]), weights(fleet["b"]))
    assert fleet["a"] is not fleet["b"]
    fit(fleet, (X, Y), shuffle=False)  # the same rows and the same momentum: only shuffles are a member's own
    assert equal(weights(fleet["a"]), weights(fleet["b"]))
    fit(fleet, (X, Y))
    assert not equal(weights(fleet["a"]), weights(fleet["b"]))


# --- a model is its owner's between verbs


def test_the_next_verb_sees_what_an_owner_did_to_the_weights() -> None:
    fleet = fleet_of(2)
    fit(fleet, (X, Y))
    other = weights(mlp())
    fleet["0"].load_state_dict(other)
    assert np.allclose(fleet.predict(X)["0"], fleet["0"](torch.from_numpy(X)).detach().numpy(), atol=1e-6)
    fit(fleet, (X, Y))
    assert not equal(weights(fleet["0"]), other)


def test_changes_that_torch_does_not_count_are_seen_too() -> None:
    models = [mlp(), mlp()]
    fleet = mf.Fleet(models)
    zeros = np.zeros((20, 3), dtype=np.float32)
    assert not np.array_equal(fleet.predict(X)["0"], zeros)
    for parameter in models[0].parameters():
        parameter.data.zero_()  # raises no version counter
    assert np.array_equal(fleet.predict(X)["0"], zeros)
    models[1][2] = nn.Linear(6, 3)  # a new layer in the old one's place
    expected = models[1](torch.from_numpy(X)).detach().numpy()
    assert np.allclose(fleet.predict(X)["1"], expected, atol=1e-6)


def test_a_layer_that_an_owner_froze_stays_as_it_is() -> None:
    models: dict[str, Any] = {"a": mlp(), "b": mlp()}
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
    fit(fleet, (X, Y))
    models["b"][0].requires_grad_(False)  # by a reference of one's own
    before = all_weights(fleet)
    fit(fleet, (X, Y))
    assert torch.equal(models["b"][0].weight, before["b"]["0.weight"])
    assert not torch.equal(models["b"][2].weight, before["b"]["2.weight"])
    assert not torch.equal(models["a"][0].weight, before["a"]["0.weight"])
    assert [lane.members for lane in fleet.plan().lanes] == [("a",), ("b",)]
    models["b"][0].requires_grad_(True)
    fit(fleet, (X, Y))
    assert not torch.equal(models["b"][0].weight, before["b"]["0.weight"])
    assert [lane.members for lane in fleet.plan().lanes] == [("a", "b")]


def test_an_attribute_that_an_owner_changed_counts() -> None:
    fleet = fleet_of(2, dropout=0.5)
    fit(fleet, (X, Y))
    fleet["1"][2].inplace = True
    plan = fleet.plan()
    assert "2.inplace is True, not False" in plan.lanes[1].reason


def test_models_are_trained_in_training_mode_and_come_back_as_they_were() -> None:
    trained, evaluated = nn.Sequential(nn.BatchNorm1d(4), mlp()), nn.Sequential(nn.BatchNorm1d(4), mlp())
    evaluated.load_state_dict(trained.state_dict())
    evaluated.eval()
    for model in (trained, evaluated):
        fleet = mf.Fleet({"m": model})
        fleet.compile("sgd", "cross_entropy", lr=0.1)
        fit(fleet, (X, Y))
    assert equal(weights(trained), weights(evaluated))
    assert trained[0].num_batches_tracked == 1
    assert (trained.training, evaluated.training, evaluated[0].training) == (True, False, False)


# --- fit


def test_fit_again_goes_on() -> None:
    parts, whole = (
        fleet_of(2, optimizer="adam", lr=0.01, dropout=0.5),
        fleet_of(2, optimizer="adam", lr=0.01, dropout=0.5),
    )
    first, second = fit(parts, (X, Y), epochs=2, batch_size=8), fit(parts, (X, Y), epochs=3, batch_size=8)
    history = fit(whole, (X, Y), epochs=5, batch_size=8)
    assert equal(all_weights(parts), all_weights(whole))
    assert history["1"]["loss"] == first["1"]["loss"] + second["1"]["loss"]


def test_compiling_again_starts_the_optimizer_anew() -> None:
    fleet = fleet_of(1, momentum=0.9)
    fit(fleet, (X, Y))
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
    start = copy.deepcopy(fleet["0"])
    fit(fleet, (X, Y), shuffle=False, batch_size=20)
    expected = testing.alone(
        start,
        "0",
        (X, Y),
        optimizer="sgd",
        loss="cross_entropy",
        lr=0.1,
        momentum=0.9,
        shuffle=False,
        batch_size=20,
    )
    assert testing.largest_difference(fleet["0"], expected)[0] < 1e-5


def test_every_member_has_its_own_epochs_and_batch_size() -> None:
    fleet = fleet_of(["short", "long"])
    starts = {name: copy.deepcopy(fleet[name]) for name in fleet.names}
    epochs, sizes = {"short": 1, "long": 3}, {"short": 20, "long": 6}
    history = fit(fleet, (X, Y), epochs=mf.each(epochs), batch_size=mf.each(sizes))
    assert {name: len(history[name]["loss"]) for name in history} == epochs
    for name, start in starts.items():
        expected = testing.alone(
            start,
            name,
            (X, Y),
            optimizer="sgd",
            loss="cross_entropy",
            lr=0.1,
            epochs=epochs[name],
            batch_size=sizes[name],
        )
        assert testing.largest_difference(fleet[name], expected)[0] < 1e-5, name


def test_members_can_have_data_of_their_own() -> None:
    fleet = fleet_of(["a", "b"])
    starts = {name: copy.deepcopy(fleet[name]) for name in fleet.names}
    data = {"a": toy(13, seed=1), "b": toy(20, seed=2)}
    history = fit(fleet, mf.each(data), validation=mf.each(data), epochs=2, batch_size=8)
    for name, start in starts.items():
        expected = testing.alone(
            start, name, data[name], optimizer="sgd", loss="cross_entropy", lr=0.1, epochs=2, batch_size=8
        )
        assert testing.largest_difference(fleet[name], expected)[0] < 1e-5, name
        with torch.no_grad():
            output = fleet[name](torch.from_numpy(data[name][0]))
        loss = F.cross_entropy(output, torch.from_numpy(data[name][1])).item()
        assert history[name]["val_loss"][-1] == pytest.approx(loss, rel=1e-5)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for low in range(0, 20, 8):
        yield X[low : low + 8], Y[low : low + 8]


@cache
def from_arrays() -> dict[str, dict[str, Tensor]]:
    fleet = fleet_of(2)
    fit(fleet, (X, Y), batch_size=8, epochs=2, shuffle=False)
    return all_weights(fleet)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: DataLoader(TensorDataset(*tensors()), batch_size=8), id="DataLoader"),
        pytest.param(lambda: batches, id="function"),
        pytest.param(lambda: list(batches()), id="list of batches"),
        pytest.param(lambda: mf.each([batches, batches]), id="loader each"),
        pytest.param(lambda: mf.each([(X, Y), (X, Y)]), id="arrays each"),
        pytest.param(lambda: tensors(), id="tensors"),
        pytest.param(lambda: [X, Y], id="list of arrays"),
        pytest.param(lambda: (X.tolist(), Y.tolist()), id="lists"),
    ],
)
def test_all_forms_of_data_train_alike(data: Any) -> None:
    fleet, expected = fleet_of(2), from_arrays()
    value = data()
    first: Any = next(iter(value.values)) if isinstance(value, mf.Each) else value
    loader = isinstance(first, DataLoader) or callable(first) or isinstance(first[0], tuple)
    fit(fleet, value, batch_size=None if loader else 8, epochs=2, shuffle=False)
    for name in fleet.names:
        assert close(weights(fleet[name]), expected[name]), name


def test_history_tells_who_is_best() -> None:
    fleet = fleet_of(3, lr=mf.each([0.0, 0.5, 0.0]), metrics=["accuracy"])
    history = fit(fleet, (X, Y), validation=(X, Y), epochs=10)
    assert history.metrics == ("loss", "accuracy", "val_loss", "val_accuracy")
    assert history.best("val_loss") == history.best("loss") == history.best() == "1"
    assert len(history["1"]["val_accuracy"]) == 10
    metrics = ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert list(history.frame().columns) == ["member", "epoch", "dropout", "optimizer", "lr", *metrics]
    assert len(history.frame()) == 30
    assert fleet.evaluate((X, Y))["1"]["accuracy"] == pytest.approx(history["1"]["val_accuracy"][-1])


def test_no_epochs_change_nothing() -> None:
    fleet = fleet_of(2)
    before = all_weights(fleet)
    history = fit(fleet, (X, Y), epochs=0)
    assert equal(all_weights(fleet), before)
    assert history["0"] == {}


# --- objective, evaluate, predict


def test_an_objective_brings_its_own_loss_and_metrics() -> None:
    def denoise(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(batch)
        loss = (output - batch[:, :3]).pow(2).mean()
        return loss, {"bias": (output - batch[:, :3]).mean()}

    fleet = mf.Fleet.build(mlp, 2)
    fleet.compile("sgd", objective=denoise, lr=0.1)
    start = copy.deepcopy(fleet["1"])
    history = fit(fleet, X, validation=X, epochs=2, batch_size=8)
    expected = testing.alone(start, "1", X, optimizer="sgd", objective=denoise, lr=0.1, epochs=2, batch_size=8)
    assert testing.largest_difference(fleet["1"], expected)[0] < 1e-5
    assert history.metrics == ("loss", "bias", "val_loss", "val_bias")
    with torch.no_grad():
        loss, extra = denoise(fleet["1"], torch.from_numpy(X))
    found = fleet.evaluate(X)["1"]
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["bias"] == pytest.approx(extra["bias"].item(), rel=1e-4, abs=1e-6)


def test_predict_needs_no_compile_and_takes_every_form_of_data() -> None:
    fleet = mf.Fleet.build(mlp, 2)
    with torch.no_grad():
        expected = {name: fleet[name](torch.from_numpy(X)).numpy() for name in fleet.names}
    loader = DataLoader(TensorDataset(*tensors()), batch_size=8)
    for data in (X, (X, Y), loader, mf.each([X, X]), batches):
        found = fleet.predict(data)
        for name in fleet.names:
            assert isinstance(found[name], np.ndarray)
            assert np.allclose(found[name], expected[name], atol=1e-6)
    own = fleet.predict(mf.each({"0": X[:3], "1": X[:11]}), batch_size=4)
    assert np.allclose(own["0"], expected["0"][:3], atol=1e-6)
    assert np.allclose(own["1"], expected["1"][:11], atol=1e-6)


def test_evaluate_gives_the_numbers_of_a_plain_loop() -> None:
    fleet = fleet_of(2, metrics=["accuracy"], dropout=0.5)
    for data in ((X, Y), batches, mf.each([(X, Y), (X, Y)])):
        found = fleet.evaluate(data)
        for name in fleet.names:
            model = fleet[name].eval()
            with torch.no_grad():
                output = model(torch.from_numpy(X))
            model.train()
            loss = F.cross_entropy(output, torch.from_numpy(Y)).item()
            assert found[name]["loss"] == pytest.approx(loss, rel=1e-5)
            assert found[name]["accuracy"] == (output.argmax(1).numpy() == Y).mean()


def test_evaluate_and_predict_change_nothing() -> None:
    fleet, undisturbed = (fleet_of(2, momentum=0.9, dropout=0.5) for _ in range(2))
    for each in (fleet, undisturbed):
        fit(each, (X, Y))
    before = all_weights(fleet)
    fleet.evaluate((X, Y))
    fleet.predict(X)
    assert equal(all_weights(fleet), before)
    for each in (fleet, undisturbed):
        fit(each, (X, Y))
    assert equal(all_weights(fleet), all_weights(undisturbed))


# --- a shared trunk


class OnTrunk(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def on_trunk(trunks: Sequence[nn.Module]) -> mf.Fleet:
    torch.manual_seed(0)
    fleet = mf.Fleet([OnTrunk(trunk) for trunk in trunks])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    return fleet


def frozen() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh()).requires_grad_(False)


def test_a_shared_frozen_trunk_is_stored_once_and_changes_no_result() -> None:
    trunk = frozen()
    shared, apart = on_trunk([trunk] * 3), on_trunk([frozen() for _ in range(3)])
    for fleet in (shared, apart):
        fit(fleet, (X, Y), epochs=2)
    assert shared._lanes is not None
    engine: Any = shared._lanes[0].engine
    assert set(engine.shared) == {"trunk.0.weight", "trunk.0.bias"}
    assert shared.plan().lanes[0].state_bytes < apart.plan().lanes[0].state_bytes
    assert shared["2"].trunk is trunk
    for name in shared.names:
        assert close(weights(shared[name]), weights(apart[name]), 1e-6)


def test_a_trunk_that_is_changed_or_no_longer_shared_is_noticed() -> None:
    trunk = frozen()
    fleet = on_trunk([trunk, trunk])
    fleet.predict(X)
    with torch.no_grad():
        next(trunk.parameters()).mul_(2)
    expected = {name: fleet[name](torch.from_numpy(X)).detach().numpy() for name in fleet.names}
    found = fleet.predict(X)
    assert all(np.allclose(found[name], expected[name], atol=1e-6) for name in fleet.names)
    fleet["1"].trunk = copy.deepcopy(trunk)
    with torch.no_grad():
        next(fleet["1"].trunk.parameters()).mul_(3)
    expected = {name: fleet[name](torch.from_numpy(X)).detach().numpy() for name in fleet.names}
    found = fleet.predict(X)
    assert all(np.allclose(found[name], expected[name], atol=1e-6) for name in fleet.names)


def test_names_are_looked_up_and_not_searched_for_when_members_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelfleet import fleet as module

    check = module.check_name

    def looked_up(name: object, taken: Any) -> str:
        assert isinstance(taken, dict | set)  # to search a list for every name takes more than linear time
        return check(name, taken)

    monkeypatch.setattr(module, "check_name", looked_up)
    assert mf.Fleet.build(mlp, ["b", "a"]).names == ["b", "a"]
    with pytest.raises(mf.InputError, match="two members named 'a'"):
        mf.Fleet.build(mlp, ["a", "b", "a"])


class Keeping(nn.Linear):
    """Keeps what it gave last."""

    def forward(self, input: Tensor) -> Tensor:
        self.last = [super().forward(input)]
        return self.last[0]


def test_a_clone_keeps_no_graph_of_a_forward_pass() -> None:
    fleet = mf.Fleet({"a": Keeping(2, 1)})
    x = torch.ones(3, 2)
    kept = fleet["a"](x)
    fleet.clone("a", as_="b")
    assert torch.equal(fleet["b"].last[0], kept)
    assert not fleet["b"].last[0].requires_grad
    fleet["a"].lock = threading.Lock()
    with pytest.raises(mf.InputError, match="a Keeping can't be copied"):
        fleet.clone("a", as_="c")
    assert list(fleet) == ["a", "b"]
