"""All of Keras's own callbacks: each does in a fleet what it does in a model's own fit, or is refused."""

import csv
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.errors import AllFailedError, InputError
from modelfleet.frameworks.keras import copy_model, wrap
from modelfleet.frameworks.keras.callback_copies import own_folder

callbacks = keras.callbacks
RATES = {"a": 0.001, "b": 0.5}


@dataclass(frozen=True)
class Row:
    """A callback of Keras, and what to compare besides histories and weights."""

    make: Callable[[str], Any]
    """Returns the callbacks of a fit. Their files are in the given folder."""
    look: Callable[[Any, Path], Any] = lambda callback, folder: None
    """Returns what the first callback remembers, and what its files hold."""
    validated: bool = True
    use_ema: bool = False


def saved(callback: Any, folder: Path) -> dict[str, list[np.ndarray]]:
    return {path.name: models.numbers(keras.models.load_model(path)) for path in sorted(folder.iterdir())}


def saved_by_orbax(callback: Any, folder: Path) -> dict[str, list[Any]]:
    # Not by `load_model`: Keras 3.15 finds no weights if it names the layers of the new model otherwise.
    steps = sorted(path.name for path in folder.iterdir() if path.name.isdigit())
    checkpointer = callbacks.OrbaxCheckpoint(str(folder)).checkpointer
    weights = checkpointer.load_checkpointables(int(steps[-1]))["pytree"]["trainable_variables"]
    checkpointer.close()
    return {"steps": steps, "latest": [np.asarray(leaf) for leaf in keras.tree.flatten(weights)]}


def rows_of_file(callback: Any, folder: Path) -> list[dict[str, float]]:
    with Path(f"{folder}.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def events(callback: Any, folder: Path) -> list[tuple[str, int, np.ndarray]]:
    """What was written for TensorBoard: folder and tag, step, and value."""
    import tensorflow as tf
    from tensorflow.core.util import event_pb2

    found = []
    for file in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset(str(file)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tag == "keras":  # the graph: the model as JSON
                    layers = json.loads(tf.make_ndarray(value.tensor).item())["config"]["layers"]
                    found.append((" ".join(layer["config"]["name"] for layer in layers), 0, np.zeros(1)))
                elif "per_second" not in value.tag:
                    number = np.asarray(tf.make_ndarray(value.tensor))
                    tag = re.sub(r"^sequential\w*/", "", value.tag)  # a copy's weights do not have it
                    found.append((f"{file.parent.name}/{tag}", event.step, number))
    return found


SENT: dict[str, list[Any]] = {}


class Receive(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        SENT.setdefault(self.path.strip("/"), []).append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


SERVER = ThreadingHTTPServer(("127.0.0.1", 0), Receive)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    thread = threading.Thread(target=SERVER.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield
    SERVER.shutdown()
    thread.join()
    SERVER.server_close()


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package tensorboard, of which TensorFlow needs how to write a number or an image."""

    def write(name: str, data: Any, step: Any, **options: Any) -> bool:
        value, number = (np.asarray(keras.ops.convert_to_numpy(one)) for one in (data, step))
        return import_module("tensorflow").summary.write(name, value, step=int(number))

    for name in ("tensorboard", "tensorboard.summary", "tensorboard.summary.v2"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(scalar=write, histogram=write, image=write)
        monkeypatch.setitem(sys.modules, name, module)


def remote(folder: str) -> Any:
    path = f"/{Path(folder).name}"
    return callbacks.RemoteMonitor(f"http://127.0.0.1:{SERVER.server_port}", path, send_as_json=True)


class Noting(callbacks.LambdaCallback):
    """Notes what it is called with. A copy has notes of its own."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        hooks = ("on_train_begin", "on_epoch_begin", "on_test_end", "on_epoch_end", "on_train_end")
        super().__init__(**{hook: lambda *told, hook=hook: self.notes.append((hook, told)) for hook in hooks})

    def __deepcopy__(self, memo: Any) -> "Noting":
        return Noting()


TABLE: dict[type[callbacks.Callback], Row] = {
    callbacks.CSVLogger: Row(lambda folder: callbacks.CSVLogger(f"{folder}.csv"), rows_of_file),
    callbacks.EarlyStopping: Row(
        lambda folder: callbacks.EarlyStopping(patience=1, restore_best_weights=True),
        lambda callback, folder: [callback.stopped_epoch, callback.best_epoch, callback.best],
    ),
    callbacks.History: Row(lambda folder: callbacks.History(), lambda callback, folder: callback.history),
    callbacks.LambdaCallback: Row(lambda folder: Noting(), lambda callback, folder: callback.notes),
    callbacks.LearningRateScheduler: Row(
        lambda folder: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate)
    ),
    callbacks.ModelCheckpoint: Row(
        lambda folder: callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras", save_best_only=True), saved
    ),
    callbacks.OrbaxCheckpoint: Row(
        lambda folder: callbacks.OrbaxCheckpoint(folder, max_to_keep=2, save_on_background=False), saved_by_orbax
    ),
    callbacks.ReduceLROnPlateau: Row(
        lambda folder: callbacks.ReduceLROnPlateau(factor=0.1, patience=1, min_delta=0.5),
        lambda callback, folder: [callback.best, callback.wait],
    ),
    callbacks.RemoteMonitor: Row(remote, lambda callback, folder: SENT.pop(folder.name)),
    callbacks.SwapEMAWeights: Row(
        lambda folder: [
            callbacks.SwapEMAWeights(swap_on_epoch=True),
            callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras"),
        ],
        saved,
        validated=False,
        use_ema=True,
    ),
    callbacks.TensorBoard: Row(
        lambda folder: callbacks.TensorBoard(
            folder, histogram_freq=1, write_images=True, write_steps_per_second=True
        ),
        events,
    ),
}
REFUSED: dict[type[callbacks.Callback], tuple[Callable[[], Any], str]] = {
    callbacks.BackupAndRestore: (lambda: callbacks.BackupAndRestore("folder"), r"Use modelfleet\.Checkpoint"),
    callbacks.CallbackList: (lambda: callbacks.CallbackList([]), "Give the callbacks themselves"),
    callbacks.ProgbarLogger: (callbacks.ProgbarLogger, r"fleet\.fit\(progress=True\) shows all members"),
}
ONLY_BY_EPOCH: dict[str, tuple[Callable[[], Any], str]] = {
    "save_freq": (
        lambda: callbacks.ModelCheckpoint("m.keras", save_freq=10),
        r'ModelCheckpoint needs every batch.*Use save_freq="epoch"',
    ),
    "update_freq": (lambda: callbacks.TensorBoard(update_freq="batch"), r'every batch.*Use update_freq="epoch"'),
    "raise_error": (lambda: callbacks.TerminateOnNaN(raise_error=True), r"Leave raise_error out.*history\.failed"),
    "lambda": (
        lambda: callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
        "LambdaCallback has an on_train_batch_end, which a fleet does not call.*on_epoch_end",
    ),
}


def test_every_callback_of_keras_is_in_a_table() -> None:
    kinds = {kind for kind in vars(callbacks).values() if isinstance(kind, type)}
    assert kinds == {callbacks.Callback, callbacks.TerminateOnNaN, *TABLE, *REFUSED}


def eager(*, use_ema: bool) -> tuple[mf.Fleet, dict[str, keras.Model]]:
    """A fleet of two models that train by Keras's own steps, and copies of the models."""
    own = {name: models.mlp(seed=seed) for seed, name in enumerate(RATES)}
    for name, model in own.items():
        optimizer = keras.optimizers.Adam(RATES[name], epsilon=1e-3, use_ema=use_ema, ema_momentum=0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=True)
    return mf.Fleet(own), {name: copy_model(model) for name, model in own.items()}


@pytest.mark.parametrize(
    ("kind", "lanes"),
    # A model with averaged weights is never fused.
    [(kind, lanes) for kind, row in TABLE.items() for lanes in ["plain"] + ["fused"] * (not row.use_ema)],
)
@pytest.mark.usefixtures("tensorboard")
def test_in_a_fleet_as_alone(kind: type[callbacks.Callback], lanes: str, tmp_path: Path) -> None:
    row = TABLE[kind]
    fleet, expected = models.fresh(**RATES) if lanes == "fused" else eager(use_ema=row.use_ema)
    (x, y), validation = models.data(16), models.data(8, seed=9)
    options: Any = {"epochs": 3, "batch_size": 8, "shuffle": False}
    given = as_list(row.make(f"{tmp_path}/fleet-{{name}}"))
    found = fleet.fit(
        (x, y), validation=validation if row.validated else None, callbacks=given, progress=False, **options
    )
    if row.validated:
        options["validation_data"] = validation
    for name, model in expected.items():
        alone = as_list(row.make(f"{tmp_path}/alone-{name}"))
        history = model.fit(x, y, callbacks=alone, verbose=0, **options).history
        assert found[name].keys() == history.keys()
        own = given[0].members[name]
        same(found[name], history)
        same(row.look(own, tmp_path / f"fleet-{name}"), row.look(alone[0], tmp_path / f"alone-{name}"))
        models.same(fleet[name], model, tolerance=1e-4)


def as_list(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def same(found: Any, expected: Any) -> None:
    """Compare trees of numbers and strings."""

    def compare(one: Any, other: Any) -> None:
        if other is None or isinstance(other, str):
            assert one == other
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

    keras.tree.assert_same_structure(found, expected)
    keras.tree.map_structure(compare, found, expected)


def test_bad_numbers_end_a_members_fit_at_the_step_where_keras_ends_it() -> None:
    x, y = models.data(24)
    x[9] = np.nan  # in the second of three batches
    fleet, expected = models.fresh(**RATES)
    options: Any = {"epochs": 3, "batch_size": 8, "shuffle": False, "callbacks": [callbacks.TerminateOnNaN()]}
    with pytest.raises(AllFailedError) as raised:
        fleet.fit((x, y), progress=False, **options)
    for name, model in expected.items():
        model.fit(x, y, verbose=0, **options)
        failure = raised.value.history.failed[name]
        assert (failure.epoch, failure.step) == (1, int(model.optimizer.iterations))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_has_no_place_in_a_fleet_is_refused(kind: type[callbacks.Callback]) -> None:
    make, sentence = REFUSED[kind]
    with pytest.raises(InputError, match=sentence):
        wrap([make()])


@pytest.mark.parametrize("name", ONLY_BY_EPOCH)
@pytest.mark.usefixtures("tensorboard")
def test_what_needs_every_batch_is_refused(name: str) -> None:
    make, sentence = ONLY_BY_EPOCH[name]
    with pytest.raises(InputError, match=sentence):
        wrap([make()])


def test_what_needs_every_batch_is_refused_of_orbax_and_profilers(tmp_path: Path, tensorboard: None) -> None:
    with pytest.raises(InputError, match=r'OrbaxCheckpoint needs every batch.*Use save_freq="epoch"'):
        wrap([callbacks.OrbaxCheckpoint(str(tmp_path), save_freq=10)])
    profiling: Any = callbacks.TensorBoard()
    profiling._should_trace = True  # what profile_batch=2 sets, but that starts a profiler
    with pytest.raises(InputError, match="Use profile_batch=0"):
        wrap([profiling])


def test_subclasses_are_refused_for_hooks_of_their_own_only() -> None:
    class OwnBatches(callbacks.TerminateOnNaN):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    class OwnEpochs(callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pass

    with pytest.raises(InputError, match="OwnBatches has an on_train_batch_end"):
        wrap([OwnBatches()])
    wrap([OwnEpochs("m.keras")])
    late: Any = callbacks.ModelCheckpoint("m.keras")
    late.on_train_batch_end = lambda batch, logs=None: None
    with pytest.raises(InputError, match="ModelCheckpoint has an on_train_batch_end"):
        wrap([late])


def test_a_subclass_of_a_callback_that_only_reads_may_change_the_model(tmp_path: Path) -> None:
    class Clearing(callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            model: Any = self.model
            model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])

    fleet, _ = models.fresh(**RATES)
    clearing = Clearing(str(tmp_path / "m.keras"))
    fleet.fit(models.data(8), epochs=1, batch_size=8, callbacks=[clearing], progress=False)
    assert not any(weight.any() for name in fleet.names for weight in fleet[name].get_weights())


def test_hooks_before_the_end_of_a_validation_are_refused_if_there_is_one() -> None:
    class Timing(callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            pass

    fleet, _ = models.fresh(**RATES)
    options: Any = {"epochs": 1, "batch_size": 8, "progress": False}
    fleet.fit(models.data(8), callbacks=[Timing()], **options)
    with pytest.raises(InputError, match=r"Timing has an on_test_begin.* member 'a'.*on_test_end"):
        fleet.fit(models.data(8), validation=models.data(8), callbacks=[Timing()], **options)
    with pytest.raises(InputError, match=r"member 'a' validated with averaged weights.*fleet\.evaluate"):
        fleet.fit(models.data(8), validation=models.data(8), callbacks=[callbacks.SwapEMAWeights()], **options)


def test_tensorboard_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorflow", "tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InputError, match="TensorBoard needs the package tensorflow: pip install tensorflow"):
        wrap([callbacks.TensorBoard()])


def test_folders_without_a_name_have_one_folder_for_each_member(tmp_path: Path, tensorboard: None) -> None:
    fleet, _ = models.fresh(**RATES)
    board = callbacks.TensorBoard(str(tmp_path / "v1.2"))
    fleet.fit(models.data(8), epochs=1, batch_size=8, callbacks=[board], progress=False)
    assert {path.name for path in (tmp_path / "v1.2").iterdir()} == {"a", "b"}
    assert board.log_dir == str(tmp_path / "v1.2")
    assert own_folder("logs", "..") == str(Path("logs/__"))


def test_a_member_that_was_added_gets_a_copy_of_a_used_callback(tmp_path: Path, tensorboard: None) -> None:
    fleet, copies = models.fresh(**RATES)
    given: list[Any] = [
        callbacks.CSVLogger(str(tmp_path / "{name}.csv")),
        callbacks.TensorBoard(str(tmp_path / "{name}")),
    ]
    options: Any = {"epochs": 1, "batch_size": 8, "progress": False, "callbacks": given}
    mf.Fleet({"a": fleet["a"]}).fit(models.data(8), **options)
    mf.Fleet({"a": fleet["a"], "b": copies["b"]}).fit(models.data(8), **options)
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", "b.csv", "a", "b"}
