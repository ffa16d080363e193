"""Keras's callbacks in a fleet: for every member what they would do in its own fit."""

import csv
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.frameworks.keras import copy_model
from modelfleet.frameworks.keras.callback_copies import own_path

callbacks = keras.callbacks
RATES = {"a": 0.001, "b": 0.5}


def both(
    *given: Any, epochs: int = 5, initial_epoch: int = 0
) -> tuple[mf.Fleet, mf.History, dict[str, Any], dict[str, keras.Model]]:
    """A fleet fitted with callbacks, and each of its models fitted alone with the same."""
    fleet, expected = models.fresh(**RATES)
    x, y = models.data(16)
    validation = models.data(8, seed=9)
    options: dict[str, Any] = {"epochs": epochs, "batch_size": 8, "shuffle": False, "initial_epoch": initial_epoch}
    history = fleet.fit(
        (x, y), validation=validation, callbacks=[make() for make in given], progress=False, **options
    )
    logs = {
        name: model.fit(
            x, y, validation_data=validation, callbacks=[make() for make in given], verbose=0, **options
        ).history
        for name, model in expected.items()
    }
    return fleet, history, logs, expected


def alike(
    fleet: mf.Fleet,
    history: mf.History,
    logs: dict[str, Any],
    expected: dict[str, keras.Model],
    names: Sequence[str] = ("a", "b"),
) -> None:
    for name in names:
        assert history[name].keys() == logs[name].keys()
        for metric, series in logs[name].items():
            np.testing.assert_allclose(history[name][metric], series, rtol=1e-4, atol=1e-5, err_msg=metric)
        models.same(fleet[name], expected[name], tolerance=1e-4)


def test_learning_rate_scheduler() -> None:
    found = both(
        lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate), epochs=3
    )
    alike(*found)
    assert found[1]["a"]["learning_rate"] == pytest.approx([0.001, 0.0005, 0.00025])


def test_callbacks_see_epochs_from_the_initial_one() -> None:
    seen: list[tuple[str, int]] = []

    class Watcher(callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(("begin", epoch))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(("end", epoch))
            assert self.params is not None
            assert self.params["epochs"] == 5

    found = both(
        Watcher,
        lambda: callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1)),
        epochs=5,
        initial_epoch=3,
    )
    alike(*found)
    assert found[1]["a"]["learning_rate"] == pytest.approx([0.01 / 4, 0.01 / 5])
    expected = [("begin", 3), ("end", 3), ("begin", 4), ("end", 4)]
    assert sorted(seen) == sorted(expected * 4)


def test_reduce_on_plateau() -> None:
    alike(*both(lambda: callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=0.5)))


@pytest.mark.parametrize("restore", [False, True])
def test_early_stopping(restore: bool) -> None:
    found = both(lambda: callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=restore), epochs=8)
    alike(*found)
    assert len(found[1]["b"]["loss"]) < 8  # or nothing was shown
    assert found[1].stopped


@pytest.mark.parametrize("initial_epoch", [0, 2])
def test_the_history_knows_which_weights_early_stopping_restored(initial_epoch: int) -> None:
    fleet, history, _, _ = both(
        lambda: callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        epochs=initial_epoch + 8,
        initial_epoch=initial_epoch,
    )
    losses = {name: history[name]["val_loss"] for name in fleet.names}
    assert losses["b"][-1] > min(losses["b"])  # or nothing was shown
    assert history.kept == {name: initial_epoch + 1 + int(np.argmin(own)) for name, own in losses.items()}
    assert history.latest("val_loss") == {name: min(own) for name, own in losses.items()}
    found = fleet.evaluate(models.data(8, seed=9))
    for name, own in losses.items():
        assert found[name]["loss"] == pytest.approx(min(own), rel=1e-4)


def test_without_restored_weights_the_last_epoch_counts() -> None:
    _, history, _, _ = both(lambda: callbacks.EarlyStopping("val_loss", patience=2), epochs=4)
    assert not history.kept


class Noting(callbacks.Callback):
    """Notes what it is called with, and by which learning rate the model trains then."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def note(self, moment: str, epoch: int | None, logs: Any) -> None:
        model: Any = self.model
        told = {key: round(float(value), 3) for key, value in logs.items()}
        self.notes.append((moment, epoch, told, round(float(model.optimizer.learning_rate), 7)))

    def on_train_begin(self, logs: Any = None) -> None:
        params: Any = self.params
        self.note("train begin", params["steps"], logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch end", epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        params: Any = self.params
        self.note("train end", params["epochs"], logs)


def test_callbacks_run_in_the_order_of_keras_on_objects_that_can_be_read() -> None:
    def several() -> list[Any]:
        return [
            Noting(),
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=0.5),
            Noting(),
            callbacks.History(),
            callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        ]

    fleet, expected = models.fresh(**RATES)
    x, y = models.data(16)
    options: Any = {"epochs": 6, "batch_size": 8, "shuffle": False}
    given, validation = several(), models.data(8, seed=9)
    history = fleet.fit((x, y), validation=validation, callbacks=given, progress=False, **options)
    for name, model in expected.items():
        plain = several()
        logs = model.fit(x, y, validation_data=validation, callbacks=plain, verbose=0, **options).history
        alike(fleet, history, {name: logs}, {name: model}, names=[name])
        own = [callback.members[name] for callback in given]
        assert [found is callback for found, callback in zip(own, given, strict=True)] == [name == "a"] * 6
        for one, other in zip(own, plain, strict=True):
            if isinstance(other, Noting):
                assert [note[:2] for note in one.notes] == [note[:2] for note in other.notes]
                for found, right in zip(one.notes, other.notes, strict=True):
                    assert found[2] == pytest.approx(right[2], abs=2e-3)
                    assert found[3] == pytest.approx(right[3], rel=1e-4)
        assert own[4].epoch == plain[4].epoch
        assert own[4].history.keys() == plain[4].history.keys()
        assert (own[5].stopped_epoch, own[5].best_epoch) == (plain[5].stopped_epoch, plain[5].best_epoch)
    # A second fit goes on with the same objects, as Keras's would.
    before = {name: len(given[0].members[name].notes) for name in fleet.names}
    options["epochs"] = 1
    fleet.fit((x, y), validation=validation, callbacks=given, progress=False, **options)
    for name in fleet.names:
        assert len(given[0].members[name].notes) == before[name] + 4


def test_one_member_works_with_the_very_objects_and_paths(tmp_path: Path) -> None:
    x, y = models.data(16)
    fleet, _ = models.fresh(**RATES)
    lone = mf.Fleet({"a": fleet["a"]})
    noting: Any = Noting()
    log = callbacks.CSVLogger(str(tmp_path / "log.csv"))
    noting.lock = threading.Lock()  # can't be copied, and need not be
    kept = callbacks.ModelCheckpoint(str(tmp_path / "{name}.keras"))
    given: list[Any] = [noting, log, kept]
    history = lone.fit((x, y), epochs=2, batch_size=8, callbacks=given, progress=False)
    assert [note[0] for note in noting.notes] == ["train begin", *["epoch begin", "epoch end"] * 2, "train end"]
    assert (tmp_path / "log.csv").read_text().count("\n") == 3
    assert (tmp_path / "a.keras").exists()
    assert kept.filepath == str(tmp_path / "{name}.keras")
    assert history.epochs == 2
    with pytest.raises(InputError, match=r"Noting can't be copied for member 'b': .*__deepcopy__"):
        fleet.fit((x, y), epochs=1, batch_size=8, callbacks=[noting], progress=False)


class Break(mf.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.epoch:
            raise KeyboardInterrupt


def test_a_resumed_run_goes_on_with_what_callbacks_remember(tmp_path: Path) -> None:
    def several() -> list[Any]:
        return [
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
            callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True, mode="max"),
        ]

    options: Any = {"validation": models.data(8, seed=9), "epochs": 5, "batch_size": 8, "shuffle": False}
    found = []
    for broken in (False, True):
        fleet, _ = models.fresh(**RATES)
        fleet = mf.Fleet({name: copy_model(fleet[name]) for name in fleet.names})
        last: list[Any] = [*several(), mf.Checkpoint(tmp_path / str(broken)), Break(0)]
        if broken:
            first: list[Any] = [*several(), mf.Checkpoint(tmp_path / str(broken)), Break(3)]
            with pytest.raises(KeyboardInterrupt):
                fleet.fit(models.data(16), callbacks=first, progress=False, **options)
            fleet, _ = models.fresh(**RATES)
            fleet = mf.Fleet({name: copy_model(fleet[name]) for name in fleet.names})
        history = fleet.fit(models.data(16), callbacks=last, progress=False, **options)
        found.append((history, fleet))
    (unbroken, one), (resumed, other) = found
    for name in one.names:
        for metric, series in unbroken[name].items():
            assert resumed[name][metric] == pytest.approx(series, rel=1e-5), metric
        models.same(other[name], one[name])


@pytest.mark.parametrize("when", [0, 1])
def test_freezing_in_a_callback_is_as_in_keras(when: int) -> None:
    class Freeze(callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == when:
                model: Any = self.model
                model.layers[0].trainable = False

    def compiled(seed: int) -> keras.Model:
        model = models.mlp(seed=seed)
        model.compile(models.adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = models.data(16)
    options: Any = {"epochs": 3, "batch_size": 8, "shuffle": False}
    both, lone = mf.Fleet({"a": compiled(0), "b": compiled(1)}), mf.Fleet({"a": compiled(0)})
    backend = keras.backend.backend()
    if backend == "jax":
        with pytest.raises(InputError, match=r"set trainable .* member 'a' .* which Keras on JAX can't do"):
            lone.fit((x, y), callbacks=[Freeze()], progress=False, **options)
        return
    expected = compiled(0)
    # Keras's eager steps heed it at once; on TensorFlow, steps that were traced do not.
    heeded = backend == "torch" or when == 0
    history = models.fit(expected, x, y, callbacks=[Freeze()] if heeded else [], **options)
    found = lone.fit((x, y), callbacks=[Freeze()], progress=False, **options)
    assert found["a"]["loss"] == pytest.approx(history["loss"], rel=1e-4)
    for one, other in zip(lone["a"].get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    if heeded and both.plan((x, y), batch_size=8).lanes[0].members == ("a", "b"):
        with pytest.raises(InputError, match=r"set trainable .* strategy=\"interleaved\""):
            both.fit((x, y), callbacks=[Freeze()], progress=False, **options)


def test_stopping_before_an_epoch_is_refused() -> None:
    def stop(epoch: int, logs: Any) -> None:
        lambda_callback.model.stop_training = True

    lambda_callback: Any = callbacks.LambdaCallback(on_epoch_begin=stop)
    fleet, _ = models.fresh(**RATES)
    with pytest.raises(InputError, match=r"stop_training .* before epoch 1.*on_epoch_end"):
        fleet.fit(models.data(16), epochs=2, batch_size=8, callbacks=[lambda_callback], progress=False)


def test_checkpoints_and_logs_are_each_members_own(tmp_path: Path) -> None:
    x, y = models.data(16)
    fleet, _ = models.fresh(**RATES)
    given: list[Any] = [
        callbacks.ModelCheckpoint(str(tmp_path / "{name}-{epoch}.keras")),
        callbacks.CSVLogger(str(tmp_path / "log.csv")),
    ]
    history = fleet.fit((x, y), epochs=2, batch_size=8, callbacks=given, progress=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a-1.keras", "a-2.keras", "b-1.keras", "b-2.keras", "log-a.csv", "log-b.csv"}
    for name in fleet.names:
        saved = keras.models.load_model(tmp_path / f"{name}-2.keras")
        models.same(saved, fleet[name])
        with (tmp_path / f"log-{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["loss"]) for row in rows] == pytest.approx(history[name]["loss"])


def test_a_callback_of_ones_own_sees_the_weights_of_the_moment() -> None:
    class Look(callbacks.Callback):
        seen: list[tuple[int, float]] = []  # noqa: RUF012  (shared by the copies on purpose)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            model: Any = self.model
            self.seen.append((epoch, float(np.sum(model.get_weights()[0]))))

    x, y = models.data(16)
    fleet, _ = models.fresh(**RATES)
    given: list[Any] = [Look()]
    fleet.fit((x, y), epochs=2, batch_size=8, callbacks=given, progress=False)
    assert [epoch for epoch, _ in Look.seen] == [0, 0, 1, 1]
    assert len({round(total, 5) for _, total in Look.seen}) == 4
    finals = {round(float(np.sum(fleet[name].get_weights()[0])), 4) for name in fleet.names}
    assert {round(total, 4) for epoch, total in Look.seen if epoch == 1} == finals


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("m-{name}-{epoch}.keras", "m-a b-{epoch}.keras"),
        ("runs/m-{epoch:02}.keras", "runs/m-{epoch:02}-a b.keras"),
        ("best.weights.h5", "best-a b.weights.h5"),
        ("log", "log-a b"),
    ],
)
def test_paths(path: str, expected: str) -> None:
    assert own_path(path, "a b") == expected
    assert own_path("{name}.csv", "a/{b}").format() == "a_{b}.csv"


class Counting(keras.layers.Layer):
    """Counts its calls, in evaluation too."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x / self.calls


def counting() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), Counting(), keras.layers.Dense(1)])

    def off(y: Any, output: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y - output))

    model.compile(keras.optimizers.SGD(0.01), loss=off)
    return model


def test_what_evaluating_changes_in_a_callback_goes_into_the_training() -> None:
    class Look(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            fleet.evaluate((x, y), batch_size=4)

    class LookAlone(callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            alone.evaluate(x, y, batch_size=4, verbose=0)

    x = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
    y = x[:, :1]
    fleet, alone = mf.Fleet({"a": counting(), "b": counting()}), counting()
    fleet.fit((x, y), epochs=2, batch_size=4, shuffle=False, callbacks=[Look()], progress=False)
    alone.fit(x, y, epochs=2, batch_size=4, shuffle=False, callbacks=[LookAlone()], verbose=0)
    for found, expected in zip(fleet["a"].get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_model_with_classes_and_functions_of_ones_own_is_cloned() -> None:
    fleet = mf.Fleet({"a": counting()})
    fleet.clone("a", as_="b")
    assert fleet["b"].loss is fleet["a"].loss
    np.testing.assert_array_equal(fleet["b"].get_weights()[1], fleet["a"].get_weights()[1])
