"""What an epoch is: where `initial_epoch` counts from, and the steps after which each member's epoch ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, close, equal, fit, fleet_of, toy

import modelfleet as mf
from modelfleet.types import Strategy

X, Y = toy(24)


class Watcher(mf.Callback):
    """Remembers the epochs that it was called in."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def on_fit_start(self, run: Any) -> None:
        self.started.append((run.epoch, run.epochs))

    def on_epoch_end(self, run: Any) -> None:
        self.ended.append(run.epoch)


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "threads"])
def test_epochs_count_from_the_initial_one(strategy: Strategy) -> None:
    whole, parted = fleet_of(3, dropout=0.2), fleet_of(3, dropout=0.2)
    expected = fit(whole, (X, Y), epochs=5, strategy=strategy)
    first = fit(parted, (X, Y), epochs=2, strategy=strategy)
    watcher = Watcher()
    history = fit(parted, (X, Y), epochs=5, initial_epoch=2, strategy=strategy, callbacks=[watcher])
    assert equal(all_weights(parted), all_weights(whole)), "shuffles and dropout go on from where the members are"
    assert (watcher.started, watcher.ended) == ([(2, 5)], [3, 4, 5])
    assert history["1"]["loss"] == expected["1"]["loss"][2:]
    first.extend(history)
    assert first["1"] == expected["1"]


def test_a_history_has_the_numbers_of_its_epochs() -> None:
    pytest.importorskip("pandas")
    fleet = fleet_of(["good", "bad"])
    data = mf.each({"good": (X, Y), "bad": (X * np.nan, Y)})
    stopper = mf.EarlyStopping("loss", patience=1, min_delta=1e6, restore_best=True)
    history = fit(fleet, data, epochs=9, initial_epoch=4, callbacks=[stopper])
    good = history.frame().query("member == 'good'")
    assert good["epoch"].tolist() == [5, 6]
    assert (history.stopped, history.kept) == ({"good": 6}, {"good": 5})
    assert history.latest("loss") == {"good": history["good"]["loss"][0]}
    assert history.failed["bad"].epoch == 5
    again = mf.History.from_dict(history.to_dict())
    assert (again.initial_epoch, again.latest("loss")) == (4, history.latest("loss"))
    earlier = mf.History(["good", "bad"])
    for _ in range(4):
        earlier.record("good", {"loss": 1.0})
    earlier.extend(history)
    assert (earlier.stopped, earlier.kept) == (history.stopped, history.kept)


def test_each_member_s_epochs_end_where_its_own_number_says() -> None:
    history = fit(fleet_of(2), (X, Y), epochs=mf.each([4, 6]), initial_epoch=3)
    assert [len(history[name]["loss"]) for name in history] == [1, 3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"initial_epoch": -1}, "initial_epoch is -1; expected one whole number.*epochs that are done"),
        ({"initial_epoch": 1.0}, "initial_epoch is 1.0"),
        ({"initial_epoch": mf.each([1, 2])}, "expected one whole number for all members"),
        ({"initial_epoch": 3, "epochs": 3}, "epochs is 3 and initial_epoch is 3; .*give epochs=6"),
        ({"initial_epoch": 3, "epochs": mf.each([4, 2])}, "epochs of member '1' is 2 and initial_epoch is 3"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0; expected a whole number, 1 or more"),
        ({"steps_per_epoch": mf.each([1, None])}, "steps_per_epoch of member '1' is None"),
        ({"steps_per_epoch": [1, 2]}, "mf.each"),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(mf.InputError, match=told):
        fit(fleet_of(2), (X, Y), **options)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=24, cycle_momentum=False)


@pytest.mark.parametrize("schedule", [mf.Schedule("step", every=2), decay, cycle])
def test_schedules_go_by_the_numbers_of_the_epochs(schedule: Any) -> None:
    whole, parted = (fleet_of(2, schedule=schedule) for _ in range(2))
    fit(whole, (X, Y), epochs=4, batch_size=4)
    fit(parted, (X, Y), epochs=2, batch_size=4)
    fit(parted, (X, Y), epochs=4, initial_epoch=2, batch_size=4)
    for name in whole.names:
        assert close(all_weights(parted)[name], all_weights(whole)[name])


def test_a_schedule_over_a_fit_has_its_initial_epochs_behind_it() -> None:
    late, small = fleet_of(2, schedule="linear"), fleet_of(2, lr=0.05)
    fit(late, (X, Y), epochs=2, initial_epoch=1, batch_size=24)
    fit(small, (X, Y), batch_size=24)  # of two steps, the second one has half of the rate
    for name in late.names:
        assert close(all_weights(late)[name], all_weights(small)[name])


class Late(mf.Callback):
    """Interrupts a fit at the end of an epoch."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: list[int] = []

    def on_epoch_end(self, run: Any) -> None:
        self.seen.append(run.epoch)
        if run.epoch == self.at:
            raise KeyboardInterrupt


def test_a_checkpoint_is_resumed_at_its_epoch(tmp_path: Path) -> None:
    whole, killed, again = (fleet_of(2, dropout=0.2, schedule=decay) for _ in range(3))
    options: dict[str, Any] = {"epochs": 7, "initial_epoch": 3}
    expected = fit(whole, (X, Y), **options)
    with pytest.raises(KeyboardInterrupt):
        fit(killed, (X, Y), callbacks=[mf.Checkpoint(tmp_path, every=2), Late(6)], **options)
    late = Late(99)
    callbacks = [mf.Checkpoint(tmp_path, every=2), late]
    with pytest.raises(mf.StoreError, match="its initial epoch is 3, here it is 2"):
        fit(again, (X, Y), callbacks=callbacks, epochs=7, initial_epoch=2)
    found = fit(again, (X, Y), callbacks=callbacks, **options)
    assert late.seen == [5, 6, 7]
    assert found["1"] == expected["1"]
    assert equal(all_weights(again), all_weights(whole))


# --- steps -------------------------------------------------------------------------------------------------------

LIMITS = {"a": 2, "b": 5, "c": 3}


def alone(name: str, data: Any, **options: Any) -> tuple[mf.Fleet, mf.History]:
    fleet = fleet_of([name], dropout=0.2)
    return fleet, fit(fleet, data, steps_per_epoch=LIMITS[name], epochs=3, **options)


@pytest.mark.parametrize(
    ("strategy", "shuffle"),
    [("fused", True), ("fused", False), ("interleaved", True), ("threads", False), ("processes", True)],
)
def test_members_of_a_lane_end_their_epochs_after_steps_of_their_own(strategy: Strategy, shuffle: bool) -> None:
    fleet, options = fleet_of(list(LIMITS), dropout=0.2), {"batch_size": 4, "shuffle": shuffle}
    history = fit(
        fleet, (X, Y), steps_per_epoch=mf.each(LIMITS), epochs=3, strategy=strategy, validation=(X, Y), **options
    )
    for name in LIMITS:
        expected, told = alone(name, (X, Y), validation=(X, Y), **options)
        for metric, series in told[name].items():
            np.testing.assert_allclose(history[name][metric], series, rtol=1e-5)
        assert close(all_weights(fleet)[name], all_weights(expected)[name])


class Endless:
    """Batches without an end, each of another size."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        step = self.first
        while True:
            rows = slice(step % 7, step % 7 + 3 + step % 4)
            yield X[rows], Y[rows]
            step += 1


def test_own_loaders_go_on_after_steps_of_their_own() -> None:
    fleet = fleet_of(list(LIMITS), dropout=0.2)
    loaders = {name: Endless(number) for number, name in enumerate(LIMITS)}
    history = fit(fleet, mf.each(loaders), steps_per_epoch=mf.each(LIMITS), epochs=3)
    for name, loader in loaders.items():
        expected, told = alone(name, Endless(loader.first))
        np.testing.assert_allclose(history[name]["loss"], told[name]["loss"], rtol=1e-5)
        assert close(all_weights(fleet)[name], all_weights(expected)[name])


def test_one_loader_is_read_for_the_longest_epoch() -> None:
    batches = [(X[low : low + 3], Y[low : low + 3]) for low in range(0, 24, 3)]
    fleet, seen = fleet_of(2, dropout=0.2), fleet_of(["0"], dropout=0.2)
    fit(fleet, batches, steps_per_epoch=mf.each([1, 4]), epochs=2)
    fit(seen, [batches[0], batches[4]], epochs=1)  # the first batch of each epoch
    assert close(all_weights(fleet)["0"], all_weights(seen)["0"])


def test_plans_and_schedules_know_each_member_s_steps() -> None:
    fleet = fleet_of(2, schedule="linear")
    plan = fleet.plan((X, Y), batch_size=4, steps_per_epoch=mf.each([2, 3]), epochs=2)
    assert plan.lanes[0].steps == 6
    fit(fleet, (X, Y), batch_size=4, steps_per_epoch=mf.each([2, 3]), epochs=2)
    for name, steps in zip(fleet.names, (2, 3), strict=True):
        own = fleet_of([name], schedule="linear")
        fit(own, (X, Y), batch_size=4, steps_per_epoch=steps, epochs=2)
        assert close(all_weights(fleet)[name], all_weights(own)[name])


def test_members_that_leave_do_not_lengthen_the_others_epochs() -> None:
    fleet, options = fleet_of(list(LIMITS), dropout=0.2), {"batch_size": 4}
    fit(fleet, (X, Y), steps_per_epoch=mf.each(LIMITS), epochs=mf.each({"a": 3, "b": 1, "c": 3}), **options)
    for name in ("a", "c"):
        expected, _ = alone(name, (X, Y), **options)
        assert close(all_weights(fleet)[name], all_weights(expected)[name])
