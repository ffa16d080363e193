"""Arrays of any kind for JAX, and the operations on them that feeds need.

If JAX computes on the CPU, data stay in NumPy's memory: gathering rows is cheapest there, and a program reads
several steps of them in one call. For accelerators, data are put on the device once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.arrays import Placing, host, is_array, on_host, room, size

Array = jax.Array | np.ndarray

__all__ = ["as_numpy", "concatenate", "from_host", "host", "index", "is_array", "place", "size", "stack", "take"]
__all__ += ["on_host", "pickle_reduction", "restored", "room", "sender"]


def place(leaf: Any, device: jax.Device | None, *, copy: bool = False) -> Array:
    """Return an array for a device, or on its own device if that is None. It may share memory unless `copy`.

    The array gets a dtype that JAX has: unless JAX uses 64 bits, float64 becomes float32 and int64 becomes int32.

    Raises:
        InputError: An integer does not fit the dtype.
    """
    if not isinstance(leaf, jax.Array):
        leaf = _canonical(as_numpy(leaf))
    if device is None:
        return leaf.copy() if copy else leaf
    if device.platform == "cpu":
        return np.array(leaf) if copy else np.asarray(leaf)
    return jax.device_put(leaf, device)


def index(positions: np.ndarray, device: jax.Device | None) -> Array:
    """Return row numbers for `take`, on a device."""
    return positions if device is None or device.platform == "cpu" else jax.device_put(positions, device)


def take(tensor: Array, index: Array) -> Array:
    """Return the rows of an array at an index of one to three axes: `(*index axes, …)`."""
    return tensor.take(index, axis=0)


def sender(device: jax.Device) -> Placing:
    """Return what sends batches to a device. JAX copies them beside its work, and orders what threads do."""
    return Placing(place, device)


def concatenate(tensors: Sequence[Array]) -> Array:
    """Join arrays along the first axis."""
    return _library(tensors).concatenate(list(tensors))


def stack(tensors: Sequence[Array]) -> Array:
    """Join arrays along a new first axis."""
    return _library(tensors).stack(list(tensors))


def from_host(array: np.ndarray, like: Array) -> np.ndarray:
    """Return an array of `host` in the dtype of `like`."""
    return array.view(like.dtype) if np.dtype(like.dtype).name == "bfloat16" else array


def pickle_reduction(value: Any) -> Any:
    """Return how to pickle an array without copying its numbers; NotImplemented for other values."""
    # Weakly typed arrays come from Python numbers. They are small, and JAX pickles them as such.
    if not isinstance(value, jax.Array) or value.weak_type or len(value.devices()) > 1:
        return NotImplemented
    return restored, (host(value), value.dtype.name)


def restored(array: np.ndarray, dtype: str) -> jax.Array:
    """Return a pickled array on the CPU, in the same memory.

    On JAX's default device, the first of several GPUs would get the weights of all workers.
    """
    with jax.enable_x64(True):  # the array had this dtype in JAX, whatever this process has set
        return jax.device_put(array.view(jnp.dtype(dtype)), jax.devices("cpu")[0])


def as_numpy(leaf: Any) -> np.ndarray:
    """Return an array of any kind as a NumPy array of its own dtype."""
    if not hasattr(leaf, "detach"):
        return np.asarray(leaf)
    # A torch tensor. NumPy can't read its bfloat16, but float32 holds the same numbers.
    leaf = leaf.detach().cpu()
    return np.asarray(leaf.float()).astype(jnp.bfloat16) if "bfloat16" in str(leaf.dtype) else np.asarray(leaf)


def _library(tensors: Sequence[Array]) -> Any:
    return np if all(isinstance(tensor, np.ndarray) for tensor in tensors) else jnp


def _canonical(array: np.ndarray) -> np.ndarray:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        low, high = array.min(), array.max()
        if low < limits.min or high > limits.max:
            wrong = low if low < limits.min else high
            raise InputError(
                f"the data hold {wrong}, which does not fit {dtype}. Have JAX use 64 bits "
                f'(jax.config.update("jax_enable_x64", True)), or give smaller numbers.'
            )
    return array.astype(dtype)
