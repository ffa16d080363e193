"""Values of any framework as something else: NumPy arrays, pickles, callbacks of modelfleet."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelfleet.errors import InputError, refuse_masked
from modelfleet.frameworks import adapter
from modelfleet.types import Tensor


def pickle_reduction(value: Any) -> Any:
    """Return how to pickle a tensor by its NumPy array, or a Keras model; NotImplemented for other values."""
    root = type(value).__module__.partition(".")[0]
    framework = {"torch": "torch", "jaxlib": "jax"}.get(root)  # the class of JAX's arrays is in jaxlib
    if framework is not None and framework in sys.modules:
        return adapter(framework).arrays.pickle_reduction(value)
    models = sys.modules.get("modelfleet.frameworks.keras.replica")
    return NotImplemented if models is None else models.pickle_reduction(value)


def as_numpy(value: Tensor) -> np.ndarray:
    """Return an array of any framework and device as a NumPy array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return adapter("torch").arrays.as_numpy(value)
    refuse_masked(value)
    return np.asarray(value)


def wrap_keras_callbacks(callbacks: Sequence[Any]) -> Any:
    """Return callbacks of Keras as one callback of modelfleet, which calls them in the same order.

    Raises:
        InputError: A callback is neither modelfleet's nor Keras's.
    """
    for callback in callbacks:
        if "keras" not in {cls.__module__.partition(".")[0] for cls in type(callback).__mro__}:
            raise InputError(
                f"callbacks has a {type(callback).__module__}.{type(callback).__qualname__}. Give subclasses of "
                f"modelfleet.Callback, or callbacks of Keras."
            )
    return adapter("keras").wrap(callbacks)
