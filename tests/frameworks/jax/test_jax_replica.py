"""JAX models as replicas: asked as they are, with weights that are another's memory."""

import functools
import gc
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.replicas.memory import asked_by_two

import modelfleet as mf
from modelfleet.frameworks import jax as adapter
from modelfleet.types import Precision
from modelfleet.workers.parcels import SharedMemoryValue
from modelfleet.workers.process import dismiss

X = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def no_idle_workers() -> Iterator[None]:
    yield
    dismiss()


class Net(nnx.Module):
    """All kinds of variables: params, statistics and random keys."""

    def __init__(self, width: int) -> None:
        rngs = adapter.rngs(3)
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(width, width, kernel_init=nnx.initializers.constant(0.01), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.drop(self.norm(nnx.relu(self.first(x)))))


def product(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def pair(width: int) -> tuple[Any, Any]:
    return {"w": jnp.arange(8.0 * width).reshape(8, width) / width, "b": jnp.ones(width, jnp.bfloat16)}, product


def direct(model: Any, x: np.ndarray = X) -> np.ndarray:
    if not isinstance(model, nnx.Module):
        return np.asarray(model[1](model[0], x))
    own = nnx.clone(model)
    own.eval()
    return np.asarray(own(x))


@pytest.mark.parametrize("make", [functools.partial(pair, 1 << 14), functools.partial(Net, 1 << 9)])
def test_two_workers_share_the_weights(make: Any) -> None:
    large = make()
    for shared, own, answer in asked_by_two(adapter, large, X[:1]):
        assert (shared, own) == pytest.approx((1.0, 0.0), abs=1e-3)
        np.testing.assert_allclose(answer, direct(large, X[:1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [pair, Net])
def test_arrays_cross_without_a_copy_and_outlive_the_memory_s_name(make: Any) -> None:
    sent = {
        "model": make(64),
        "halves": jnp.ones(3, jnp.bfloat16),
        "number": jnp.asarray(2.0),
        "none": jnp.ones(0),
    }
    shared = SharedMemoryValue.put(sent, "a model")
    received = shared.get()
    shared.close()
    gc.collect()
    assert len(shared._parcel.spans) > 3
    model = received.pop("model")
    assert (received["number"].weak_type, received["halves"].dtype) == (True, jnp.bfloat16)
    for name, array in received.items():
        np.testing.assert_array_equal(array, sent[name])
    replica = adapter.Replica(model, jax.devices("cpu")[0], "float32")
    np.testing.assert_allclose(replica(X), direct(sent["model"]), rtol=1e-6)


def test_the_caller_s_arrays_may_be_written_over() -> None:
    params, apply = pair(64)
    expected = direct((params, apply))
    with mf.Replicas((params, apply), devices="cpu") as replicas:
        before = replicas.submit("ada", X).result()
        # A train step of the caller's own, which takes the memory of its arguments for its results.
        step = jax.jit(lambda params: jax.tree.map(lambda p: p - 1, params), donate_argnums=0)
        params = step(step(params))
        after = replicas.submit("ada", X).result()
    np.testing.assert_array_equal(before, after)
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    np.testing.assert_allclose(params["w"], pair(64)[0]["w"] - 2, rtol=1e-6)


def test_a_module_is_left_as_it_was() -> None:
    model = Net(16)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    with mf.Replicas(model, devices="cpu", batch_size=4) as replicas:
        np.testing.assert_allclose(replicas.submit("ada", X).result(), direct(model), rtol=1e-5, atol=1e-6)
    assert not model.drop.deterministic
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(("precision", "near"), [("bf16", 0.1), ("fp16", 0.01)])
def test_lower_precision_where_it_is_asked_for(precision: Precision, near: float) -> None:
    model = Net(64)
    with mf.Replicas(model, devices="cpu", precision=precision) as replicas:
        answer = replicas.submit("ada", X).result()
    far = np.abs(answer - direct(model)).max()
    assert answer.dtype == np.float32
    assert 1e-5 < far < near


def test_the_bytes_of_the_weights() -> None:
    assert adapter.weight_bytes(pair(16)) == 8 * 16 * 4 + 16 * 2
    assert adapter.weight_bytes(Net(2)) >= 4 * (8 * 2 + 2 + 4 * 2 + 2 * 2 + 2)


@pytest.mark.parametrize("devices", ["cpu", "cpu:0,cpu:1"])
def test_with_64_bits_a_float64_model_answers_in_float64(devices: str) -> None:
    x = np.random.default_rng(1).normal(size=(9, 8))
    with jax.enable_x64(True):  # in this thread alone: those that answer have to be told
        model = {"w": jnp.asarray(np.random.default_rng(2).normal(size=(8, 3))), "b": jnp.ones(3)}, product
        expected = direct(model, x)
        answer = mf.map(model, {"ada": x}, devices=devices)["ada"]
    assert answer.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(answer, expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (lambda x: {"y": x, "mean": x.mean()}, r"'mean' as \(\)"),
        (lambda x: {"y": x, "name": "net"}, r"type <class 'str'> at output component .*\['name'\]"),
    ],
)
def test_what_belongs_to_no_row_is_refused_by_name(output: Any, told: str) -> None:
    model = {"w": jnp.ones(1)}, lambda params, x: output(x)
    (error,) = mf.map(model, {"ada": X}, devices="cpu").failed.values()
    assert re.search(told, str(error))


def test_a_list_with_an_entry_per_row_is_dealt_out_row_by_row() -> None:
    model = {"w": jnp.ones(1)}, lambda params, x: list(x)
    answer = mf.map(model, {"ada": X}, devices="cpu", batch_size=4)["ada"]
    np.testing.assert_array_equal(np.stack(answer), X)
