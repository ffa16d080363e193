"""What is an array, for models that know of NumPy only."""

from typing import Any


def is_array(value: Any) -> bool:
    """Whether it is an array: of NumPy, torch, JAX, TensorFlow, pandas or polars."""
    return hasattr(value, "__array__") and not isinstance(value, type)
