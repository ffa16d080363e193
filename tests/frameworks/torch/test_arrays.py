from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelfleet.frameworks.torch import arrays
from modelfleet.workers.parcels import SharedMemoryValue


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float64, torch.float32),
        (np.float32, torch.float32),
        (np.float16, torch.float16),
        (np.int64, torch.int64),
        (np.int32, torch.int64),
        (np.int8, torch.int64),
        (np.uint16, torch.int64),
        (np.uint32, torch.int64),
        (np.uint8, torch.uint8),
        (np.bool_, torch.bool),
        (np.complex64, torch.complex64),
    ],
)
def test_dtypes_of_numpy_arrays(given: Any, expected: torch.dtype) -> None:
    placed = arrays.place(np.array([0, 1, 1], dtype=given), "cpu")
    assert placed.dtype == expected
    assert placed.tolist() == [0, 1, 1]


def test_float64_follows_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert arrays.place(np.array([0.1]), "cpu").item() == 0.1
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.uint8])
def test_torch_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    assert arrays.place(torch.ones(3, dtype=dtype), "cpu").dtype == dtype


def test_tensors_leave_their_graph() -> None:
    assert not arrays.place(torch.ones(3, requires_grad=True) * 2, "cpu").requires_grad


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=np.float32)[::-1].reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.broadcast_to(np.float32(1), (2, 3)),
    ],
    ids=["byte order", "negative stride", "column order", "read-only"],
)
def test_awkward_memory_is_taken_without_a_warning(array: np.ndarray) -> None:
    np.testing.assert_array_equal(arrays.place(array, "cpu").numpy(), array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_jax_arrays(dtype: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.array([[0, 1], [1, 1]], dtype=dtype)
    assert arrays.is_array(array)
    placed = arrays.place(array, "cpu")
    assert placed.dtype == (torch.int64 if dtype == "int32" else getattr(torch, dtype))
    assert placed.tolist() == [[0, 1], [1, 1]]


def test_sharing_memory_and_copying() -> None:
    array = np.zeros(2, dtype=np.float32)
    tensor = torch.from_numpy(array)
    shared, copied = arrays.place(array, "cpu"), arrays.place(array, "cpu", copy=True)
    copied_tensor = arrays.place(tensor, None, copy=True)
    array[0] = 1
    assert shared.tolist() == [1, 0]
    assert copied.tolist() == copied_tensor.tolist() == [0, 0]


def test_what_is_an_array() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    yes = [np.ones(2), torch.ones(2), pandas.Series([1]), pandas.DataFrame({"a": [1]}), polars.Series([1])]
    assert all(arrays.is_array(value) for value in yes)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2)))
    no = [[1.0, 2.0], (1,), {"a": 1}, "text", None, 3, np.ndarray, loader]
    assert not any(arrays.is_array(value) for value in no)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_taking_rows(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(10, *shape)
    flat = arrays.index(np.array([3, 0, 3]), "cpu")
    np.testing.assert_array_equal(arrays.take(tensor, flat).numpy(), tensor.numpy()[[3, 0, 3]])
    blocks = arrays.index(np.arange(8).reshape(2, 4), "cpu")
    taken = arrays.take(tensor, blocks[:, :3])
    assert taken.shape == (2, 3, *shape)
    np.testing.assert_array_equal(taken.numpy(), tensor.numpy()[[[0, 1, 2], [4, 5, 6]]])


def test_joining() -> None:
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    assert arrays.concatenate([a, b]).shape == (4, 3)
    assert arrays.stack([a, b]).shape == (2, 2, 3)
    assert arrays.size(a) == 2


def test_hooks_of_parameters_cross_to_other_processes() -> None:
    def twice(gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient

    def negated(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.neg_()

    layer = nn.Linear(2, 1)
    layer.weight.register_hook(twice)
    layer.weight.register_post_accumulate_grad_hook(negated)
    shared = SharedMemoryValue.put(layer, "the model")
    received = shared.get()
    received(torch.ones(1, 2)).sum().backward()
    assert received.weight.grad.tolist() == [[-2.0, -2.0]]
    assert received.bias.grad.tolist() == [1.0]
    assert received.weight.is_leaf
    assert torch.equal(received.weight, layer.weight)
    shared.close()
