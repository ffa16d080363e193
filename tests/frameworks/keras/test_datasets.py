"""Data in Keras's ways: data sets that are told of epochs, epochs of so many steps, and strings."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.runs.feeding import Feeding
from modelfleet.runs.job import Job
from modelfleet.types import Strategy

RATES = {"a": 0.01, "b": 0.03}


class Turning(keras.utils.PyDataset):
    """Turns its rows around at the end of every epoch, and counts what it is told."""

    def __init__(self, rows: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.x, self.y = models.data(rows, seed)
        self.told: list[str] = []

    def __len__(self) -> int:
        return len(self.x) // 8

    def __getitem__(self, index: int) -> Any:
        rows = slice(8 * index, 8 * index + 8)
        return self.x[rows], self.y[rows]

    def on_epoch_begin(self) -> None:
        self.told.append("begin")

    def on_epoch_end(self) -> None:
        self.told.append("end")
        self.x, self.y = np.roll(self.x, 3, axis=0), np.roll(self.y, 3, axis=0)


def alike(fleet: mf.Fleet, expected: dict[str, keras.Model]) -> None:
    for name, model in expected.items():
        models.same(fleet[name], model, tolerance=1e-4)


def test_a_data_set_is_told_of_epochs_as_by_keras() -> None:
    fleet, expected = models.fresh(**RATES)
    data, validation = Turning(), Turning(seed=9)
    history = fleet.fit(data, validation=validation, epochs=3, shuffle=False, progress=False)
    assert data.told == ["end", *["begin", "end"] * 3]
    assert validation.told == ["end", "begin", "end"] * 3
    for name, model in expected.items():
        options: Any = {"validation_data": Turning(seed=9), "epochs": 3, "shuffle": False, "verbose": 0}
        logs = model.fit(Turning(), **options).history
        for metric, series in logs.items():
            assert history[name][metric] == pytest.approx(series, rel=1e-4, abs=1e-5), metric
    alike(fleet, expected)


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_epochs_of_so_many_steps_go_on_where_the_last_one_stopped(steps: int) -> None:
    x, y = models.data(40)
    own = {"a": (x, y), "b": (x[:24], y[:24])}
    options: Any = {"epochs": 4, "batch_size": 8, "steps_per_epoch": steps, "shuffle": False}
    for data in (mf.each(own), own["a"]):
        fleet, expected = models.fresh(**RATES)
        history = fleet.fit(data, progress=False, **options)
        for name, model in expected.items():
            rows, labels = own[name] if isinstance(data, mf.Each) else data
            logs = model.fit(rows, labels, verbose=0, **options).history
            assert history[name]["loss"] == pytest.approx(logs["loss"], rel=1e-4)
        alike(fleet, expected)


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_each_member_s_epochs_have_steps_of_their_own(strategy: Strategy) -> None:
    x, y = models.data(40)
    steps = {"a": 2, "b": 3}
    options: dict[str, Any] = {"epochs": 4, "batch_size": 8, "shuffle": False}
    fleet, expected = models.fresh(**RATES)
    history = fleet.fit((x, y), steps_per_epoch=mf.each(steps), strategy=strategy, progress=False, **options)
    for name, model in expected.items():
        logs = models.fit(model, x, y, steps_per_epoch=steps[name], **options)
        assert history[name]["loss"] == pytest.approx(logs["loss"], rel=1e-4)
    alike(fleet, expected)


def test_every_pass_is_shuffled_as_a_whole() -> None:
    x, y = models.data(40)
    seen: dict[str, list[int]] = {}
    fleet, _ = models.fresh(**RATES)
    job = Job(tuple(fleet.names), (x, y), batch_size=8, steps_per_epoch=2)
    fleet.fit((x, y), epochs=1, batch_size=8, progress=False)
    feed = Feeding(job, fleet._live_lanes.groups).feed(fleet._lanes[0])
    order = {tuple(row): index for index, row in enumerate(np.round(x, 4))}
    for epoch in range(3):  # 2, 2 and 1 steps
        for _, batch in zip(range(2), feed.epoch(epoch), strict=False):
            for member, name in enumerate(fleet.names):
                rows = np.round(keras.ops.convert_to_numpy(batch.data[0][member]), 4)
                seen.setdefault(name, []).extend(order[tuple(row)] for row in rows[: batch.counts[member]])
    for found in seen.values():
        assert sorted(found) == list(range(40))
        assert found != sorted(found)


def of_words(seed: int) -> keras.Model:
    words = keras.layers.TextVectorization(output_sequence_length=2, vocabulary=["red", "green", "blue"])
    parts = [
        keras.Input((1,), dtype="string"),
        words,
        keras.layers.Embedding(5, 3, embeddings_initializer=keras.initializers.RandomUniform(seed=seed)),
        keras.layers.Flatten(),
        keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=seed)),
    ]
    model = keras.Sequential(parts)
    model.compile(models.adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow computes with strings")
def test_models_of_strings_run_by_their_own_steps() -> None:
    x, y = np.array([["red"], ["green"], ["blue red"], ["red"], ["none"], ["blue"]]), np.array([0, 1, 2, 0, 1, 2])
    fleet = mf.Fleet({"a": of_words(0), "b": of_words(1)})
    reasons = [lane.reason for lane in fleet.plan((x, y), batch_size=4).lanes]
    assert reasons == [f"{name!r} runs on its own: its inputs are strings" for name in fleet.names]
    options: Any = {"epochs": 2, "batch_size": 4, "shuffle": False}
    history = fleet.fit((x, y), progress=False, **options)
    for seed, name in enumerate(fleet.names):
        alone = of_words(seed)
        rows = keras.ops.convert_to_tensor(x, dtype="string")
        assert history[name]["loss"] == pytest.approx(models.fit(alone, rows, y, **options)["loss"], rel=1e-5)
        models.same(fleet[name], alone)
        np.testing.assert_allclose(
            fleet.predict(x.astype(object))[name], alone.predict(rows, verbose=0), atol=1e-5
        )


def test_strings_for_a_model_of_numbers_are_refused() -> None:
    fleet, _ = models.fresh(**RATES)
    x = np.array([["red", "green", "blue", "red"]] * 8)
    said = r"(<U5|object|string)"
    with pytest.raises(InputError, match=said):
        fleet.fit((x, models.data(8)[1]), batch_size=4, progress=False)
