"""Operations on arrays that are the same for NumPy, JAX and TensorFlow."""

from typing import Any

import numpy as np

from modelfleet.types import Tensor


def is_array(value: Any) -> bool:
    """Return True for an array of NumPy, torch, JAX, TensorFlow, pandas or polars."""
    return hasattr(value, "__array__") and not isinstance(value, type)


def size(leaf: Tensor) -> int:
    """Return the length of the first axis."""
    return int(leaf.shape[0])


def host(tensor: Tensor) -> np.ndarray:
    """Return an array's numbers in NumPy; for bfloat16, which not every reader has, its bits."""
    array = np.asarray(tensor)
    return array.view(np.int16) if array.dtype.name == "bfloat16" else array
