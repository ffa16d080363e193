"""Keras's callbacks in a fleet: for every member what they would do in its own fit."""

import csv
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.frameworks.keras import wrap
from modelfleet.frameworks.keras.callbacks import own_path

callbacks = keras.callbacks
RATES = {"a": 0.001, "b": 0.5}


def both(*given: Any, epochs: int = 5) -> tuple[mf.Fleet, mf.History, dict[str, Any], dict[str, keras.Model]]:
    """A fleet fitted with callbacks, and each of its models fitted alone with the same."""
    fleet, expected = models.fresh(**RATES)
    x, y = models.data(16)
    validation = models.data(8, seed=9)
    options = {"epochs": epochs, "batch_size": 8, "shuffle": False}
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


def alike(fleet: mf.Fleet, history: mf.History, logs: dict[str, Any], expected: dict[str, keras.Model]) -> None:
    for name in fleet.names:
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


def test_reduce_on_plateau() -> None:
    alike(*both(lambda: callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=0.5)))


@pytest.mark.parametrize("restore", [False, True])
def test_early_stopping(restore: bool) -> None:
    found = both(lambda: callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=restore), epochs=8)
    alike(*found)
    assert len(found[1]["b"]["loss"]) < 8  # or nothing was shown
    assert found[1].stopped


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


def test_what_is_not_called_is_refused() -> None:
    class PerBatch(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    with pytest.raises(InputError, match=r"PerBatch has a on_train_batch_end, which a fleet does not call"):
        wrap(PerBatch())
    with pytest.raises(InputError, match="on_train_batch_end"):
        wrap(callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None))
    with pytest.raises(InputError, match=r"on_train_batch_end"):
        wrap(callbacks.ModelCheckpoint("m.keras", save_freq=10))
    with pytest.raises(InputError, match=r"modelfleet\.Checkpoint"):
        wrap(callbacks.BackupAndRestore("folder"))
    wrap(callbacks.TerminateOnNaN())
    wrap(callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None))


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
