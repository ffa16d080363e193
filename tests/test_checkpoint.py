"""A run that is killed and started again ends as the unbroken one would have."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import all_weights, equal, fit, fleet_of, mlp, toy
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.history import History

X, Y = toy(24)

# Shuffles, dropout, a schedule, momentum, data of different lengths, and members that stop early.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import modelfleet as mf
from tests.helpers import fleet_of, toy

folder, kind, deadly = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Tell(mf.Callback):
    def on_step_end(self, run):
        print(run.step, flush=True)
        if run.step == deadly:
            sys.stdin.readline()  # wait for the end: the parent kills this process now

torch.manual_seed(3)
rates = mf.each([0.5, 0.0, 0.1, 0.0])
fleet = fleet_of(["a", "b", "c", "d"], dropout=0.5, momentum=0.9, lr=rates, schedule="cosine")
options = {"epochs": 5, "progress": False}
if kind == "arrays":
    data = mf.each({"a": toy(24, 1), "b": toy(13, 2), "c": toy(24, 3), "d": toy(9, 4)})
    options |= {"batch_size": 4}
else:
    x, y = toy(24)
    data = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=4, shuffle=True)
    fleet.compile("sgd", "cross_entropy", lr=rates, momentum=0.9)
callbacks = [
    mf.EarlyStopping("val_loss", patience=2, restore_best=True),
    mf.Checkpoint(folder / "run", every_steps=4),
    Tell(),
]
history = fleet.fit(data, validation=toy(24, 9), callbacks=callbacks, **options)
fleet.save(folder / "result")
(folder / "history.json").write_text(json.dumps(history.to_dict()))
print("done", flush=True)
"""


def run(folder: Path, kind: str, deadly: int = 0) -> list[str]:
    """Run the script, and kill it for real at the deadly step; gives the lines that it printed."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MODELFLEET_COMPILE": "never"}
    lines = []
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), kind, str(deadly)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if deadly and lines[-1] == str(deadly):
                process.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if deadly else 0), errors
    return lines


def result(folder: Path) -> tuple[dict[str, Any], str]:
    fleet = mf.load(folder / "result", allow_import=True)
    return all_weights(fleet), (folder / "history.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "loader"])
def test_a_killed_run_ends_as_the_unbroken_one(kind: str, tmp_path: Path) -> None:
    unbroken = run(tmp_path / "unbroken", kind)
    expected = result(tmp_path / "unbroken")
    steps = int(unbroken[-2])
    assert expected[1].count('"stopped": {}') == 0  # somebody stopped early: the lane has been narrowed

    deadly = 9 if kind == "arrays" else steps - 1  # both within an epoch, which is six steps long
    run(tmp_path / "broken", kind, deadly)
    rest = run(tmp_path / "broken", kind)
    assert rest[0] == str(4 * (deadly // 4) + 1)  # the step after the last checkpoint
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


def train(folder: Path, data: Any, die: int | None = None, **options: Any) -> tuple[dict[str, Any], History]:
    """A run from its start, as a script would have it: what it ends with."""
    torch.manual_seed(5)
    fleet = fleet_of(2, momentum=0.9, dropout=0.5)
    checkpoint = mf.Checkpoint(folder, **options.pop("checkpoint", {"every_steps": 1}))
    history = fit(fleet, data, epochs=3, callbacks=[checkpoint, Die(die)], **options)
    return all_weights(fleet), history


@pytest.mark.parametrize(
    "data",
    [lambda: loader(), lambda: mf.each([loader(1), loader(2)])],
    ids=["one loader", "a loader each"],
)
@pytest.mark.parametrize("checkpoint", [{"every_steps": 1}, {"every": 1}], ids=["steps", "epochs"])
def test_loaders_shuffle_on_as_if_unbroken(data: Any, checkpoint: dict[str, int], tmp_path: Path) -> None:
    validation = loader(7)
    expected, history = train(tmp_path / "whole", data(), validation=validation, checkpoint=checkpoint)
    for die in (2, 8, 13):  # in the first epoch, in the second, in the third
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path / "broken", data(), die, validation=validation, checkpoint=checkpoint)
        torch.rand(3)
    weights, broken = train(tmp_path / "broken", data(), validation=validation, checkpoint=checkpoint)
    assert equal(weights, expected)
    assert broken.to_dict() == history.to_dict()


def test_a_function_as_data_goes_on_where_it_was(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        for low in range(0, 24, 4):
            yield X[low : low + 4], Y[low : low + 4]

    expected, _ = train(tmp_path / "whole", batches)
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


@pytest.mark.parametrize(
    ("recipe", "options", "what"),
    [
        ({"lr": 0.2}, {}, "hyperparameters"),
        ({"optimizer": "adam"}, {}, "tasks"),
        ({}, {"epochs": 7}, "epochs"),
        ({}, {"batch_size": 3}, "steps per epoch"),
        ({"seed": 4}, {}, "seeds"),
        ({"members": ["0", "2"]}, {}, "members"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    recipe: dict[str, Any], options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    fit(fleet_of(2), (X, Y), epochs=2, callbacks=[mf.Checkpoint(tmp_path)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fleet = fleet_of(**{"members": 2, **recipe})
    weights = all_weights(fleet)
    with pytest.raises(mf.StoreError, match=rf"checkpoint of another run: its {what} are .*Give another folder"):
        fit(fleet, (X, Y), **{"epochs": 2, **options}, callbacks=[mf.Checkpoint(tmp_path)])
    assert equal(all_weights(fleet), weights)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


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


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(mf.StoreError, match="was not saved by modelfleet"):
        fit(fleet_of(1), (X, Y), callbacks=[mf.Checkpoint(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
