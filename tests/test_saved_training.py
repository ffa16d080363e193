"""Recipes and optimizer state on disk: a fleet that was loaded goes on as the unsaved one does."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests import manifests
from tests.helpers import all_weights, equal, mlp, toy
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.recipe import Missing, Recipe
from modelfleet.store import recipe_json

X, Y = (torch.tensor(array) for array in toy(22))
DATA = X.double(), Y
RATES = mf.each({"a": 0.01, "b": 0.02, "c": 0.05})
NAMES = ["a", "b", "c"]


def net(width: int = 5, dropout: float = 0.3) -> nn.Sequential:
    """A float64 network that draws random numbers."""
    return mlp(width, dropout).double()


def odd_net() -> nn.Module:
    """A network that can't be fused."""
    return nn.Sequential(Branching(), *net())


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that can be imported."""
    return F.cross_entropy(output, target) + 0.01 * output.square().mean()


def error_rate(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) != target).double().mean()


def compiled(factory: Callable[..., nn.Module] = net, **recipe: Any) -> mf.Fleet:
    fleet = mf.Fleet.build(factory, NAMES, seed=3)
    given: dict[str, Any] = {"optimizer": "adam", "loss": "cross_entropy", "lr": RATES, **recipe}
    fleet.compile(**given)
    return fleet


def fit(fleet: mf.Fleet, epochs: Any = 3, **options: Any) -> mf.History:
    return fleet.fit(DATA, epochs=epochs, batch_size=8, progress=False, **options)


def same(left: mf.Fleet, right: mf.Fleet, tolerance: float = 1e-12) -> None:
    """Both have the same members with the same weights."""
    assert left.names == right.names
    for name, own in all_weights(left).items():
        for path, tensor in all_weights(right)[name].items():
            torch.testing.assert_close(own[path], tensor, rtol=0, atol=tolerance)


def saved(fleet: mf.Fleet, folder: Path, factory: Callable[..., nn.Module] = net, **options: Any) -> mf.Fleet:
    fleet.save(folder)
    return mf.load(folder, factory, **options)


@pytest.mark.parametrize(
    "recipe",
    [
        {"schedule": "cosine", "clip_norm": mf.each([1.0, None, 0.5])},
        {
            "optimizer": "sgd",
            "momentum": mf.each([0.9, 0.5, 0.0]),
            "schedule": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.3),
        },
        {
            "optimizer": torch.optim.AdamW,
            "betas": (0.8, np.float64(0.9)),
            "weight_decay": np.float32(0.25),
            "schedule": mf.Schedule("linear", warmup=2, final=0.5),
            "metrics": ["accuracy", {"loss of torch": F.cross_entropy}],
        },
        {
            "optimizer": functools.partial(torch.optim.RMSprop, alpha=0.8),
            "loss": F.cross_entropy,
            "schedule": mf.each({"a": "step", "b": None, "c": mf.Schedule("onecycle", pct_start=0.4)}),
        },
    ],
)
@pytest.mark.parametrize("strategies", [("auto", "interleaved"), ("interleaved", "auto")])
def test_a_loaded_fleet_goes_on_as_the_unsaved_one(
    recipe: dict[str, Any], strategies: tuple[Any, Any], tmp_path: Path
) -> None:
    """Also if it then runs in other lanes: fused ones store state in another layout than `torch.optim`."""
    fleet = compiled(**recipe)
    fit(fleet, mf.each([3, 2, 3]), strategy=strategies[0])
    loaded = saved(fleet, tmp_path)
    histories = [
        fit(one, strategy=strategy) for one, strategy in ((fleet, strategies[0]), (loaded, strategies[1]))
    ]
    same(loaded, fleet)
    for name in NAMES:
        assert histories[0][name].keys() == histories[1][name].keys()
        for metric, values in histories[0][name].items():
            np.testing.assert_allclose(histories[1][name][metric], values, rtol=1e-12)


def test_a_new_process_goes_on(tmp_path: Path) -> None:
    fleet = compiled(odd_net, loss=loss, metrics=[error_rate], schedule="cosine")
    fit(fleet)
    fleet.save(tmp_path)
    script = (
        "import sys, modelfleet as mf\n"
        "from tests.test_saved_training import fit\n"
        "fleet = mf.load(sys.argv[1], allow_import=True)\n"
        "fit(fleet)\n"
        "fleet.save(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=600)
    fit(fleet)
    same(mf.load(tmp_path, odd_net), fleet)


def test_members_that_joined_left_or_were_copied(tmp_path: Path) -> None:
    fleet = compiled(lr=0.02, momentum=0.9, optimizer="sgd")
    fit(fleet)
    fleet.clone("a", as_="twin")
    fleet.drop("b")
    torch.manual_seed(0)
    fleet.add("new", net())
    fleet.compile("adam", "cross_entropy", lr=0.1, members=["c"])
    loaded = saved(fleet, tmp_path)
    for one in (fleet, loaded):
        one.clone("a", as_="second")
    torch.manual_seed(1)
    late = net()
    loaded.add("late", net())
    loaded["late"].load_state_dict(late.state_dict())
    fleet.add("late", late)  # compiled as the fleet was
    for one in (fleet, loaded):
        fit(one)
    same(loaded, fleet)
    subset = saved(fleet[["twin", "c"]], tmp_path / "subset")
    expected = fleet[["twin", "c"]]
    for one in (subset, expected):
        fit(one, 1)
    same(subset, expected)


def test_only_some_members_go_on(tmp_path: Path) -> None:
    fleet = compiled()
    fit(fleet)
    fleet.save(tmp_path)
    loaded, some = mf.load(tmp_path, net, members=["c", "a"]), fleet[["c", "a"]]
    for one in (loaded, some):
        fit(one)
    same(loaded, some)


def test_a_fleet_is_saved_before_its_first_fit_and_before_its_next(tmp_path: Path) -> None:
    fleet = compiled(schedule="cosine")
    loaded = saved(fleet, tmp_path)
    assert not list(tmp_path.glob("optimizer-*"))
    for one in (fleet, loaded):
        fit(one)
    same(loaded, fleet)
    again = saved(saved(loaded, tmp_path), tmp_path)  # loaded and saved without a step
    again.predict(DATA[0])  # lanes that predict have no say in it
    again = saved(again, tmp_path)
    again.evaluate(DATA)
    for one in (fleet, again):
        fit(one)
    same(again, fleet)


class SaveWithin(mf.Callback):
    together = True

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.epoch:
            run.fleet.save(self.folder)


@pytest.mark.parametrize("strategy", ["fused", "threads", "processes"])
def test_a_fleet_that_is_saved_in_a_callback(strategy: Any, tmp_path: Path) -> None:
    fleet = compiled()
    # One member has stopped by then, and given up its slot.
    fit(fleet, mf.each([4, 4, 1]), callbacks=[SaveWithin(tmp_path, 2)], strategy=strategy)
    loaded = mf.load(tmp_path, net)
    fit(loaded[["a", "b"]], 2)
    same(loaded, fleet)
    for one in (fleet, loaded):
        fit(one[["c"]], 1)
    same(loaded, fleet)


def test_without_the_optimizer_the_next_fit_starts_as_after_compile(tmp_path: Path) -> None:
    fleet = compiled()
    fit(fleet)
    fleet.save(tmp_path, optimizer=False)
    assert not list(tmp_path.glob("optimizer-*"))
    loaded = mf.load(tmp_path, net)
    fleet.compile("adam", "cross_entropy", lr=RATES)
    for one in (fleet, loaded):
        fit(one)
    same(loaded, fleet)


def test_a_compile_after_load_starts_anew(tmp_path: Path) -> None:
    fleet = compiled()
    fit(fleet)
    loaded = saved(fleet, tmp_path)
    for one in (fleet, loaded):
        one.compile("adam", "cross_entropy", lr=RATES)
        fit(one)
    same(loaded, fleet)


# --- what can't be saved


def test_what_cannot_be_saved_is_told_by_the_first_fit(tmp_path: Path) -> None:
    fleet = compiled(loss=lambda output, target: loss(output, target))
    fit(fleet)
    loaded = saved(fleet, tmp_path)
    assert equal(all_weights(loaded), all_weights(fleet))
    loaded.predict(DATA[0])
    told = (
        r"call compile before {}: the folder that member 'a' was loaded from has only a part of its recipe: its "
        r"loss was a lambda of tests.test_saved_training, which can't be saved. If the optimizer is the same"
    )
    with pytest.raises(mf.InputError, match=told.format("fit")):
        fit(loaded)
    with pytest.raises(mf.InputError, match=told.format("evaluate")):
        loaded.evaluate(DATA)
    assert len(loaded.plan().lanes) == 1
    # What is saved again says it again. With the same optimizer, the state that was saved goes on.
    loaded = saved(loaded, tmp_path)
    with pytest.raises(mf.InputError, match="its loss was a lambda"):
        fit(loaded)
    loaded.compile("adam", loss, lr=RATES)
    for one in (fleet, loaded):
        fit(one)
    same(loaded, fleet)


def test_with_another_optimizer_nothing_goes_on(tmp_path: Path) -> None:
    fleet = compiled(loss=lambda output, target: loss(output, target))
    fit(fleet)
    loaded = saved(fleet, tmp_path)
    fleet.compile("adamw", loss, lr=RATES)
    with pytest.warns(mf.FleetWarning, match=r"'a' \(and 2 more\) was saved with the optimizer 'adam'.*dropped"):
        loaded.compile("adamw", loss, lr=RATES)
    for one in (fleet, loaded):
        fit(one)
    same(loaded, fleet)


class Adam(torch.optim.Adam):
    """Another optimizer, with a name that is taken."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("adam", torch.optim.Adam),
        (torch.optim.Adam, "adam"),
        ("adam", functools.partial(torch.optim.Adam, eps=1e-8)),
        (functools.partial(torch.optim.Adam, eps=1e-8), "adam"),
    ],
)
def test_an_optimizer_is_the_same_by_name_and_by_class(before: Any, after: Any, tmp_path: Path) -> None:
    fleet = compiled(optimizer=before, loss=lambda output, target: loss(output, target))
    fit(fleet)
    loaded = saved(fleet, tmp_path)
    loaded.compile(after, loss, lr=RATES)
    for one in (fleet, loaded):
        fit(one)
    same(loaded, fleet)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(Adam, False), (optax.adam(0.1), False), (optax.adam, True), (functools.partial(optax.adam, b1=0.8), True)],
)
def test_an_optimizer_of_ones_own_is_not_the_one_of_that_name(optimizer: Any, expected: bool) -> None:
    incomplete = Recipe("adam", missing={"loss": Missing("was a lambda", None)})
    assert recipe_json.completes(Recipe(optimizer), incomplete, "a") == expected


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
            r"its loss was an object of torch\..*CrossEntropyLoss, which",
        ),
        (
            {"metrics": ["accuracy", lambda o, t: o.sum()]},
            r"its metrics was a list with a lambda of tests\.test_saved",
        ),
        ({"schedule": functools.partial(lambda o, n: None, n=1)}, r"its schedule was a partial with a lambda of"),
        ({"schedule": mf.each([None, None, lambda o: None])}, r"its schedule was an each with a lambda of"),
    ],
)
def test_what_was_left_out_is_named(recipe: dict[str, Any], told: str, tmp_path: Path) -> None:
    loaded = saved(compiled(**recipe), tmp_path)
    with pytest.raises(mf.InputError, match=told):
        fit(loaded)


def test_functions_are_imported_only_when_that_is_allowed(tmp_path: Path) -> None:
    fleet = compiled(loss=loss, metrics=[error_rate])
    fit(fleet)
    loaded = saved(fleet, tmp_path)
    told = r"its loss is 'tests.test_saved_training:loss', which load imports only with allow_import=True; its met"
    with pytest.raises(mf.InputError, match=told):
        fit(loaded)
    trusted = saved(loaded, tmp_path, allow_import=True)
    for one in (fleet, trusted):
        fit(one)
    same(trusted, fleet)


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "torch.optim.optimizer:torch.hub.load",
        "torch.hub:load",
        "optax:jax.numpy.sin",
        "subprocess:run",
    ],
)
def test_a_folder_cannot_have_anything_called(path: str) -> None:
    for made in ({"$import": path}, {"$partial": path, "with": {}}, {"$made": path, "with": {}}):
        recipe = recipe_json.decode({"optimizer": made, "command": "true"}, allow_import=False)
        assert recipe.optimizer is None
        assert path in recipe.missing["optimizer"].reason


def test_only_settings_are_made_by_load() -> None:
    recipe = recipe_json.decode({"schedule": {"$made": "torch.optim.sgd:SGD", "with": {}}}, allow_import=True)
    assert "can't be made from a folder" in recipe.missing["schedule"].reason


# --- other versions, and damage


def test_a_folder_of_an_earlier_version_loads(tmp_path: Path) -> None:
    fleet = compiled()
    fit(fleet)
    fleet.save(tmp_path, optimizer=False)

    def forget(manifest: dict[str, Any]) -> None:
        del manifest["recipe"], manifest["recipes"]
        for member in manifest["members"]:
            del member["recipe"]

    manifests.edit(tmp_path, forget)
    loaded = mf.load(tmp_path, net)
    assert equal(all_weights(loaded), all_weights(fleet))
    with pytest.raises(mf.InputError, match="call compile before fit: member 'a' needs a loss and an optimizer"):
        fit(loaded)


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (("recipe",), 7, "it has no recipe 7"),
        (("members", 0, "recipe"), -1, "it has no recipe -1"),
        (("members", 0, "training", "row"), 3, "the data file of member 'a' has no row 3"),
        (("members", 0, "training", "file"), "optimizer-9", "no data file 'optimizer-9' for member 'a'"),
        (("members", 0, "training", "steps"), "9", r"\['steps'\] is '9', expected a whole number"),
        (("members", 0, "training", "steps"), 10**30, r"\['steps'\] is 10+, expected a whole number from 0 to"),
        (("members", 0, "training", "epochs"), 10**30, r"\['epochs'\] is 10+, expected a whole number from 0 to"),
        (("members", 0, "training", "steps"), -1, r"\['steps'\] is -1, expected a whole number from 0"),
        (("members", 0, "training", "epochs"), -2, r"\['epochs'\] is -2, expected a whole number from 0"),
        (("members", 0, "training", "file"), "group-0", "'group-0' is no optimizer-file, which member 'a' needs"),
        (("members", 0, "file"), "optimizer-0", "'optimizer-0' is no group-file, which member 'a' needs"),
        (("recipes", 0, "lr"), True, r"\['lr'\] is True, expected a number"),
        (("recipes", 0, "lr"), {"$each": [["a", True]]}, r"\['lr'\]\['\$each'\]\[0\]\[1\] is True, expected"),
        (("recipes",), {}, r"\['recipes'\] is \{\}, expected a list"),
    ],
)
def test_a_manifest_that_does_not_add_up(where: tuple[Any, ...], value: object, told: str, tmp_path: Path) -> None:
    fleet = compiled()
    fit(fleet, 1)
    fleet.save(tmp_path)
    manifests.edit(tmp_path, manifests.put(*where, value=value))
    with pytest.raises(mf.StoreError, match=told):
        mf.load(tmp_path, net)


def test_a_recipe_that_this_version_does_not_know(tmp_path: Path) -> None:
    compiled().save(tmp_path)
    manifests.edit(tmp_path, manifests.put("recipes", 0, "optimizer", value="adam2040"))
    loaded = mf.load(tmp_path, net)
    with pytest.raises(mf.InputError, match=r"its compile can't be repeated: unknown optimizer 'adam2040'"):
        fit(loaded)


def test_a_recipe_is_plain_json(tmp_path: Path) -> None:
    compiled(clip_norm=float("inf")).save(tmp_path)
    (recipe,) = json.loads((tmp_path / "manifest.json").read_text())["recipes"]
    assert recipe["optimizer"] == "adam"
    assert recipe["lr"] == {"$each": [["a", 0.01], ["b", 0.02], ["c", 0.05]]}
    assert recipe["clip_norm"] == {"$float": "inf"}


# --- JAX, and fleets of several frameworks


def pair(rngs: Any = None) -> Any:
    params = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}
    return params, lambda params, x: jnp.tanh(x) @ params["w"]


@pytest.mark.parametrize("optimizer", ["adam", optax.sgd])
def test_jax_members_go_on(optimizer: Any, tmp_path: Path) -> None:
    fleet = mf.Fleet.build(pair, ["a", "b"])
    more: dict[str, Any] = {"momentum": 0.9} if optimizer is optax.sgd else {}
    fleet.compile(optimizer, "cross_entropy", lr=mf.each([0.1, 0.2]), **more)
    data = np.asarray(X), np.asarray(Y)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False}
    fleet.fit(data, **options)
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, pair)
    for one in (fleet, loaded):
        one.fit(data, **options)
    for name in fleet.names:
        np.testing.assert_array_equal(loaded[name][0]["w"], fleet[name][0]["w"])


def test_an_optax_object_is_compiled_again_and_goes_on(tmp_path: Path) -> None:
    optimizer = optax.chain(optax.clip(0.5), optax.adam(0.1))
    fleet = mf.Fleet.build(pair, ["a", "b"])
    fleet.compile(optimizer, "cross_entropy")
    data = np.asarray(X), np.asarray(Y)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False}
    fleet.fit(data, **options)
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, pair)
    with pytest.raises(mf.InputError, match=r"its optimizer was an? .*optax.*, which can't be saved"):
        loaded.fit(data, **options)
    loaded.compile(optimizer, "cross_entropy")
    for one in (fleet, loaded):
        one.fit(data, **options)
    for name in fleet.names:
        np.testing.assert_array_equal(loaded[name][0]["w"], fleet[name][0]["w"])


def test_an_optimizer_with_other_state_than_the_one_that_was_lost_starts_anew(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(pair, ["a"])
    fleet.compile(optax.chain(optax.clip(0.5), optax.adam(0.1)), "cross_entropy")
    data = np.asarray(X), np.asarray(Y)
    fleet.fit(data, epochs=2, batch_size=8, progress=False)
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, pair)
    loaded.compile(optax.chain(optax.trace(0.9), optax.adabelief(0.1)), "cross_entropy")
    with pytest.warns(mf.FleetWarning, match="optimizer state of 'a' does not fit the optimizer, which starts"):
        loaded.plan(data, batch_size=8)
    (lane,) = loaded._lanes
    state = lane.read(["a"], ("optimizer", "member"))
    assert int(state["member"]["step"][0]) == 0
    assert all(not np.any(np.asarray(t)) for name, t in state["optimizer"].items() if name.endswith("count"))


def test_a_fleet_of_several_frameworks_goes_on(tmp_path: Path) -> None:
    fleet = mf.Fleet({"torch": mlp(dropout=0.2), "jax": pair(), "more": mlp(dropout=0.2)}, seed=1)
    fleet.compile("adam", "cross_entropy", lr=mf.each([0.1, 0.2, 0.3]))
    data = np.asarray(X), np.asarray(Y)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False}
    fleet.fit(data, **options)
    fleet.save(tmp_path)
    made = iter([mlp(dropout=0.2), pair(), mlp(dropout=0.2)])
    loaded = mf.load(tmp_path, lambda: next(made))
    for one in (fleet, loaded):
        one.fit(data, **options)
    np.testing.assert_array_equal(loaded["jax"][0]["w"], fleet["jax"][0]["w"])
    for name in ("torch", "more"):
        for path, tensor in fleet[name].state_dict().items():
            torch.testing.assert_close(loaded[name].state_dict()[path], tensor, rtol=0, atol=1e-6)
