"""One member's trouble stays its own, and Ctrl-C loses nothing."""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, close, equal, fit, fleet_of, toy, weights

import modelfleet as mf
from modelfleet import testing
from modelfleet.failures import Failure
from modelfleet.types import Strategy

X, Y = toy(24)
BROKEN, STEP = 13, 4  # a row that holds NaN, and the step that sees it: rows 0-3, 4-7, 8-11, 12-15


def with_nan() -> tuple[np.ndarray, np.ndarray]:
    x = X.copy()
    x[BROKEN] = np.nan
    return x, Y


def alone(start: Any, name: str, data: Any, **options: Any) -> Any:
    recipe: dict[str, Any] = {"optimizer": "sgd", "loss": "cross_entropy", "lr": 0.1, "momentum": 0.9}
    return testing.alone(start, name, data, batch_size=4, **recipe, **options)


# --- numbers that go bad


def test_a_member_with_nan_data_keeps_the_weights_of_its_last_good_step() -> None:
    fleet = fleet_of(["a", "sick", "c"], momentum=0.9)
    start = copy.deepcopy(fleet["sick"])
    data = {"a": (X, Y), "sick": with_nan(), "c": (X, Y)}
    history = fit(fleet, mf.each(data), epochs=3, batch_size=4, shuffle=False)
    assert history.failed == {"sick": Failure(1, STEP, "its loss became NaN or infinite")}
    good = (X[: 4 * (STEP - 1)], Y[: 4 * (STEP - 1)])
    expected = alone(start, "sick", good, shuffle=False)
    assert testing.largest_difference(fleet["sick"], expected)[0] < 1e-5
    assert history["sick"] == {}
    assert len(history["a"]["loss"]) == len(history["c"]["loss"]) == 3


@pytest.mark.parametrize(
    ("rows", "sick"),
    [
        pytest.param({"a": 24, "b": 24, "c": 17, "d": 24}, {"b"}, id="uneven batches"),
        pytest.param({"a": 24, "b": 24, "c": 24, "d": 24}, {"b", "c", "d"}, id="most of them fail"),
    ],
)
def test_the_others_are_bit_for_bit_what_they_would_have_been(rows: dict[str, int], sick: set[str]) -> None:
    widths: list[int] = []

    class Watch(mf.Callback):
        def on_step_end(self, run: Any) -> None:
            widths.append(run.runs[0].lane.width)

    well = [name for name in rows if name not in sick]
    results = []
    for trouble in (True, False):
        fleet = fleet_of(list(rows), momentum=0.9, dropout=0.5)
        data = {name: (X[:count], Y[:count]) for name, count in rows.items()}
        if trouble:
            data |= dict.fromkeys(sick, with_nan())
        history = fit(fleet, mf.each(data), validation=(X, Y), epochs=3, batch_size=4, callbacks=[Watch()])
        assert set(history.failed) == (sick if trouble else set())
        results.append(({name: weights(fleet[name]) for name in well}, {name: history[name] for name in well}))
    (broken, broken_history), (whole, whole_history) = results
    assert equal(broken, whole)
    assert broken_history == whole_history
    assert set(widths) == {4}  # a failed member's slot is not freed: another width may round differently


def test_a_learning_rate_that_explodes_is_named_with_epoch_and_step() -> None:
    data = X, X[:, :3]
    fleet = fleet_of(["calm", "wild"], loss="mse", lr=mf.each([0.1, 1e7]))
    start = copy.deepcopy(fleet["wild"])
    history = fit(fleet, data, epochs=2, batch_size=4)
    failure = history.failed["wild"]
    assert (failure.epoch, "NaN or infinite" in failure.reason) == (1, True)
    assert 2 <= failure.step <= 6
    assert all(torch.isfinite(tensor).all() for tensor in weights(fleet["wild"]).values())
    # The same member, alone and stopped after its last good step.
    other = mf.Fleet({"wild": start})
    other.compile("sgd", "mse", lr=1e7)
    fit(other, data, batch_size=4, callbacks=[StopAfter(failure.step - 1)])
    assert testing.largest_difference(other["wild"], fleet["wild"])[0] < 1e-4
    assert history.best("loss") == "calm"


def test_a_failed_member_can_be_trained_again() -> None:
    fleet = fleet_of(["a", "sick"], momentum=0.9)
    fit(fleet, mf.each({"a": (X, Y), "sick": with_nan()}), epochs=2, batch_size=4, shuffle=False)
    before = weights(fleet["sick"])
    history = fit(fleet, (X, Y), batch_size=4)
    assert not history.failed
    assert not equal(weights(fleet["sick"]), before)
    again = fit(fleet, mf.each({"a": (X, Y), "sick": with_nan()}), batch_size=4, shuffle=False)
    assert again.failed["sick"] == Failure(1, STEP, "its loss became NaN or infinite")


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "threads"])
def test_a_fit_in_which_all_go_nan_says_so_and_what_often_helps(strategy: Strategy) -> None:
    fleet = fleet_of(2)
    with pytest.raises(mf.AllFailedError) as caught:
        fit(fleet, with_nan(), epochs=3, batch_size=4, shuffle=False, strategy=strategy)
    told = str(caught.value).replace("member '1'", "member '0'")  # either may be the first
    assert told == (
        "member '0' failed in epoch 1, step 4: its loss became NaN or infinite. Often a lower lr helps, "
        "or clip_norm=1.0; look for NaN in the data. All 2 members failed: the history of this error has "
        "every reason."
    )
    history = caught.value.history
    assert set(history.failed) == {"0", "1"}
    with pytest.raises(mf.InputError, match=r"2 of 2 members failed.*often a lower lr helps"):
        history.best("loss")


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "threads"])
def test_a_fit_in_which_the_data_of_all_raise_says_that_and_nothing_of_learning_rates(strategy: Strategy) -> None:
    error = OSError("the disk is gone")
    fleet = fleet_of(2)
    with pytest.raises(mf.AllFailedError, match="step 3: its data raised OSError: the disk is gone") as caught:
        fit(fleet, mf.each([breaking(2, error), breaking(2, error)]), epochs=3, strategy=strategy)
    assert caught.value.__cause__ is error
    assert "lr" not in str(caught.value)
    with pytest.raises(mf.InputError, match=r"history.failed has the reasons\.$"):
        caught.value.history.best("loss")


def test_what_raised_is_told_before_numbers_that_went_bad() -> None:
    def sick() -> Iterator[Any]:
        x, y = with_nan()
        for low in range(0, 24, 4):
            yield x[low : low + 4], y[low : low + 4]

    data = mf.each([sick, breaking(5, OSError("the disk is gone"))])
    with pytest.raises(mf.AllFailedError, match=r"^member '1' failed in epoch 1, step 6: its data raised OSError"):
        fit(fleet_of(2), data)


# --- data that raise


def breaking(after: int, error: Exception | None) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        for number in range(6):
            if number == after and error is not None:
                raise error
            yield X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4]

    return batches


def test_a_member_whose_loader_raises_is_set_aside_alone() -> None:
    results = []
    for error in (OSError("the disk is gone"), None):
        fleet = fleet_of(["a", "b", "c"], momentum=0.9)
        start = copy.deepcopy(fleet["b"])
        loaders = [breaking(9, None), breaking(2, error), breaking(9, None)]
        history = fit(fleet, mf.each(loaders), epochs=2, strategy="fused")
        results.append((all_weights(fleet), history, fleet, start))
    (broken, history, fleet, start), (whole, *_) = results
    assert history.failed == {"b": Failure(1, 3, "its data raised OSError: the disk is gone")}
    assert equal(broken["a"], whole["a"])
    assert equal(broken["c"], whole["c"])
    expected = alone(start, "b", (X[:8], Y[:8]), shuffle=False)
    assert testing.largest_difference(fleet["b"], expected)[0] < 1e-5
    # The steps are counted anew in every fit.
    again = fit(fleet, mf.each([breaking(9, None), breaking(1, OSError("again")), breaking(9, None)]))
    assert again.failed == {"b": Failure(1, 2, "its data raised OSError: again")}


def test_labels_out_of_range_in_a_members_loader_are_its_own_trouble() -> None:
    def mislabelled() -> Iterator[Any]:
        yield X[:4], Y[:4]
        yield X[4:8], Y[4:8] + 3

    fleet = fleet_of(["a", "b"])
    history = fit(fleet, mf.each([breaking(9, None), mislabelled]))
    assert set(history.failed) == {"b"}
    assert "the model gives 3 classes" in history.failed["b"].reason
    assert len(history["a"]["loss"]) == 1


def test_validation_data_that_raise_set_the_member_aside() -> None:
    fleet = fleet_of(["a", "b"])
    validation = mf.each([breaking(9, None), breaking(1, OSError("gone"))])
    history = fit(fleet, (X, Y), validation=validation, epochs=2, batch_size=4)
    assert history.failed == {"b": Failure(1, 6, "its validation data raised OSError: gone")}
    assert len(history["a"]["val_loss"]) == 2


def test_a_shared_loader_that_raises_ends_the_fit_and_keeps_the_weights() -> None:
    fleet = fleet_of(["a", "b"], momentum=0.9)
    starts = {name: copy.deepcopy(fleet[name]) for name in fleet.names}
    with pytest.raises(OSError, match="gone"):
        fit(fleet, breaking(2, OSError("gone")))
    for name, start in starts.items():
        expected = alone(start, name, (X[:8], Y[:8]), shuffle=False)
        assert testing.largest_difference(fleet[name], expected)[0] < 1e-5


def test_evaluate_and_predict_name_the_member_whose_data_raise() -> None:
    fleet = fleet_of(["a", "b"])
    data = mf.each([breaking(9, None), breaking(1, OSError("gone"))])
    for verb in (fleet.evaluate, fleet.predict):
        with pytest.raises(mf.InputError, match="data of member 'b' raised OSError: gone"):
            verb(data)


def test_a_callback_that_raises_keeps_what_was_trained() -> None:
    class Faulty(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            raise RuntimeError("my own mistake")

    fleet, whole = fleet_of(2), fleet_of(2)
    with pytest.raises(RuntimeError, match="my own mistake"):
        fit(fleet, (X, Y), epochs=3, callbacks=[Faulty()])
    fit(whole, (X, Y))
    assert equal(all_weights(fleet), all_weights(whole))


# --- Ctrl-C


class StopAfter(mf.Callback):
    """Presses Ctrl-C after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, run: Any) -> None:
        if run.step == self.steps:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_stops_after_the_step_and_keeps_everything() -> None:
    fleet = fleet_of(["a", "b"], momentum=0.9)
    starts = {name: copy.deepcopy(fleet[name]) for name in fleet.names}
    before = signal.getsignal(signal.SIGINT)
    history = fit(fleet, (X, Y), epochs=5, batch_size=4, shuffle=False, callbacks=[StopAfter(8)])
    assert signal.getsignal(signal.SIGINT) is before
    assert len(history["a"]["loss"]) == 1  # six steps an epoch: one whole epoch and two steps
    rows = np.r_[0:24, 0:8]
    for name, start in starts.items():
        expected = alone(start, name, (X[rows], Y[rows]), shuffle=False)
        assert testing.largest_difference(fleet[name], expected)[0] < 1e-5
    again = fit(fleet, (X, Y), batch_size=4)
    assert len(again["a"]["loss"]) == 1


def test_a_failure_before_ctrl_c_is_named_too() -> None:
    fleet = fleet_of(["a", "sick"])
    data = mf.each({"a": (X, Y), "sick": with_nan()})
    history = fit(fleet, data, batch_size=4, shuffle=False, callbacks=[StopAfter(5)])
    assert history.failed == {"sick": Failure(1, STEP, "its loss became NaN or infinite")}


TRAINING = """
import sys
from tests.helpers import fleet_of, toy
import modelfleet as mf
class Tell(mf.Callback):
    def on_step_end(self, run):
        print(run.step, flush=True)
fleet = fleet_of(2)
history = fleet.fit(toy(24), epochs=10**6, batch_size=4, progress=False, callbacks=[Tell()])
print("returned", len(history["0"]["loss"]) > 0, flush=True)
"""


def test_a_real_ctrl_c_ends_a_real_process_well() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MODELFLEET_COMPILE": "never"}
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "20":
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert rest.splitlines()[-1] == "returned True"
    assert "Traceback" not in errors


# --- early stopping


def test_early_stopping_frees_slots_and_leaves_the_rest_as_they_were() -> None:
    widths: list[int] = []

    class Watch(mf.Callback):
        def on_step_end(self, run: Any) -> None:
            widths.append(run.runs[0].lane.width)

    rates = [0.1, 0.0, 0.0, 0.0]  # who does not learn does not get better
    stopped, whole = (fleet_of(4, lr=mf.each(rates), momentum=0.9, dropout=0.5) for _ in range(2))
    stopping = mf.EarlyStopping("val_loss", patience=2)
    history = fit(stopped, (X, Y), validation=(X, Y), epochs=6, batch_size=8, callbacks=[stopping, Watch()])
    other = fit(whole, (X, Y), validation=(X, Y), epochs=6, batch_size=8)
    assert history.stopped == {"1": 3, "2": 3, "3": 3}
    assert (widths[0], widths[-1]) == (4, 1)
    assert close(weights(stopped["0"]), weights(whole["0"]))
    assert history["0"]["val_loss"] == pytest.approx(other["0"]["val_loss"], rel=1e-5)
    assert len(history["2"]["val_loss"]) == 3
    assert equal(weights(stopped["2"]), weights(whole["2"]))  # its learning rate is 0
    assert set(stopped.predict(X)) == {"0", "1", "2", "3"}


def test_restore_best_gives_back_the_weights_of_the_best_epoch() -> None:
    class Keep(mf.Callback):
        def __init__(self) -> None:
            self.epochs: list[dict[str, Any]] = []

        def on_epoch_end(self, run: Any) -> None:
            self.epochs.append({name: run.snapshot(name) for name in run.active})

    keep = Keep()
    fleet = fleet_of(["good", "rough", "worse"], lr=mf.each([0.05, 3.0, 30.0]))
    stopping = mf.EarlyStopping("val_loss", patience=2, restore_best=True)
    history = fit(fleet, (X, Y), validation=(X, Y), epochs=8, batch_size=4, callbacks=[keep, stopping])
    for name in fleet.names:
        series = history[name]["val_loss"]
        best = int(np.argmin(series))
        assert history.kept.get(name, len(series)) == best + 1
        kept = keep.epochs[best][name]["params"]
        assert torch.equal(kept["0.weight"][0].T, fleet[name][0].weight), name
        assert fleet.evaluate((X, Y))[name]["loss"] == pytest.approx(min(series), rel=1e-4)
    assert history.stopped
