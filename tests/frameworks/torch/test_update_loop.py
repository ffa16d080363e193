"""An update by a loop in C is the update by tensor operations, for every optimizer, and needs no compiler."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import mlp, toy
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.frameworks.torch.cpu import c_library
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.optimizers import update_loop
from modelfleet.frameworks.torch.optimizers.rules import ALGORITHMS

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="there is no C compiler"
)
X, Y = toy(24)
RATES = mf.each([0.01, 0.02, 0.03])
# NAdam has a number for each parameter, so its parameters are not updated at once.
RECIPES: list[dict[str, Any]] = [
    *({"optimizer": name} for name in ALGORITHMS if name != "nadam"),
    {"optimizer": "sgd", "momentum": mf.each([0.9, 0.3, 0.5]), "nesterov": True, "weight_decay": 0.1},
    {"optimizer": "adam", "amsgrad": True, "maximize": True, "clip_norm": mf.each([0.1, None, 0.5])},
    {"optimizer": "rmsprop", "centered": True, "momentum": mf.each([0.0, 0.9, 0.5])},
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One cache for all tests here. Whole steps are too few to be compiled."""
    folder = tmp_path_factory.getbasetemp() / "loops"
    monkeypatch.setenv("MODELFLEET_CACHE", str(folder))
    monkeypatch.setenv("MODELFLEET_COMPILE", "auto")
    monkeypatch.setattr(update_loop, "_LOOPS", {})
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the updates that a loop has made. It is there from the first step on."""
    found: list[int] = []
    run = update_loop._run

    def watched(loop: Any, buffers: Any, columns: Any) -> None:
        found.append(buffers[0].numel())
        run(loop, buffers, columns)

    monkeypatch.setattr(c_library, "is_kept", lambda *args: True)
    monkeypatch.setattr(update_loop, "_run", watched)
    return found


def trained(recipe: dict[str, Any], dtype: torch.dtype = torch.float64, members: int = 3) -> mf.Fleet:
    def net() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(X.shape[1]), *mlp(5), nn.Linear(3, 3)).to(dtype)

    fleet = mf.Fleet.build(net, members, seed=1)
    rates: dict[str, Any] = {"lr": RATES} if members == 3 else {}
    fleet.compile(loss="cross_entropy", metrics=["accuracy"], **rates, **recipe)
    data = torch.tensor(X, dtype=dtype), torch.tensor(Y)
    fleet.fit(data, epochs=3, batch_size=8, progress=False, strategy="fused")
    return fleet


def all_weights(fleet: mf.Fleet) -> list[Tensor]:
    return [value.clone() for name in fleet.names for value in fleet[name].state_dict().values()]


def assert_close(fleet: mf.Fleet, other: mf.Fleet, tolerance: float) -> None:
    for mine, theirs in zip(all_weights(fleet), all_weights(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def by_operations(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> mf.Fleet:
    with monkeypatch.context() as patch:
        patch.setenv("MODELFLEET_COMPILE", "never")
        return trained(recipe, **options)


@needs_compiler
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(map(str, recipe)) + recipe["optimizer"])
def test_a_loop_updates_as_operations_do(
    recipe: dict[str, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_operations(recipe, monkeypatch)
    assert not calls
    assert_close(trained(recipe), expected, 1e-12)
    assert len(calls) == 9  # every step


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_a_loop_in_float32_and_in_threads(threads: int, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for grain in (16, 64):  # so many parts that the numbers are divided, or two or three, each of whole members
        monkeypatch.setattr(update_loop, "GRAIN", grain)
        expected = by_operations({"optimizer": "adamw"}, monkeypatch, dtype=torch.float32)
        assert_close(trained({"optimizer": "adamw"}, dtype=torch.float32), expected, 1e-5)
    assert calls


@needs_compiler
def test_lanes_of_any_shape_share_a_loop(calls: list[int], cache: Path) -> None:
    shutil.rmtree(cache / "updates", ignore_errors=True)
    trained({"optimizer": "adam"})
    trained({"optimizer": "adam"}, members=2)
    mine = mf.Fleet.build(lambda: nn.Linear(4, 3).double(), 5, seed=0)
    mine.compile("adam", "cross_entropy", lr=0.1)
    mine.fit((torch.tensor(X).double(), torch.tensor(Y)), epochs=1, progress=False, strategy="fused")
    assert set(calls) == {189, 126, 75}
    assert len(list((cache / "updates").iterdir())) == len(update_loop._LOOPS) == 1


@needs_compiler
def test_what_a_loop_writes_is_seen_as_a_change(calls: list[int]) -> None:
    fleet = trained({"optimizer": "adam"})
    before = fleet.predict(torch.tensor(X).double())
    fleet.fit((torch.tensor(X).double(), torch.tensor(Y)), epochs=2, progress=False, strategy="fused")
    assert calls
    after = fleet.predict(torch.tensor(X).double())
    assert all((before[name] != after[name]).any() for name in fleet.names)
    (lane,) = fleet._lanes
    assert isinstance(lane.engine, FusedEngine)
    buffer = lane.engine.state["params"]["0.weight"]
    version = buffer._version
    fleet.fit((torch.tensor(X).double(), torch.tensor(Y)), epochs=1, progress=False, strategy="fused")
    assert buffer._version > version


@needs_compiler
def test_a_loop_is_compiled_beside_the_training_once_it_is_worth_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(cache / "updates", ignore_errors=True)
    monkeypatch.setattr(update_loop, "WORTH", 10**9)
    trained({"optimizer": "adam"})
    assert not (cache / "updates").exists()
    monkeypatch.setattr(update_loop, "WORTH", 1)
    trained({"optimizer": "adam"})
    for thread in threading.enumerate():
        if thread.name == "modelfleet-updates":
            thread.join()
    (shared,) = update_loop._LOOPS.values()
    assert shared.loop is not None


def test_without_a_compiler_updates_stay_operations(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    expected = by_operations({"optimizer": "adam"}, monkeypatch)
    monkeypatch.setattr(c_library, "_command", lambda: ["/bin/false"])
    fleet = trained({"optimizer": "adam"})
    assert not calls
    assert all(torch.equal(a, b) for a, b in zip(all_weights(fleet), all_weights(expected), strict=True))


def test_never_is_never(monkeypatch: pytest.MonkeyPatch) -> None:
    by_operations({"optimizer": "adam"}, monkeypatch)
    assert not update_loop._LOOPS
