"""Arrays of any kind for TensorFlow, and the operations on them that feeds need.

If TensorFlow computes on the CPU, data stay in NumPy's memory: gathering rows is cheapest there, and a program
reads several steps of them in one call. For accelerators, data are put on the device once.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from modelfleet.frameworks.arrays import Placing, host, is_array, on_host, room, size
from modelfleet.types import Tensor

Array = tf.Tensor | np.ndarray

__all__ = ["STRINGS", "concatenate", "from_host", "host", "index", "is_array", "on_host", "place", "room"]
__all__ += ["sender", "size", "stack", "take"]
STRINGS = True  # TensorFlow computes with strings; in NumPy they are arrays of objects


def place(leaf: Tensor, device: str | None, *, copy: bool = False, exact: bool = False) -> Array:
    """Return an array for a device, or on its own device if that is None. It may share memory unless `copy`.

    TensorFlow's tensors keep their dtype. In other arrays, float64 becomes float32 unless `exact`, since float64
    is only NumPy's default and models are float32.
    """
    if tf.is_tensor(leaf):
        if device is None:
            return tf.identity(leaf) if copy else leaf
        leaf = leaf.numpy()
    else:
        leaf = _native(np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf), exact)
    if _on_host(device):
        return np.array(leaf) if copy else leaf
    with tf.device(device):
        return tf.convert_to_tensor(leaf)


def index(positions: np.ndarray, device: str | None) -> Array:
    """Return row numbers for `take`, on a device."""
    if _on_host(device):
        return positions
    with tf.device(device):
        return tf.convert_to_tensor(positions)


def take(tensor: Array, index: Array) -> Array:
    """Return the rows of an array at an index of one to three axes: `(*index axes, …)`."""
    return tf.gather(tensor, index) if tf.is_tensor(tensor) else tensor.take(index, axis=0)


def sender(device: str) -> Placing:
    """Return what sends batches to a device. TensorFlow orders what threads do."""
    return Placing(place, device)


def concatenate(tensors: Sequence[Array]) -> Array:
    """Join arrays along the first axis."""
    return tf.concat(list(tensors), 0) if any(map(tf.is_tensor, tensors)) else np.concatenate(list(tensors))


def stack(tensors: Sequence[Array]) -> Array:
    """Join arrays along a new first axis."""
    return tf.stack(list(tensors)) if any(map(tf.is_tensor, tensors)) else np.stack(list(tensors))


def from_host(array: np.ndarray, like: Array) -> np.ndarray:
    """Return an array of `host` in the dtype of `like`."""
    dtype = getattr(like.dtype, "as_numpy_dtype", like.dtype)
    return array.view(dtype) if np.dtype(dtype).name == "bfloat16" else array


def _on_host(device: str | None) -> bool:
    return device is None or device.startswith("CPU")


def _native(array: np.ndarray, exact: bool) -> np.ndarray:
    if array.dtype.kind in "OUS":
        return array.astype(object)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if exact or array.dtype != np.float64 else array.astype(np.float32)
