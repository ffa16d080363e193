import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelfleet as mf
from modelfleet.callbacks import Callback, Checkpoint, EarlyStopping, Run
from modelfleet.errors import InputError
from modelfleet.failures import Failure
from modelfleet.history import History

NAN = math.nan


class FakeRun:
    """A run whose members' weights are the number of epochs that they have trained."""

    def __init__(self, names: Sequence[str], epochs: int = 10) -> None:
        self.fleet = None
        self.history = History(names)
        self.epoch = 0
        self.epochs = epochs
        self.step = 0
        self.active = tuple(names)
        self.weights = dict.fromkeys(names, 0)
        self.reasons: dict[str, str] = {}
        self.saved: list[tuple[Path, int, int]] = []

    def stop(self, name: str, reason: str = "") -> None:
        self.history.stopped[name] = self.epoch
        self.reasons[name] = reason

    def snapshot(self, name: str) -> int:
        return self.weights[name]

    def restore(self, name: str, snapshot: int) -> None:
        self.weights[name] = snapshot

    def sync(self, name: str) -> int:
        return self.weights[name]

    def take(self, name: str) -> None:
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        self.saved.append((Path(folder), self.epoch, self.step))

    def train(self, values: dict[str, dict[str, float]], *callbacks: Callback, steps: int = 1) -> None:
        """One epoch, in which the active members record their values."""
        for _ in range(steps):
            self.step += 1
            for callback in callbacks:
                if callback.wants_steps:
                    callback.on_step_end(self)
        for name in self.active:
            self.weights[name] += 1
            self.history.record(name, values[name])
        self.epoch += 1
        for callback in callbacks:
            callback.on_epoch_end(self)
        self.active = tuple(name for name in self.active if name not in self.history.stopped)


def fit(callback: Callback, series: Mapping[str, Sequence[float]], metric: str = "val_loss") -> FakeRun:
    """A whole fit in which the members record these values."""
    epochs = max(map(len, series.values()))
    run = FakeRun(list(series), epochs)
    callback.on_fit_start(run)
    for epoch in range(epochs):
        run.train({name: {metric: series[name][epoch]} for name in run.active}, callback)
    callback.on_fit_end(run)
    return run


def test_a_plain_callback_does_nothing_and_wants_no_steps() -> None:
    callback = Callback()
    fit(callback, {"a": [1.0]})
    assert not callback.wants_steps
    assert (callback.state(), callback.arrays()) == ({}, {})


def test_steps_are_wanted_once_overridden() -> None:
    class Counting(Callback):
        steps = 0

        def on_step_end(self, run: Run) -> None:
            self.steps += 1

    callback = Counting()
    fit(callback, {"a": [1.0, 1.0, 1.0]})
    assert callback.steps == 3


def test_steps_are_wanted_once_set_on_the_callback_itself() -> None:
    steps: list[int] = []
    callback: Any = Callback()
    callback.on_step_end = lambda run: steps.append(run.step)
    assert callback.wants_steps
    fleet = mf.Fleet([nn.Linear(2, 1)])
    fleet.compile("sgd", "mse", lr=0.1)
    fleet.fit((torch.ones(4, 2), torch.ones(4, 1)), batch_size=2, callbacks=[callback], progress=False)
    assert steps == [1, 2]


def test_each_member_is_stopped_by_its_own_patience() -> None:
    run = fit(
        EarlyStopping(patience=2),
        {
            "better": [5, 4, 3, 2, 1],
            "worse": [1, 2, 3, 4, 5],
            "late": [5, 6, 4, 4, 4],
            "equal": [1, 1, 1, 1, 1],
        },
    )
    assert run.history.stopped == {"worse": 3, "equal": 3, "late": 5}
    assert run.reasons["worse"] == "val_loss has not improved for 2 epochs"
    assert run.weights == {"better": 5, "worse": 3, "late": 5, "equal": 3}


def test_higher_is_better_for_an_accuracy() -> None:
    series = {"rising": [0.1, 0.2, 0.3], "falling": [0.3, 0.2, 0.1]}
    assert fit(EarlyStopping("acc", patience=1), series, "acc").history.stopped == {"falling": 2}
    assert fit(EarlyStopping("acc", patience=1, mode="min"), series, "acc").history.stopped == {"rising": 2}


def test_better_is_by_more_than_min_delta() -> None:
    series = {"slow": [1.0, 0.95, 0.9, 0.85], "fast": [1.0, 0.8, 0.6, 0.4]}
    assert fit(EarlyStopping(patience=2, min_delta=0.12), series).history.stopped == {"slow": 3}


def test_nan_is_never_better() -> None:
    series = {"always": [NAN, NAN, NAN, NAN], "once": [3.0, NAN, 2.0, NAN], "first": [NAN, 2.0, 1.0, 0.5]}
    run = fit(EarlyStopping(patience=2, restore_best=True), series)
    assert run.history.stopped == {"always": 2}
    assert run.weights == {"always": 2, "once": 3, "first": 4}


def test_restore_best_gives_the_best_weights_back_on_stopping_and_at_the_end() -> None:
    run = fit(
        EarlyStopping(patience=2, restore_best=True),
        {"stopped": [2, 1, 3, 4, 5], "unstopped": [5, 4, 3, 2, 9]},
    )
    assert run.history.stopped == {"stopped": 4}
    assert run.weights == {"stopped": 2, "unstopped": 4}
    assert run.history.kept == {"stopped": 2, "unstopped": 4}
    assert run.history.ranking() == [("stopped", 1), ("unstopped", 2)]


def test_restore_best_comes_before_the_slot_is_freed() -> None:
    callback, run = EarlyStopping(patience=1, restore_best=True), FakeRun(["a"])
    for value in (1.0, 2.0):
        run.train({"a": {"val_loss": value}}, callback)
    assert run.active == ()
    assert run.weights == {"a": 1}
    assert callback.arrays() == {}  # nor is the memory held any longer


def test_without_restore_best_no_weights_are_touched_or_held() -> None:
    callback = EarlyStopping(patience=1)
    run = fit(callback, {"a": [1, 2, 3]})
    assert run.weights == {"a": 2}
    assert run.history.kept == {}
    assert callback.arrays() == {}


def test_a_member_that_failed_gets_its_best_weights_too() -> None:
    callback = EarlyStopping(restore_best=True)
    run = FakeRun(["a", "b"], 2)
    callback.on_fit_start(run)
    run.train({"a": {"val_loss": 1.0}, "b": {"val_loss": 1.0}}, callback)
    run.history.fail("b", Failure(2, 2, "loss is NaN"))
    run.weights["b"] = 99
    run.active = ("a",)
    run.train({"a": {"val_loss": 0.5}}, callback)
    callback.on_fit_end(run)
    assert run.weights == {"a": 2, "b": 1}


def test_an_unrecorded_metric_is_an_error_that_names_the_recorded_ones() -> None:
    with pytest.raises(
        InputError, match=r"'val_loss'.*member 'a'. Recorded: loss. Instead, give fit validation data"
    ):
        fit(EarlyStopping(), {"a": [1.0]}, "loss")


@pytest.mark.parametrize(
    ("metric", "metrics", "message"),
    [
        ("val_loss", ["loss"], "this fit will not record. Recorded: loss. Instead, give fit validation data, or"),
        ("val_acc", ["loss", "val_loss", "val_accuracy"], "watch 'val_accuracy', or another one of these"),
        ("f1", ["loss"], "Recorded: loss. Instead, watch one of these"),
    ],
)
def test_a_metric_that_will_not_be_recorded_is_refused_before_the_first_step(
    metric: str, metrics: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        EarlyStopping(metric).check_metrics(metrics)


def test_a_metric_that_will_be_recorded_is_accepted() -> None:
    EarlyStopping("val_loss").check_metrics(["loss", "val_loss"])
    Checkpoint("folder").check_metrics([])
    Callback().check_metrics([])


def test_a_second_fit_starts_afresh() -> None:
    callback = EarlyStopping(patience=2)
    fit(callback, {"a": [1.0, 1.0]})
    assert fit(callback, {"a": [7.0, 6.0, 5.0]}).history.stopped == {}


@pytest.mark.parametrize("broken_after", [1, 2, 3, 4])
@pytest.mark.parametrize("restored_first", [True, False])
def test_a_resumed_run_stops_and_restores_as_the_unbroken_one(broken_after: int, restored_first: bool) -> None:
    series = {"a": [3, 2, 4, 4, 4, 4], "b": [1, NAN, 2, 2, 2, 2], "c": [math.inf, 5, 4, 3, 2, 1]}

    def make() -> EarlyStopping:
        return EarlyStopping(patience=3, restore_best=True)

    unbroken = fit(make(), series)

    run, callback = FakeRun(list(series), 6), make()
    callback.on_fit_start(run)
    for epoch in range(6):
        if epoch == broken_after:
            state = json.loads(json.dumps(callback.state(), allow_nan=False))
            arrays = callback.arrays()
            callback = make()
            if not restored_first:
                callback.on_fit_start(run)
            callback.restore_state(state)
            callback.restore_arrays(arrays)
            if restored_first:
                callback.on_fit_start(run)
        run.train({name: {"val_loss": series[name][epoch]} for name in run.active}, callback)
    callback.on_fit_end(run)
    assert run.weights == unbroken.weights
    assert run.history.to_dict() == unbroken.history.to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience is 0, expected a whole number of epochs, 1 or more"),
        ({"min_delta": -0.1}, "min_delta is -0.1"),
        ({"min_delta": NAN}, "min_delta is nan"),
        ({"mode": "most"}, "unknown mode 'most'"),
        ({"metric": "depth"}, 'mode="min" or mode="max"'),
    ],
)
def test_bad_arguments_of_early_stopping_are_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EarlyStopping(**arguments)  # pyrefly: ignore[bad-argument-type]


def saves(callback: Checkpoint, epochs: int, steps: int) -> list[tuple[int, int]]:
    run = FakeRun(["a"], epochs)
    callback.on_fit_start(run)
    for _ in range(epochs):
        run.train({"a": {"loss": 1.0}}, callback, steps=steps)
    callback.on_fit_end(run)
    assert {folder for folder, _, _ in run.saved} == {Path("kept/here").absolute()}
    return [(epoch, step) for _, epoch, step in run.saved]


def test_checkpoints_are_kept_by_epochs_and_after_the_last() -> None:
    assert saves(Checkpoint("kept/here"), 3, 2) == [(1, 2), (2, 4), (3, 6)]
    assert saves(Checkpoint("kept/here", every=2), 5, 1) == [(2, 2), (4, 4), (5, 5)]


def test_checkpoints_are_kept_by_steps_instead_and_after_the_last_epoch() -> None:
    assert saves(Checkpoint("kept/here", every_steps=3), 2, 5) == [(0, 3), (1, 6), (1, 9), (2, 10)]


def test_a_checkpoint_by_epochs_wants_no_steps() -> None:
    assert not Checkpoint("folder").wants_steps
    assert Checkpoint("folder", every_steps=10).wants_steps


def test_bad_arguments_of_checkpoint_are_refused_at_once() -> None:
    with pytest.raises(InputError, match="every is 0"):
        Checkpoint("folder", every=0)
    with pytest.raises(InputError, match="every_steps is 0"):
        Checkpoint("folder", every_steps=0)
