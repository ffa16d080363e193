"""TensorFlow's own models in fleets: modules, functions and SavedModels predict, and are refused all else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import modelfleet as mf
from modelfleet.devices import Device
from modelfleet.errors import InputError, StoreError
from modelfleet.frameworks import tensorflow as adapter
from modelfleet.frameworks.tensorflow import arrays

X = np.random.default_rng(0).normal(size=(10, 4))


@pytest.fixture(autouse=True)
def same_weights_every_time() -> None:
    tf.random.set_seed(0)


class Affine(tf.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.random.normal((4, width)), name="kernel")
        self.bias = tf.Variable(tf.zeros(width), name="bias")

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel + self.bias


class Branching(tf.Module):
    """AutoGraph turns its `if` into TensorFlow's."""

    def __call__(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 1e9:
            x = x * 0.0
        return {"twice": 2.0 * x, "first": x[:, 0]}


def saved(folder: Path, module: Affine) -> Any:
    call = tf.function(module.__call__).get_concrete_function(tf.TensorSpec((None, 4)))
    tf.saved_model.save(module, str(folder), signatures=call)
    return tf.saved_model.load(str(folder))


def expected(module: Affine, x: np.ndarray = X) -> np.ndarray:
    return x.astype(np.float32) @ module.kernel.numpy() + module.bias.numpy()


def test_unlike_models_predict_in_one_fleet(tmp_path: Path) -> None:
    module = Affine()
    loaded = saved(tmp_path, module)
    function = tf.function(lambda x: tf.nn.relu(x))
    fleet = mf.Fleet(
        {
            "module": module,
            "branching": Branching(),
            "function": function,
            "concrete": function.get_concrete_function(tf.TensorSpec((None, 4))),
            "saved": loaded,
            "signature": loaded.signatures["serving_default"],
        }
    )
    found = fleet.predict(X, batch_size=4)  # the last batch is short
    for name in ("module", "saved", "signature"):
        np.testing.assert_allclose(found[name], expected(module), rtol=1e-5)
    for name in ("function", "concrete"):
        np.testing.assert_allclose(found[name], np.maximum(X, 0), rtol=1e-6)
    np.testing.assert_allclose(found["branching"]["twice"], 2 * X, rtol=1e-6)
    np.testing.assert_allclose(found["branching"]["first"], X[:, 0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["module", "saved", "function"])
def test_replicas_answer_with_the_model_s_own_variables(kind: str, tmp_path: Path) -> None:
    module = Affine()
    made = {
        "module": lambda: module,
        "saved": lambda: saved(tmp_path, module),
        "function": lambda: tf.function(module),
    }
    model = made[kind]()
    with mf.Replicas(model, devices="cpu", batch_size=4) as replicas:
        np.testing.assert_allclose(replicas.submit("ada", X).result(), expected(module), rtol=1e-5)
        np.testing.assert_allclose(replicas.submit("bob", X[:3]).result(), expected(module, X[:3]), rtol=1e-5)
    assert adapter.weight_bytes(module) == 4 * (4 * 3 + 3)


def test_each_member_predicts_on_its_own_data() -> None:
    modules = {"a": Affine(), "b": Affine()}
    data = {"a": X[:7], "b": X[3:]}
    found = mf.Fleet(modules).predict(mf.each(data), batch_size=4)
    for name, module in modules.items():
        np.testing.assert_allclose(found[name], expected(module, data[name]), rtol=1e-5)


def test_map_reads_datasets() -> None:
    model = Affine()
    x = X.astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(10))).batch(4)
    answers = mf.map(model, mf.each({"ada": data, "bob": x}), devices="cpu")
    np.testing.assert_allclose(answers["ada"], model(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answers["bob"], model(x), rtol=1e-5, atol=1e-6)  # in batches of other sizes


def test_new_weights_are_seen_and_nothing_is_traced_anew() -> None:
    traces = []

    class Counted(Affine):
        def __call__(self, x: Any) -> Any:
            traces.append(1)
            return super().__call__(x)

    module = Counted()
    fleet = mf.Fleet({"m": module})
    fleet.predict(X, batch_size=5)
    seen = len(traces)
    module.kernel.assign(2 * module.kernel)
    np.testing.assert_allclose(fleet.predict(X, batch_size=5)["m"], expected(module), rtol=1e-5)
    assert len(traces) == seen


def test_signature_of_several_inputs_takes_a_dict(tmp_path: Path) -> None:
    class Sum(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 4), name="a"), tf.TensorSpec((None, 4), name="b")])
        def serve(self, a: Any, b: Any) -> Any:
            return {"sum": a + b, "difference": a - b}

    module = Sum()
    tf.saved_model.save(module, str(tmp_path), signatures=module.serve)
    fleet = mf.Fleet({"m": tf.saved_model.load(str(tmp_path))})
    found = fleet.predict({"a": X, "b": 2 * X})["m"]
    np.testing.assert_allclose(found["sum"], 3 * X, rtol=1e-6)
    np.testing.assert_allclose(found["difference"], -X, rtol=1e-6)
    with pytest.raises(InputError, match=r"the signature takes a, b\. Give the inputs as a dict"):
        fleet.predict(X)


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        (lambda fleet: fleet.fit((X, X)), "trained"),
        (lambda fleet: fleet.evaluate((X, X)), "evaluated"),
        (lambda fleet: fleet.compile("adam", "mse"), "compiled"),
    ],
    ids=["fit", "evaluate", "compile"],
)
def test_only_predicting_is_possible(verb: Callable[[mf.Fleet], Any], what: str) -> None:
    with pytest.raises(InputError, match=f"member 'm' is a Affine .* can't be {what}: .* Give a keras.Model"):
        verb(mf.Fleet({"m": Affine()}))


def test_data_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"member 'm' can't take this batch: \(2, 5\) float32 into Affine"):
        mf.Fleet({"m": Affine()}).predict(np.zeros((6, 5)))


def test_module_without_a_call_is_refused() -> None:
    with pytest.raises(InputError, match="member 'm' is a Module that can't be called"):
        mf.Fleet({"m": tf.Module()})


def test_keras_models_are_left_to_keras() -> None:
    model = type("Model", (Affine,), {"__module__": "keras.models"})()
    assert adapter.is_model(Affine())
    assert not adapter.is_model(model)


def test_modules_are_built_from_seeds_saved_and_loaded(tmp_path: Path) -> None:
    tf.random.set_seed(5)
    before = tf.random.normal((2,)).numpy()
    tf.random.set_seed(5)
    fleet = mf.Fleet.build(Affine, 3, seed=1, width=mf.each([3, 3, 2]))
    np.testing.assert_array_equal(tf.random.normal((2,)).numpy(), before)  # the caller's draws are as they were
    again = mf.Fleet.build(Affine, 3, seed=1, width=mf.each([3, 3, 2]))
    np.testing.assert_array_equal(fleet["0"].kernel.numpy(), again["0"].kernel.numpy())
    assert np.abs(fleet["0"].kernel.numpy() - fleet["1"].kernel.numpy()).max() > 0.01
    fleet["1"].bias.assign([1.0, 2.0, 3.0])
    fleet.save(tmp_path / "fleet")
    loaded = mf.load(tmp_path / "fleet", factory=Affine)
    for name, found in loaded.predict(X).items():
        np.testing.assert_array_equal(found, fleet.predict(X)[name])
    with pytest.raises(StoreError, match=r"its '\d+\.(kernel|bias)' is"):
        mf.load(tmp_path / "fleet", factory=lambda width: Affine(width + 1))


def test_functions_and_saved_models_are_not_saved(tmp_path: Path) -> None:
    for model in (tf.function(lambda x: x), saved(tmp_path, Affine())):
        with pytest.raises(InputError, match=r"can't be saved in a fleet: .* tf\.saved_model\.save"):
            mf.Fleet({"m": model}).save(tmp_path / "fleet")


def test_clone_has_weights_of_its_own() -> None:
    fleet = mf.Fleet({"m": Affine()})
    fleet.clone("m", as_="n")
    np.testing.assert_array_equal(fleet["n"].kernel.numpy(), fleet["m"].kernel.numpy())
    fleet["n"].kernel.assign(0 * fleet["n"].kernel)
    assert np.abs(fleet["m"].kernel.numpy()).max() > 0


def test_devices_are_named_as_tensorflow_names_them() -> None:
    assert adapter.choose((Device("cpu"),)) == (Device("cpu"),)
    assert adapter.native(Device("cpu")) == "CPU:0"
    assert adapter.native(Device("cpu", 7)) == "CPU:0"  # a logical CPU that TensorFlow was not told of
    with pytest.raises(InputError, match="device 'cuda:9' does not exist: TensorFlow sees cpu"):
        adapter.choose((Device("cuda", 9),))


def test_arrays_of_any_kind_are_placed() -> None:
    assert arrays.place(X, "CPU:0").dtype == np.float32
    whole = tf.range(6, dtype=tf.int64)
    placed = arrays.place(whole, "CPU:0")
    assert isinstance(placed, np.ndarray)
    assert placed.dtype == np.int64
    assert arrays.place(whole, None) is whole
    index = arrays.index(np.array([[0, 2], [1, 1]]), "CPU:0")
    np.testing.assert_array_equal(arrays.take(placed, index), [[0, 2], [1, 1]])
    np.testing.assert_array_equal(arrays.take(whole, tf.constant([1, 1])), [1, 1])
    assert arrays.concatenate([placed, placed]).shape == (12,)
    assert tuple(arrays.stack([whole, whole]).shape) == (2, 6)
    half = tf.constant([1.5, 2.5], tf.bfloat16)
    back = arrays.from_host(arrays.host(half), half)
    np.testing.assert_array_equal(back.astype(np.float32), [1.5, 2.5])


class Double(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.random.normal((4, 3), dtype=tf.float64))

    @tf.function
    def __call__(self, x: Any) -> Any:
        return x @ self.kernel


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_float64_model_answers_in_float64(dtype: Any) -> None:
    model, x = Double(), X.astype(dtype)
    answer = mf.map(model, {"ada": x}, devices="cpu")["ada"]
    assert answer.dtype == np.float64
    np.testing.assert_allclose(answer, x.astype(np.float64) @ model.kernel.numpy(), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x: tf.ragged.range(tf.cast(x[:, 0], tf.int32)), "gave 'other' as a RaggedTensor"),
        (tf.sparse.from_dense, "gave 'other' as a SparseTensor"),
        (tf.reduce_mean, "gave 'other' as ()"),
        (lambda x: "a word", "gave 'other' as ()"),
    ],
)
def test_what_has_no_rows_is_refused_by_name(make: Any, told: str) -> None:
    model = tf.function(lambda x: {"y": x, "other": make(x)})
    (error,) = mf.map(model, {"ada": np.array([[1.0], [3.0]])}, devices="cpu").failed.values()
    assert told in str(error)
