"""A run that is killed and started again ends as the unbroken one would have."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import manifests
from tests.helpers import all_weights, equal, fit, fleet_of, mlp, toy
from tests.manifests import put
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.history import History

X, Y = toy(24)


def script(folder: Path, kind: str, deadly: int = 0) -> list[int]:
    """Shuffles, dropout, a schedule, momentum, data of different lengths, and a member that stops early.

    Gives the steps that were taken; at the deadly one it waits for its end.
    """

    class Tell(mf.Callback):
        def on_step_end(self, run: Any) -> None:
            steps.append(run.step)
            if run.step == deadly:
                print("kill me", flush=True)
                sys.stdin.readline()

    steps: list[int] = []
    torch.manual_seed(3)
    rates = mf.each([0.5, 0.0, 0.1])
    dropout = 0.5 if kind == "arrays" else 0.0
    fleet = fleet_of(["a", "b", "c"], dropout=dropout, momentum=0.9, lr=rates, schedule="cosine")
    options: dict[str, Any] = {"epochs": 5}
    if kind == "arrays":
        data: Any = mf.each({"a": toy(24, 1), "b": toy(12, 2), "c": toy(24, 3)})
        options |= {"batch_size": 4}
    else:
        data = loader()
    callbacks = [
        mf.EarlyStopping("val_loss", patience=2, restore_best=True),
        mf.Checkpoint(folder / "run", every_steps=4),
        Tell(),
    ]
    history = fit(fleet, data, validation=toy(24, 9), callbacks=callbacks, **options)
    fleet.save(folder / "result")
    (folder / "history.json").write_text(json.dumps(history.to_dict()))
    return steps


def killed(folder: Path, kind: str, deadly: int) -> None:
    """Run the script in a process of its own, and kill that for real at the deadly step."""
    call = f"import pathlib; from tests.test_checkpoint import script; script(pathlib.Path({str(folder)!r}), "
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", f"{call}{kind!r}, {deadly})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "kill me\n", process.communicate()[1]
        process.kill()
        process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL


def result(folder: Path) -> tuple[dict[str, Any], str]:
    fleet = mf.load(folder / "result", allow_import=True)
    return all_weights(fleet), (folder / "history.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "loader"])
def test_a_killed_run_ends_as_the_unbroken_one(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    steps = script(tmp_path / "unbroken", kind)
    expected = result(tmp_path / "unbroken")
    assert expected[1].count('"stopped": {}') == 0  # somebody stopped early: the lane has been narrowed

    deadly = 9 if kind == "arrays" else steps[-1] - 1  # both within an epoch, which is six steps long
    killed(tmp_path / "broken", kind, deadly)
    rest = script(tmp_path / "broken", kind)
    assert rest[0] == 4 * (deadly // 4) + 1  # the step after the last checkpoint
    weights, history = result(tmp_path / "broken")
    assert equal(weights, expected[0])
    assert history == expected[1]


# --- the same within one process: an error in place of a kill


class Die(mf.Callback):
    """Breaks the fit off after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            raise RuntimeError("killed")


def loader(seed: int = 0) -> Any:
    x, y = toy(24, seed)
    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=4, shuffle=True)


def train(
    folder: Path | None, data: Any, die: int | None = None, **options: Any
) -> tuple[dict[str, Any], History]:
    """A run from its start, as a script would have it: what it ends with. Without a folder nothing is kept."""
    torch.manual_seed(5)
    fleet = fleet_of(2, momentum=0.9)
    every = options.pop("checkpoint", {"every_steps": 1})
    callbacks = [mf.Checkpoint(folder, **every), Die(die)] if folder else []
    history = fit(fleet, data, epochs=3, callbacks=callbacks, **options)
    return all_weights(fleet), history


LOADERS: dict[str, Callable[[], Any]] = {
    "one loader": loader,
    "a loader each": lambda: mf.each([loader(1), loader(2)]),
}


@cache
def unbroken(kind: str) -> tuple[dict[str, Any], History]:
    return train(None, LOADERS[kind](), validation=loader(7))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("checkpoint", [{"every_steps": 1}, {"every": 1}], ids=["steps", "epochs"])
def test_loaders_shuffle_on_as_if_unbroken(kind: str, checkpoint: dict[str, int], tmp_path: Path) -> None:
    given: dict[str, Any] = {"validation": loader(7), "checkpoint": checkpoint}
    for die in (2, 13):  # in the first epoch, and in the third: the second would begin right by chance
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path, LOADERS[kind](), die, **given)
        torch.rand(3)
    weights, broken = train(tmp_path, LOADERS[kind](), **given)
    expected, history = unbroken(kind)
    assert equal(weights, expected)
    assert broken.to_dict() == history.to_dict()


def test_a_function_as_data_goes_on_where_it_was(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        for low in range(0, 24, 4):
            yield X[low : low + 4], Y[low : low + 4]

    expected, _ = train(None, batches)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "broken", batches, 9)
    assert equal(train(tmp_path / "broken", batches)[0], expected)


def test_a_finished_run_returns_at_once(tmp_path: Path) -> None:
    class Count(mf.Callback):
        steps = 0

        def on_step_end(self, run: Any) -> None:
            self.steps += 1

    results = []
    for _ in range(2):
        fleet, count = fleet_of(2), Count()
        history = fit(fleet, (X, Y), epochs=2, callbacks=[mf.Checkpoint(tmp_path), count])
        results.append((all_weights(fleet), history.to_dict(), count.steps))
    (first, first_history, steps), (second, second_history, again) = results
    assert (steps, again) == (2, 0)
    assert equal(first, second)
    assert first_history == second_history


def test_a_run_whose_first_checkpoint_was_not_finished_begins_anew(tmp_path: Path) -> None:
    expected, _ = train(None, (X, Y))
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, (X, Y), 2)
    token = next(tmp_path.glob("lane-0.*")).name.split(".")[1]
    partial = tmp_path / f"{token}.partial"
    partial.mkdir()
    (tmp_path / "manifest.json").rename(partial / "manifest.json")  # as if it was killed in its first save
    assert equal(train(tmp_path, (X, Y))[0], expected)
    assert not partial.exists()
    (tmp_path / "manifest.json").unlink()  # this is no unfinished save
    with pytest.raises(mf.StoreError, match=r"holds no manifest\.json"):
        train(tmp_path, (X, Y))


def test_a_finished_run_leaves_nothing_of_killed_saves(tmp_path: Path) -> None:
    train(tmp_path, (X, Y))
    whole = sorted(tmp_path.iterdir())
    lane = next(tmp_path.glob("lane-0.*"))
    shutil.copy(lane, tmp_path / f"lane-0.{'0' * 16}.safetensors")  # killed before it was deleted
    train(tmp_path, (X, Y))
    assert sorted(tmp_path.iterdir()) == whole


def test_a_second_fit_with_the_same_folder_begins_where_the_first_ended(tmp_path: Path) -> None:
    plain, kept = fleet_of(2, momentum=0.9), fleet_of(2, momentum=0.9)
    for epochs in (2, 3, 3):
        expected = fit(plain, (X, Y), epochs=epochs)
        history = fit(kept, (X, Y), epochs=epochs, callbacks=[mf.Checkpoint(tmp_path)])
        assert history.to_dict() == expected.to_dict()
    assert equal(all_weights(kept), all_weights(plain))


def test_a_script_of_two_fits_that_dies_in_the_second_ends_as_if_unbroken(tmp_path: Path) -> None:
    def script(folder: Path, die: int | None = None) -> dict[str, Any]:
        fleet = fleet_of(2, momentum=0.9)
        fit(fleet, (X, Y), epochs=2, callbacks=[mf.Checkpoint(folder)])
        fit(fleet, (X, Y), epochs=2, batch_size=4, callbacks=[mf.Checkpoint(folder, every_steps=1), Die(die)])
        return all_weights(fleet)

    expected = script(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        script(tmp_path / "broken", 8)
    assert equal(script(tmp_path / "broken"), expected)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run: not to be changed."""
    folder = tmp_path_factory.mktemp("ended")
    fit(fleet_of(2), (X, Y), epochs=2, callbacks=[mf.Checkpoint(folder)])
    return folder


@pytest.mark.parametrize(
    ("recipe", "options", "what"),
    [
        ({"lr": 0.2}, {}, "hyperparameters"),
        ({"optimizer": "adam"}, {}, "tasks"),
        ({}, {"epochs": 7}, "epochs"),
        ({}, {"batch_size": 3}, "batches"),
        ({"seed": 4}, {}, "seeds"),
        ({"members": ["0", "2"]}, {}, "members"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    recipe: dict[str, Any], options: dict[str, Any], what: str, ended: Path, tmp_path: Path
) -> None:
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fleet = fleet_of(**{"members": 2, **recipe})
    weights = all_weights(fleet)
    with pytest.raises(mf.StoreError, match=rf"checkpoint of another run: its {what} are .*Give another folder"):
        fit(fleet, (X, Y), **{"epochs": 2, **options}, callbacks=[mf.Checkpoint(tmp_path)])
    assert equal(all_weights(fleet), weights)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def one(output: Any, target: Any) -> torch.Tensor:
    return (output - torch.nn.functional.one_hot(target, 3)).square().mean()


def edited(output: Any, target: Any) -> torch.Tensor:
    return (output - torch.nn.functional.one_hot(target, 3)).abs().mean()


edited.__name__ = edited.__qualname__ = "one"  # the same function, in a script that was edited meanwhile


class Net(torch.nn.Sequential):
    """Layers of any dtype, for float32 data."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.to(next(self.parameters()).dtype)).float()


def layers(*sizes: int, bias: bool = True, frozen: bool = False, first: str = "l0") -> Callable[[], Net]:
    def make() -> Net:
        made = [torch.nn.Linear(*pair, bias=bias) for pair in pairwise(sizes)]
        made[0].requires_grad_(not frozen)
        named: Any = OrderedDict((f"l{k}" if k else first, one) for k, one in enumerate(made))
        return Net(named)

    return make


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "wider": (
        {"model": layers(4, 9, 3)},
        r"weights are 'l0.weight' \(.*6.*\) float32 of '0', here they are 'l0.weight' \(.*9.*\) float32 of '0'",
    ),
    "deeper": ({"model": layers(4, 6, 6, 3)}, "weights are .* of '0', here they are"),
    "without biases": (
        {"model": layers(4, 6, 3, bias=False)},
        "weights are 'l0.bias' .* of '0', here they are without 'l0.bias' of '0'",
    ),
    "renamed": (
        {"model": layers(4, 6, 3, first="in")},
        "weights are 'l0.weight' .*, here they are without 'l0.weight'",
    ),
    "frozen": (
        {"model": layers(4, 6, 3, frozen=True)},
        "weights are 'l0.weight' .*, here they are a frozen 'l0.weight'",
    ),
    "bfloat16": (
        {"model": lambda: layers(4, 6, 3)().bfloat16()},
        "weights are .* float32 of '0', here they are .* bfloat16 of '0'",
    ),
    "another schedule": ({"schedule": "linear"}, "schedules are .*'cosine'.*here they are .*'linear'"),
    "another schedule's option": ({"schedule": mf.Schedule("cosine", final=0.5)}, "schedules are .*Schedule"),
    "a factory of schedulers": (
        {"schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
        "schedules are .*StepLR",
    ),
    "an edited loss": ({"loss": edited}, "tasks are"),
    "another loss": ({"loss": "cross_entropy"}, "tasks are"),
    "another momentum": ({"momentum": 0.5}, "hyperparameters are"),
    "another batch size": ({"batch_size": 13}, "batches are"),
    "no shuffle": ({"shuffle": False}, "batches are"),
}


@pytest.mark.parametrize(("change", "told"), OTHERS.values(), ids=list(OTHERS))
def test_a_run_does_not_go_on_with_something_else(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    def run(**change: Any) -> None:
        given: dict[str, Any] = {"model": layers(4, 6, 3), "batch_size": 12, "shuffle": True, "loss": one}
        given |= {"schedule": "cosine", "momentum": 0.9, **change}
        data = {name: given.pop(name) for name in ("batch_size", "shuffle")}
        fleet = mf.Fleet.build(given.pop("model"), 2)
        fleet.compile("sgd", given.pop("loss"), lr=0.01, **given)
        fit(fleet, (X, Y), epochs=2, callbacks=[mf.Checkpoint(tmp_path)], **data)

    run()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(mf.StoreError, match=rf"checkpoint of another run: its ({told})"):
        run(**change)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run()


def test_a_run_of_fused_members_does_not_go_on_with_one_that_is_wider(tmp_path: Path) -> None:
    def run(*widths: int) -> None:
        fleet = mf.Fleet({str(k): layers(4, width, 3)() for k, width in enumerate(widths)})
        fleet.compile("sgd", "cross_entropy", lr=0.01)
        fit(fleet, (X, Y), epochs=2, callbacks=[mf.Checkpoint(tmp_path)])

    run(6, 6)
    with pytest.raises(mf.StoreError, match=r"its weights are 'l0.weight' .* of '1', here they are 'l0"):
        run(6, 9)


def test_a_second_fit_may_train_other_layers_with_the_same_folder(tmp_path: Path) -> None:
    fleet = fleet_of(2)
    fit(fleet, (X, Y), epochs=2, callbacks=[mf.Checkpoint(tmp_path)])
    fleet["1"][0].requires_grad_(False)
    before = all_weights(fleet)
    history = fit(fleet, (X, Y), epochs=1, callbacks=[mf.Checkpoint(tmp_path)])
    assert len(history["0"]["loss"]) == 1
    assert torch.equal(fleet["1"][0].weight, before["1"]["0.weight"])
    assert not torch.equal(fleet["1"][2].weight, before["1"]["2.weight"])


def test_resume_false_begins_anew(tmp_path: Path) -> None:
    first, second = fleet_of(2), fleet_of(2)
    fit(first, (X, Y), callbacks=[mf.Checkpoint(tmp_path)])
    history = fit(second, (X, Y), epochs=2, callbacks=[mf.Checkpoint(tmp_path, resume=False)])
    assert len(history["0"]["loss"]) == 2


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    def mixed() -> mf.Fleet:
        fleet = mf.Fleet.build(mlp, ["a", "wide"], width=mf.each([6, 9]))
        fleet.compile("sgd", "cross_entropy", lr=0.1)
        return fleet

    def go(fleet: mf.Fleet, die: int | None = None) -> None:
        fit(fleet, (X, Y), batch_size=4, callbacks=[mf.Checkpoint(tmp_path, every_steps=1), Die(die)])

    with pytest.raises(RuntimeError, match="killed"):
        go(mixed(), 3)
    path = next(tmp_path.glob("lane-1.*.safetensors"))
    path.write_bytes(path.read_bytes()[:-4])
    fleet = mixed()
    before = all_weights(fleet)
    with pytest.raises(mf.StoreError, match=r"lane-1.* bytes, expected"):
        go(fleet)
    assert equal(all_weights(fleet), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("epoch", value="two"), r"\['epoch'\] is 'two', expected a whole number"),
        (put("lanes", value=[]), "its lanes have other members than its run"),
        (put("lanes", 0, "steps", value=[1]), "it has 1 steps of a lane, expected 2"),
        (put("lanes", 0, "slots", value=[0, 7]), r"its slots are \[0, 7\], for 2 members"),
        (put("lanes", 0, "on", value=[1, 0]), r"\['on'\]\[0\] is 1, expected true or false"),
        (put("lanes", 0, "place", value=4), "a lane is on device 4 of"),
        (put("positions", value=[]), "it has 0 positions, expected 1"),
        (put("run", "seeds", value=[[1]]), "it has 1 seeds, expected 2"),
        (put("run", "members", value=[["0", "x"]]), "its lanes have other members than its run"),
        (put("sharing", value="telepathy"), "its lanes share a device by 'telepathy'"),
        (put("history", value=None), r"\['history'\] is None, expected a mapping"),
        (put("history", "metrics", "0", "loss", value=3), r"\['loss'\] is 3, expected a list"),
        (put("history", "metrics", "0", "loss", value=["often"]), "the stored history can't be read"),
        (put("history", "failed", "0", value={"epoch": 1}), r"\['0'\] has no 'step'"),
        (put("history", "stopped", "x", value=1), "its history has no member 'x'"),
        (lambda manifest: manifest["files"].pop("lane-0"), "it has no data file of lane 0"),
        (put("callbacks", value=[]), "it has 0 callbacks, this fit has 1"),
    ],
)
def test_a_checkpoint_that_was_edited_is_refused_and_changes_nothing(
    change: Callable[[dict[str, Any]], None], message: str, ended: Path, tmp_path: Path
) -> None:
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    manifests.edit(tmp_path, change)
    fleet = fleet_of(2)
    before = all_weights(fleet)
    with pytest.raises(mf.StoreError, match=message):
        fit(fleet, (X, Y), epochs=2, callbacks=[mf.Checkpoint(tmp_path)])
    assert equal(all_weights(fleet), before)


def test_a_checkpoint_without_checksums_goes_on(tmp_path: Path) -> None:
    expected, _ = train(None, (X, Y), batch_size=4)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, (X, Y), 9, batch_size=4)
    manifests.older(tmp_path)
    assert equal(train(tmp_path, (X, Y), batch_size=4)[0], expected)


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(mf.StoreError, match="was not saved by modelfleet"):
        fit(fleet_of(1), (X, Y), callbacks=[mf.Checkpoint(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
