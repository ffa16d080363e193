"""JAX models as an adapter sees them: their structure, their weights, arrays, files and devices."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from modelfleet.devices import Device
from modelfleet.errors import InputError
from modelfleet.frameworks import files
from modelfleet.frameworks import jax as adapter
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.jax.models import form_of


class Net(nnx.Module):
    """Dropout, BatchNorm and a tied weight."""

    def __init__(self, rngs: nnx.Rngs, width: int = 5, scale: float = 1.0, activation: Any = nnx.relu) -> None:
        self.inner = nnx.Linear(width, width, kernel_init=nnx.initializers.normal(0.1), rngs=rngs)
        self.again = self.inner
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = scale
        self.activation = activation
        self.layers = nnx.List([nnx.Linear(width, 2, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.drop(self.norm(self.activation(self.again(self.inner(x)))))
        return self.scale * self.layers[0](x)


def net(seed: int = 0, **options: Any) -> Net:
    return Net(adapter.rngs(seed), **options)


def linear(params: Any, x: Any) -> Any:
    return x @ params["w"]


def test_modules_of_one_structure_are_alike_whatever_their_weights_and_mode() -> None:
    first, second = net(0), net(1)
    second.eval()
    assert adapter.signature(first) == adapter.signature(second)
    assert hash(adapter.signature(first)) == hash(adapter.signature(second))
    assert adapter.difference(adapter.signature(first), adapter.signature(second)) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 6}, "again.bias is Param (6,) float32, not Param (5,) float32"),
        ({"scale": 2.0}, "scale is 2.0, not 1.0"),
        ({"activation": nnx.tanh}, "activation is "),
    ],
)
def test_unlike_modules_say_where(options: dict[str, Any], words: str) -> None:
    said = adapter.difference(adapter.signature(net(**options)), adapter.signature(net()))
    assert said is not None
    assert said.startswith(words)


def test_closures_are_alike_if_what_they_close_over_is() -> None:
    def scaled(by: float) -> Any:
        return lambda x: by * x

    assert adapter.signature(net(activation=scaled(2))) == adapter.signature(net(activation=scaled(2)))
    assert adapter.signature(net(activation=scaled(2))) != adapter.signature(net(activation=scaled(3)))


def test_a_tie_is_part_of_the_structure() -> None:
    loose = net()
    loose.again = nnx.clone(loose.inner)
    said = adapter.difference(adapter.signature(net()), adapter.signature(loose))
    assert said == "inner is the same as again, not Linear"


def test_pairs_are_told_apart_by_function_and_shapes() -> None:
    first = adapter.signature(({"w": np.ones((2, 3), np.float32)}, linear))
    assert first == adapter.signature(({"w": np.zeros((2, 3), np.float32)}, linear))
    wider = adapter.signature(({"w": np.ones((2, 4), np.float32)}, linear))
    assert adapter.difference(wider, first) == "params.w is (2, 4) float32, not (2, 3) float32"
    other = adapter.signature(({"w": np.ones((2, 3), np.float32)}, lambda p, x: x))
    assert "apply is" in str(adapter.difference(other, first))


def test_what_is_a_model() -> None:
    assert adapter.is_model(net())
    assert adapter.is_model(({"w": np.ones(3)}, linear))
    assert not adapter.is_model(({}, linear))
    assert not adapter.is_model((linear, linear))
    assert not adapter.is_model([{"w": np.ones(3)}, linear])
    with pytest.raises(InputError, match=r"member 'a': its 'w' is abstract, without values"):
        adapter.check_model(({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, linear), "a")


def test_a_shared_variable_would_be_trained_twice() -> None:
    first, second = net(0), net(1)
    assert adapter.trained_twice([first, second]) is None
    second.layers[0].kernel = first.layers[0].kernel
    assert adapter.trained_twice([first, second]) == (0, 1, "layers.0.kernel")
    pair = ({"w": jnp.ones((2, 3))}, linear)
    assert adapter.trained_twice([pair, adapter.copy_model(pair)]) is None  # arrays never change


def test_a_copy_is_a_model_of_its_own() -> None:
    model = net()
    copy = adapter.copy_model(model)
    copy.inner.kernel[...] = 0 * copy.inner.kernel[...]
    assert np.asarray(model.inner.kernel[...]).any()
    pair = ({"w": np.ones((2, 3))}, linear)
    params, _ = adapter.copy_model(pair)
    params["w"][0] = 7
    assert pair[0]["w"][0, 0] == 1


def test_seeds_of_63_bits_make_weights_of_their_own() -> None:
    kernels = [np.asarray(net(seed).inner.kernel[...]) for seed in (5, 5 + (1 << 40), 5)]
    assert (kernels[0] == kernels[2]).all()
    assert (kernels[0] != kernels[1]).any()


@pytest.mark.parametrize("model", [net(0), ({"w": jnp.ones((2, 3)), "deep": [np.ones(2, np.float32)]}, linear)])
def test_weights_are_kept_and_filled_in(model: Any, tmp_path: Path) -> None:
    other = (
        net(1) if isinstance(model, Net) else ({"w": 2 * model[0]["w"], "deep": [np.zeros(2, np.float32)]}, linear)
    )
    assert adapter.weights_key(model) == adapter.weights_key(other)
    stacked = adapter.stacked_weights([model, other])
    files.write(tmp_path / "a.safetensors", stacked)
    row = files.read_rows(tmp_path / "a.safetensors", 0, 1)[0]
    assert adapter.fill(other, row) is None
    again = adapter.stacked_weights([other])
    assert all((again[name][0] == stacked[name][0]).all() for name in stacked)
    name = next(iter(row))
    assert f"it has a {name!r} that the folder" in str(
        adapter.fill(other, {k: v for k, v in row.items() if k != name})
    )
    assert "the folder's is (0,)" in str(adapter.fill(other, {**row, name: row[name].reshape(-1)[:0]}))


def test_params_that_cannot_be_changed_are_not_filled() -> None:
    class Params(NamedTuple):
        w: Any

    said = adapter.fill((Params(jnp.ones(2)), linear), {"w": np.zeros(2, np.float32)})
    assert "its params are a Params, which can't be filled" in str(said)


def test_a_module_comes_apart_and_together_again() -> None:
    model = net()
    form = form_of(model)
    params, buffers = form.parts(model)
    assert sum("kernel" in key for key in params) == 2  # the tied one once
    assert any("norm.mean" in key for key in buffers)
    raw = next(value for key, value in buffers.items() if "rngs.key" in key)
    assert raw.dtype == jnp.uint32
    x = jnp.ones((3, 5))
    output, same, after = form.run(params, buffers, jax.random.key(0), lambda m: form.call(m, x), train=True)
    assert all(same[key] is params[key] for key in params)
    assert output.shape == (3, 2)
    count = next(key for key in buffers if "count" in key)
    assert int(after[count]) == int(buffers[count]) + 1
    twin = net(3)
    assert form.write_back(twin, params, buffers) is twin
    model.eval()
    twin.eval()
    np.testing.assert_array_equal(model(x), twin(x))


def test_a_pair_is_given_what_its_function_takes() -> None:
    seen: list[dict[str, Any]] = []

    def apply(params: Any, x: Any, *, train: bool, rng: Any = None) -> Any:
        seen.append({"train": train, "rng": rng})
        return x * params["w"]

    model = ({"w": jnp.ones(2), "steps": jnp.int32(3)}, apply)
    form = form_of(model)
    params, buffers = form.parts(model)
    assert list(params) == ["001.w"]
    assert list(buffers) == ["000.steps"]  # whole numbers have no gradient
    key = jax.random.key(0)
    for train in (True, False):
        form.run(params, buffers, key, lambda m: form.call(m, jnp.ones(2)), train=train)
    assert seen[0]["rng"] is key
    assert seen[1] == {"train": False, "rng": None}
    new = form.write_back(model, {"001.w": np.zeros(2, np.float32)}, buffers)
    assert new[1] is apply
    assert not new[0]["w"].any()


# --- arrays, files and devices


def test_arrays_come_in_the_dtypes_that_jax_has() -> None:
    cpu = adapter.native(Device("cpu"))
    for given, dtype in ((np.ones(3), "float32"), (np.arange(3), "int32"), (torch.ones(3), "float32")):
        placed = arrays.place(given, cpu)
        assert isinstance(placed, np.ndarray)  # gathered by NumPy where JAX computes on the CPU
        assert str(placed.dtype) == dtype
    assert arrays.place(np.arange(3, dtype=np.uint8), cpu).dtype == np.uint8
    same = np.ones(3, np.float32)
    assert arrays.place(same, cpu) is same
    assert arrays.place(same, cpu, copy=True) is not same
    with pytest.raises(InputError, match="4294967296, which does not fit int32"):
        arrays.place(np.array([1 << 32]), cpu)


def test_rows_are_taken_by_indices_of_any_axes() -> None:
    tensor = np.arange(12, dtype=np.float32).reshape(6, 2)
    index = np.array([[[0, 5], [1, 1]]])
    for kind in (np.asarray, jnp.asarray):
        taken = arrays.take(kind(tensor), arrays.index(index, None))
        np.testing.assert_array_equal(taken, tensor[index])
        np.testing.assert_array_equal(arrays.concatenate([kind(tensor), kind(tensor)])[6:], tensor)
        assert arrays.stack([kind(tensor), kind(tensor)]).shape == (2, 6, 2)


def test_bfloat16_goes_to_the_host_and_back() -> None:
    half = jnp.ones(3, jnp.bfloat16)
    bits = arrays.host(half)
    assert bits.dtype == np.int16
    np.testing.assert_array_equal(arrays.from_host(bits, half), np.asarray(half))


def test_files_hold_arrays_of_jax_and_scalars(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"a": jnp.ones((2, 3)).T, "b": np.float32(4), "c": jnp.ones((2, 2), jnp.bfloat16)}
    files.write(path, tensors)
    read = files.read(path)
    assert read["b"].shape == ()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(np.asarray(read[name], np.float32), np.asarray(tensor, np.float32))
    files.write(path, {"a": tensors["a"]})
    assert files.read_rows(path, 1, 2)[0]["a"].tolist() == [1, 1]


def test_devices() -> None:
    assert adapter.choose((Device("cpu", 1),)) == (Device("cpu", 1),)
    assert adapter.native(Device("cpu", 1)).platform == "cpu"
    with pytest.raises(InputError, match="device 'xpu:3' does not exist: JAX sees cpu"):
        adapter.choose((Device("xpu", 3),))


def test_functions_that_call_themselves_or_are_not_defined_yet_are_compared() -> None:
    def recursive(levels: int) -> Any:
        def activation(x: jax.Array, level: int = levels) -> jax.Array:
            return x if level == 0 else activation(nnx.relu(x), level - 1)

        return activation

    def unfinished() -> Any:
        def activation(x: jax.Array) -> jax.Array:
            return later(x)

        if "never" in globals():
            later = nnx.relu
        return activation

    one, same, other = (net(activation=recursive(levels)) for levels in (1, 1, 2))
    assert adapter.signature(one) == adapter.signature(same) != adapter.signature(other)
    assert adapter.signature(net(activation=unfinished())) != adapter.signature(one)
