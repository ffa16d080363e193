"""Operations on arrays that are the same for several frameworks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from modelfleet.trees import map_tree
from modelfleet.types import NativeDevice, Tensor, Tree


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


def on_host(tensor: Tensor) -> np.ndarray:
    """Return a tensor in the host's memory."""
    return np.asarray(tensor)


def room(device: NativeDevice) -> int | None:
    """Return None: the framework does not say how much memory a device has for data."""
    return None


class Placing:
    """Puts batches on a device at once: where the device is the host, or the framework copies beside its work.

    Args:
        place: The `place` of the framework's arrays.
        device: The device.
    """

    def __init__(self, place: Callable[..., Tensor], device: NativeDevice) -> None:
        self._place, self._device = place, device

    def send(self, tree: Tree, /, *, copy: bool) -> Callable[[], Tree]:
        """Put a batch on the device. Return a function that returns it."""
        placed = map_tree(lambda leaf: self._place(leaf, self._device, copy=copy), tree)
        return lambda: placed
