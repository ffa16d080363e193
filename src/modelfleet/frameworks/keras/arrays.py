"""Arrays of any kind for Keras on TensorFlow, in NumPy's memory: programs read several steps of them in a call.

On JAX and on torch, Keras models are fed from those frameworks' own `arrays`.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np


def is_array(value: Any) -> bool:
    """Whether `place` can take it: arrays of NumPy, torch, JAX, TensorFlow, pandas and polars."""
    return hasattr(value, "__array__") and not isinstance(value, type)


def size(leaf: Any) -> int:
    """The length of the first axis."""
    return int(leaf.shape[0])


def place(leaf: Any, device: Any, *, copy: bool = False) -> np.ndarray:
    """An array in NumPy's memory. As Keras has it, float64 becomes its own kind of float; integers stay."""
    array = np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)
    wanted = keras.config.floatx() if array.dtype == np.float64 else array.dtype.newbyteorder("=")
    return array.astype(wanted, copy=copy)


def index(positions: np.ndarray, device: Any) -> np.ndarray:
    """Row numbers for `take`."""
    return positions


def take(tensor: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The rows of an array at an index of one to three axes: `(*index axes, …)`."""
    return tensor.take(index, axis=0)


def concatenate(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """One array, joined along the first axis."""
    return np.concatenate(list(tensors))


def stack(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """One array, joined along a new first axis."""
    return np.stack(list(tensors))


def host(tensor: Any) -> np.ndarray:
    """A tensor's numbers as a NumPy array; of bfloat16, which not every reader has, the bits."""
    array = np.asarray(tensor)
    return array.view(np.int16) if array.dtype.name == "bfloat16" else array


def from_host(array: np.ndarray, like: Any) -> np.ndarray:
    """What `host` gave, in the dtype of another."""
    dtype = np.asarray(like).dtype
    return array.view(dtype) if dtype.name == "bfloat16" else array
