"""Bad input: each a clear error that names the member and what to do, before anything has changed."""

import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, equal, fit, fleet_of, mlp, toy
from torch import nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.types import Strategy

X, Y = toy(20)


def refused(call: Callable[[], Any], *parts: str, error: type[mf.FleetError] = mf.InputError) -> str:
    """The message of the error that `call` raises, which must have these parts."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert message.endswith((".", "?", "'")) or "raised" in message, message
    return message


# --- members


def test_a_fleet_needs_members() -> None:
    empty: list[Any] = [[], {}, iter(())]
    for nothing in empty:
        refused(lambda nothing=nothing: mf.Fleet(nothing), "at least one member")
    refused(lambda: mf.Fleet.build(mlp, 0), "at least one member")
    refused(lambda: mf.Fleet.build(mlp, []), "at least one member")
    fleet = fleet_of(["only"])
    refused(lambda: fleet.drop("only"), "'only' is the last member")
    assert fleet.names == ["only"]


def test_names_are_unique_and_can_be_seen() -> None:
    refused(lambda: mf.Fleet.build(mlp, ["a", "b", "a"]), "two members named 'a'")
    alike: Any = {1: mlp(), "1": mlp()}
    refused(lambda: mf.Fleet(alike), "two members named '1'")
    refused(lambda: mf.Fleet({" ": mlp()}), "name is empty")
    fleet = fleet_of(["a", "b"])
    refused(lambda: fleet.add("a", mlp()), "two members named 'a'")
    refused(lambda: fleet.clone("a", as_="b"), "two members named 'b'")
    assert fleet.names == ["a", "b"]


def test_an_unknown_member_is_told_the_nearest() -> None:
    fleet = fleet_of(["berlin", "paris"])
    for call in (
        lambda: fleet["pari"],
        lambda: fleet.drop("pari"),
        lambda: fleet.clone("pari", as_="x"),
    ):
        refused(call, "unknown member 'pari'", "Did you mean 'paris'?")
    assert fleet.names == ["berlin", "paris"]


def test_models_must_be_models() -> None:
    refused(lambda: mf.Fleet({"a": mlp(), "b": "resnet"}), "member 'b'", "builtins.str", "torch.nn.Module")
    refused(lambda: mf.Fleet("resnet"), "models is a str", "mapping from name to model")
    number: Any = 5
    refused(lambda: mf.Fleet(number), "models is a int", "sequence of models")
    refused(lambda: mf.Fleet([nn.Linear]), "member '0'", "the class Linear", "Linear(...)")
    fleet = fleet_of(1)
    refused(lambda: fleet.add("b", None), "member 'b'", "torch.nn.Module")


def test_what_is_no_name_is_told() -> None:
    fleet: Any = fleet_of(["a", "b"])
    for call in (
        lambda: fleet[0:1],
        lambda: fleet["a", "b"],
        lambda: fleet[[["a"]]],
        lambda: fleet.drop(["a"]),
        lambda: fleet.clone(["a"], as_="c"),
        lambda: fleet.compile("sgd", "mse", lr=0.1, members=[["a"]]),
    ):
        refused(call, "is not the name of a member", "such as 'a'")
    refused(lambda: fleet[["a", "b", "a"]], "has 'a' twice")
    assert fleet.names == ["a", "b"]


def test_a_number_in_quotes_is_no_number() -> None:
    fleet = fleet_of(["a", "b"])
    for rate in ("0.1", mf.each(["0.1", "0.2"])):
        refused(lambda rate=rate: fleet.compile("sgd", "mse", lr=rate), "lr is '0.1', expected a number")


def test_a_data_function_that_takes_arguments_is_told() -> None:
    fleet = fleet_of(["a", "b"])
    data: Any = lambda epoch: iter([(X, Y)])  # noqa: E731
    refused(lambda: fit(fleet, data), "takes arguments", "without any")
    refused(lambda: fleet.predict(data), "takes arguments", "without any")


def test_weights_are_no_part_of_what_is_predicted() -> None:
    fleet = fleet_of(["a", "b"])
    refused(lambda: fleet.predict((X, Y, X[:, 0])), "more than (x, y)", "To predict, give x or (x, y)")


def test_one_model_is_not_taken_for_its_layers() -> None:
    for model in (nn.Sequential(nn.Linear(4, 2), nn.Tanh()), nn.ModuleList([mlp()]), mlp()):
        given: Any = model
        refused(lambda given=given: mf.Fleet(given), "models is one model", type(model).__name__, "[model]")
    assert len(mf.Fleet(list(nn.ModuleList([mlp(), mlp()])))) == 2
    assert len(mf.Fleet((mlp(), mlp()))) == 2


def test_one_model_may_not_be_two_members() -> None:
    model = mlp()
    refused(lambda: mf.Fleet([model, model]), "'0' and '1' are one model object", "copy.deepcopy")
    fleet = mf.Fleet([model])
    refused(lambda: fleet.add("b", model), "'0' and 'b' are one model object")


def test_a_trained_parameter_may_not_be_shared() -> None:
    layer = nn.Linear(4, 4)
    models = {
        "a": nn.Linear(4, 3),
        "b": nn.Sequential(layer, nn.Linear(4, 3)),
        "c": nn.Sequential(layer, mlp()),
    }
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy")
    refused(
        lambda: fit(fleet, (X, Y)),
        "'b' and 'c' share the trained parameter '0.weight'",
        "requires_grad=False",
    )
    layer.requires_grad_(False)
    fit(fleet, (X, Y))


def test_members_that_share_a_trained_parameter_may_be_read() -> None:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    models = {"a": nn.Sequential(layer, nn.Linear(4, 3)), "b": nn.Sequential(layer, nn.Linear(4, 3))}
    models["c"] = nn.Sequential(layer, mlp())
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    before = fleet.predict(X)
    losses = fleet.evaluate((X, Y))
    for name, model in models.items():
        with torch.no_grad():
            outputs = model(torch.from_numpy(X))
        assert np.allclose(before[name], outputs, atol=1e-6)
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(Y)).item()
        assert losses[name]["loss"] == pytest.approx(loss, rel=1e-5)
    for _ in range(2):
        refused(lambda: fit(fleet, (X, Y)), "'a' and 'b' share the trained parameter '0.weight'")
    assert layer.weight.requires_grad
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not np.allclose(fleet.predict(X)["a"], before["a"])
    for model in models.values():
        model[0] = other
    with torch.no_grad():
        assert np.allclose(fleet.predict(X)["b"], models["b"](torch.from_numpy(X)), atol=1e-6)
    other.requires_grad_(False)
    fit(fleet, (X, Y))


def test_nothing_to_train_is_told() -> None:
    fleet = mf.Fleet({"a": mlp().requires_grad_(False)})
    fleet.compile("sgd", "cross_entropy")
    refused(lambda: fit(fleet, (X, Y)), "member 'a' has no parameter that takes a gradient", "requires_grad=True")


def test_numbers_are_not_flags() -> None:
    fleet = mf.Fleet([mlp(), mlp()])
    refused(lambda: fleet.compile("sgd", "cross_entropy", lr=True), "lr is True; expected a number")
    refused(lambda: fleet.compile("sgd", "cross_entropy", clip_norm=mf.each([1.0, True])), "clip_norm is True")


def test_factories_must_be_functions_that_make_models() -> None:
    build: Callable[..., mf.Fleet] = mf.Fleet.build
    refused(lambda: build("mlp", 2), "factory is 'mlp'")
    refused(lambda: mf.Fleet.build(lambda: None, 2), "returned a NoneType for member '0'")
    refused(lambda: mf.Fleet.build(mlp, "ab"), "members is 'ab'", "a sequence of names")
    refused(lambda: mf.Fleet.build(mlp, 2, widht=3), "member '0'", "widht=3", "unexpected keyword")
    refused(lambda: build(mlp, 2.5), "members is 2.5", "a number, or a sequence of names")
    refused(lambda: mf.Fleet.build(mlp, -1), "at least one member")
    assert mf.Fleet.build(mlp, (f"m{number}" for number in range(2))).names == ["m0", "m1"]
    assert len(build(mlp, np.int64(2))) == 2


def test_a_model_of_unknown_shape_is_told_to_be_called_once() -> None:
    refused(lambda: mf.Fleet({"a": nn.LazyLinear(3)}), "member 'a'", "'weight' is uninitialized", "Call the model")
    with torch.device("meta"):
        empty = mlp()
    refused(lambda: mf.Fleet({"a": empty}), "member 'a'", "meta device", "Load its weights")


def test_devices_that_are_not_there_are_named() -> None:
    refused(lambda: mf.Fleet([mlp()], devices="cuda:7"), "cuda:7")
    refused(lambda: mf.Fleet([mlp()], devices="gpu"), "gpu")
    refused(lambda: mf.Fleet([mlp()], devices=["cpu:0", "cpu:0"]), "named twice")


# --- each


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ([0.1, 0.2], ("lr: each(...) has 2 values, but the fleet has 3 members",)),
        (
            {"a": 0.1, "b": 0.1, "c": 0.1, "x": 1},
            ("lr: each(...) names 'x'", "Its members are 'a', 'b', 'c'"),
        ),
        ({"a": 0.1, "b": 0.1}, ("lr: each(...) has no value for 'c'",)),
        ([0.1, "fast", 0.1], ("lr", "member 'b'", "'fast'")),
        ([0.1, -1.0, 0.1], ("lr", "member 'b'", "-1")),
        ([0.1, float("nan"), 0.1], ("lr", "member 'b'", "nan")),
    ],
)
def test_each_must_fit_the_members(values: Any, parts: tuple[str, ...]) -> None:
    fleet = fleet_of(["a", "b", "c"])
    refused(lambda: fleet.compile("sgd", "cross_entropy", lr=mf.each(values)), *parts)


def test_each_of_data_epochs_and_batch_size_is_checked_too() -> None:
    fleet = fleet_of(["a", "b"])
    before = all_weights(fleet)
    refused(lambda: fit(fleet, mf.each([(X, Y)])), "data: each(...) has 1 values, but the fleet has 2")
    refused(lambda: fit(fleet, (X, Y), validation=mf.each({"a": (X, Y)})), "validation", "no value for 'b'")
    refused(lambda: fit(fleet, (X, Y), epochs=mf.each([1])), "epochs: each(...) has 1 values")
    refused(lambda: fit(fleet, (X, Y), batch_size=mf.each([8, 0])), "batch_size of member 'b' is 0")
    refused(lambda: fit(fleet, (X, Y), epochs=mf.each([1, -1])), "epochs of member 'b' is -1")
    refused(lambda: fit(fleet, (X, Y), epochs=1.5), "epochs", "1.5", "whole number")
    assert equal(all_weights(fleet), before)


def test_a_member_that_joined_later_needs_a_value() -> None:
    fleet = fleet_of(["a", "b"], lr=mf.each([0.1, 0.2]))
    fit(fleet, (X, Y))
    fleet.add("c", mlp())
    refused(lambda: fit(fleet, (X, Y)), "lr: each(...) has no value for 'c'")
    fleet.compile("sgd", "cross_entropy", lr=mf.each([0.1, 0.2, 0.3]))
    fit(fleet, (X, Y))


# --- compile


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"optimizer": "sdg"}, ("unknown optimizer 'sdg'", "Did you mean 'sgd'?")),
        ({"loss": "cross_entrpy"}, ("unknown loss 'cross_entrpy'", "Did you mean 'cross_entropy'?")),
        ({"metrics": ["acuracy"]}, ("unknown metric 'acuracy'", "Did you mean 'accuracy'?")),
        ({"weight_decya": 0.1}, ("weight_decya", "Did you mean 'weight_decay'?")),
        ({"precision": "bf61"}, ("unknown precision 'bf61'", "Did you mean 'bf16'?")),
        ({"schedule": "cosin"}, ("unknown schedule 'cosin'", "Did you mean 'cosine'?")),
        ({"clip_norm": -1}, ("clip_norm of member 'a' is -1", "above 0")),
        ({"loss": nn.CrossEntropyLoss}, ("the class CrossEntropyLoss", "CrossEntropyLoss()")),
        ({"objective": lambda model, batch: 0}, ("both a loss and an objective",)),
        ({"optimizer": torch.optim.LBFGS}, ("LBFGS",)),
        ({"optimizer": None}, ("optimizer", "None")),
    ],
)
def test_what_compile_does_not_know_is_told_the_nearest(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    fleet = fleet_of(["a", "b"], momentum=0.9)
    fit(fleet, (X, Y))
    whole: dict[str, Any] = {"optimizer": "adam", "loss": "cross_entropy", **arguments}
    refused(lambda: fleet.compile(**whole), *parts)
    # What was compiled before still holds, the optimizer's state with it.
    fit(fleet, (X, Y))
    assert equal(all_weights(fleet), after_two_epochs())


@cache
def after_two_epochs() -> dict[str, dict[str, torch.Tensor]]:
    fleet = fleet_of(["a", "b"], momentum=0.9)
    fit(fleet, (X, Y), epochs=2)
    return all_weights(fleet)


def test_fit_and_evaluate_need_compile() -> None:
    fleet = mf.Fleet.build(mlp, 2)
    refused(lambda: fit(fleet, (X, Y)), "call compile before fit")
    refused(lambda: fleet.evaluate((X, Y)), "call compile before evaluate")


def test_strategies_are_known_or_refused() -> None:
    fleet = fleet_of(2)
    refused(lambda: fit(fleet, (X, Y), strategy="fuse"), "unknown strategy 'fuse'", "Did you mean 'fused'?")
    refused(lambda: fit(fleet, (X, Y), exchange=object()), "exchange is <object", "mf.Average")


# --- data


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ((X, Y[:-1]), ("data: [1] has 19 rows, but [0] has 20",)),
        ((X, Y + 1), ("the target in row ", "is 3, but the model gives 3 classes: labels go from 0 to 2")),
        ((X, Y - 1), ("is -1, but the model gives 3 classes",)),
        ((X, Y.astype(np.float32)), ("class indices as float32", "int64")),
        ((X[:, :3], Y), ("member 'a' can't take this batch", "(20, 3) float32", "shapes")),
        ((X.astype(np.int64), Y), ("member 'a' can't take this batch", "int64")),
        ((X, X), ("the output is (20, 3), but the target is (20, 4)", "class indices of shape (row,)")),
        ((X[:0], Y[:0]), ("data has no rows",)),
        (X, ("member 'a'", "needs (x, y), but the data hold one array")),
        (X[:2], ("member 'a'", "needs (x, y), but the data hold one array")),
        ({"x": X, "y": Y}, ("member 'a'", "needs (x, y), but the data hold a dict of x, y")),
        ((X, Y, Y), ("member 'a'", "needs (x, y), but the data hold 3 arrays")),
        (None, ("data is of type NoneType", "(x, y)")),
        ("digits", ("data is of type str", "(x, y)")),
        (iter([(X, Y)]), ("can be read only once", "a function that returns one")),
        ([], ("data holds no arrays",)),
        ((X, [str(label) for label in Y]), ("data: [1] has dtype", "Encode it as numbers")),
        (([*X[:2], X[0, :2]], Y[:3]), ("data",)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else None,
)
def test_data_that_do_not_fit_are_refused_before_the_first_step(data: Any, parts: tuple[str, ...]) -> None:
    fleet = fleet_of(["a", "b"], metrics=["accuracy"])
    before = all_weights(fleet)
    refused(lambda: fit(fleet, data), *parts)
    assert equal(all_weights(fleet), before)
    fit(fleet, (X, Y))


def test_bad_data_of_one_member_are_told_with_its_name() -> None:
    fleet = fleet_of(["a", "b"])
    refused(lambda: fit(fleet, mf.each({"a": (X, Y), "b": (X, Y[:5])})), "member 'b'", "5 rows")
    refused(lambda: fit(fleet, mf.each({"a": (X, Y), "b": (X, Y + 3)})), "member 'b'", "3 classes")
    refused(lambda: fit(fleet, mf.each({"a": (X, Y), "b": (X[:, :2], Y)})), "member 'b' can't take", "(20, 2)")
    refused(lambda: fit(fleet, mf.each({"a": (X, Y), "b": None})), "data of member 'b' is of type NoneType")


def test_validation_and_evaluation_data_are_checked_like_the_others() -> None:
    fleet = fleet_of(["a", "b"])
    before = all_weights(fleet)
    refused(lambda: fit(fleet, (X, Y), validation=(X, Y + 1)), "3 classes")
    refused(lambda: fit(fleet, (X, Y), validation=(X, Y[:3])), "validation: [1] has 3 rows")
    refused(lambda: fit(fleet, (X, Y), validation=(X[:, :2], Y)), "member 'a' can't take this batch")
    refused(lambda: fleet.evaluate((X, Y + 1)), "3 classes")
    refused(lambda: fleet.predict(X[:, :2]), "member 'a' can't take this batch", "(20, 2) float32")
    assert equal(all_weights(fleet), before)
    assert fleet.plan().lanes[0].fused  # a batch that does not fit is no reason not to fuse


def test_a_loader_with_bad_batches_is_refused() -> None:
    fleet = fleet_of(["a", "b"])
    before = all_weights(fleet)
    refused(lambda: fit(fleet, [(X, Y + 1)]), "data", "3 classes")
    refused(lambda: fit(fleet, [(X[:, :2], Y)]), "member 'a' can't take this batch")
    refused(lambda: fit(fleet, [(X, Y)], batch_size=4), "data is a loader", "Leave batch_size out")
    refused(lambda: fit(fleet, lambda: iter(())), "data has yielded no batch")
    refused(lambda: fit(fleet, lambda: 3), "function that returned int")
    assert equal(all_weights(fleet), before)


def test_a_schedule_over_data_of_unknown_length_is_refused() -> None:
    def read() -> Any:
        return iter([(X[:8], Y[:8]), (X[8:], Y[8:])])

    for schedule in ("cosine", "linear", "step", "onecycle", mf.Schedule("constant", warmup=0.5)):
        fleet = fleet_of(["a", "b"], schedule=schedule)
        before = all_weights(fleet)
        refused(lambda fleet=fleet: fit(fleet, read), "member 'a'", "number of steps", "steps_per_epoch")
        assert equal(all_weights(fleet), before)
        fit(fleet, read, steps_per_epoch=2)
    fit(fleet_of(2, schedule=mf.Schedule("constant", warmup=3)), read)  # which counts steps, however many come


def test_a_later_batch_of_a_loader_with_labels_out_of_range_is_told() -> None:
    fleet = fleet_of(["a", "b"])
    starts = {name: copy.deepcopy(fleet[name]) for name in fleet.names}
    message = refused(lambda: fit(fleet, [(X, Y), (X, Y + 1)]), "data: the target in row")
    assert re.search(r"row \d+ is 3, but the model gives 3 classes", message)
    expected = testing.alone(
        starts["a"], "a", (X, Y), optimizer="sgd", loss="cross_entropy", lr=0.1, shuffle=False
    )
    assert testing.largest_difference(fleet["a"], expected)[0] < 1e-5  # the first batch's step is kept


def test_mistakes_in_ones_own_functions_name_the_member() -> None:
    fleet = fleet_of(["a", "b"])

    def no_loss(model: nn.Module, batch: Any) -> Any:
        return {"loss": 1}

    fleet.compile("sgd", objective=no_loss)
    refused(lambda: fit(fleet, (X, Y)), "member 'a'", "the objective returned dict", "a loss and a dict")

    def not_scalar(model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    fleet.compile("sgd", objective=not_scalar)
    refused(lambda: fit(fleet, (X, Y)), "member 'a'", "the loss is (20, 3)", "one number")

    def broken(output: Any, target: Any) -> Any:
        raise ZeroDivisionError("oops")

    fleet.compile("sgd", "cross_entropy", metrics=[broken])
    refused(lambda: fit(fleet, (X, Y)), "member 'a'", "ZeroDivisionError: oops")
    fleet.compile("sgd")
    refused(lambda: fit(fleet, (X, Y)), "member 'a'", "gives no .loss of its own", "Give compile a loss")


def test_early_stopping_on_what_is_not_recorded_is_told() -> None:
    fleet = fleet_of(["a", "b"])
    refused(lambda: fit(fleet, (X, Y), callbacks=[mf.EarlyStopping("val_loss")]), "'val_loss'", "validation data")


def test_one_callback_without_a_list_is_told() -> None:
    fleet = mf.Fleet([nn.Linear(3, 2)])
    fleet.compile("sgd", "mse", lr=0.1)
    with pytest.raises(mf.InputError, match=r"expected a list of callbacks"):
        fleet.fit((torch.zeros(4, 3), torch.zeros(4, 2)), callbacks=mf.EarlyStopping("loss"))  # pyrefly: ignore


def test_a_model_without_parameters_has_nothing_to_train() -> None:
    fleet = mf.Fleet([nn.Identity(), nn.Identity()])
    fleet.compile("sgd", "mse", lr=0.1)
    with pytest.raises(mf.InputError, match=r"no parameter that takes a gradient"):
        fleet.fit((torch.zeros(4, 3), torch.zeros(4, 3)), progress=False)


@pytest.mark.parametrize("count", [1, 3])
def test_a_later_batch_that_a_model_can_t_take_is_named(count: int) -> None:
    fleet = mf.Fleet([nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)) for _ in range(count)])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    tokens, classes = torch.zeros(12, 3, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    tokens[9] = 77
    who = "member '0'" if count == 1 else "one of 3 members"
    refused(lambda: fleet.predict(tokens, batch_size=4), f"{who} can't take a batch of (4, 3)", "out of range")
    refused(lambda: fleet.evaluate((tokens, classes), batch_size=4), f"{who} can't take", "Check its values")


class _Refusing(nn.Module):
    """Raises something that is not the data's fault."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(4, 3), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "there was not enough memory for a batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "there was not enough memory"),
        (FileNotFoundError(2, "No such file or directory"), "an error of the system"),
    ],
    ids=["memory", "allocator", "system"],
)
@pytest.mark.parametrize("strategy", ["auto", "interleaved"])
def test_what_the_machine_refuses_is_not_blamed_on_the_data(
    error: Exception, told: str, strategy: Strategy
) -> None:
    fleet = mf.Fleet({"a": _Refusing(error), "b": _Refusing(error)})
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    with pytest.raises(mf.FleetError, match=told) as caught:
        fit(fleet, (X, Y), strategy=strategy)
    assert not isinstance(caught.value, mf.InputError)
    assert "shapes and dtypes" not in str(caught.value)
