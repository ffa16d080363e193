"""Arrays of any kind for JAX, and the few operations that feeds need of them.

Where JAX computes on the CPU, data stay in NumPy's memory: gathering rows there costs least, and a program reads
several steps of them in one call. For accelerators they are put on the device once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.arrays import host, is_array, size

Array = jax.Array | np.ndarray

__all__ = ["as_numpy", "concatenate", "from_host", "host", "index", "is_array", "place", "size", "stack", "take"]
__all__ += ["reduced", "restored"]


def place(leaf: Any, device: jax.Device | None, *, copy: bool = False) -> Array:
    """An array for a device; None: wherever it is now. It may share memory unless `copy`.

    In the dtypes that JAX has: unless it was told to use 64 bits, float64 becomes float32 and int64 int32.
    """
    if not isinstance(leaf, jax.Array):
        leaf = _canonical(as_numpy(leaf))
    if device is None:
        return leaf.copy() if copy else leaf
    if device.platform == "cpu":
        return np.array(leaf) if copy else np.asarray(leaf)
    return jax.device_put(leaf, device)


def index(positions: np.ndarray, device: jax.Device | None) -> Array:
    """Row numbers for `take`, on a device."""
    return positions if device is None or device.platform == "cpu" else jax.device_put(positions, device)


def take(tensor: Array, index: Array) -> Array:
    """The rows of an array at an index of one to three axes: `(*index axes, …)`."""
    return tensor.take(index, axis=0)


def concatenate(tensors: Sequence[Array]) -> Array:
    """One array, joined along the first axis."""
    return _library(tensors).concatenate(list(tensors))


def stack(tensors: Sequence[Array]) -> Array:
    """One array, joined along a new first axis."""
    return _library(tensors).stack(list(tensors))


def from_host(array: np.ndarray, like: Array) -> np.ndarray:
    """What `host` gave, in the dtype of another."""
    return array.view(like.dtype) if np.dtype(like.dtype).name == "bfloat16" else array


def reduced(value: Any) -> Any:
    """How to pickle an array without copying its numbers; NotImplemented for all else."""
    # Weakly typed ones are numbers of Python: small, and JAX knows how to keep them so.
    if not isinstance(value, jax.Array) or value.weak_type or len(value.devices()) > 1:
        return NotImplemented
    return restored, (host(value), value.dtype.name)


def restored(array: np.ndarray, dtype: str) -> jax.Array:
    """The array that `reduced` took apart: on the CPU, in the very memory. Who computes with it puts it elsewhere;
    on the first of several GPUs the weights of all their workers would come together."""
    with jax.enable_x64(True):  # whatever is set here: the array was one of JAX's as it is
        return jax.device_put(array.view(jnp.dtype(dtype)), jax.devices("cpu")[0])


def as_numpy(leaf: Any) -> np.ndarray:
    """An array of any kind as NumPy's, in its own dtype."""
    if not hasattr(leaf, "detach"):
        return np.asarray(leaf)
    # Of torch, whose bfloat16 NumPy knows by the name of ml_dtypes only: float32 holds the same numbers.
    leaf = leaf.detach().cpu()
    return np.asarray(leaf.float()).astype(jnp.bfloat16) if "bfloat16" in str(leaf.dtype) else np.asarray(leaf)


def _library(tensors: Sequence[Array]) -> Any:
    return np if all(isinstance(tensor, np.ndarray) for tensor in tensors) else jnp


def _canonical(array: np.ndarray) -> np.ndarray:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        most = np.iinfo(dtype)
        low, high = array.min(), array.max()
        if low < most.min or high > most.max:
            wrong = low if low < most.min else high
            raise InputError(
                f"the data hold {wrong}, which does not fit {dtype}. Have JAX use 64 bits "
                f'(jax.config.update("jax_enable_x64", True)), or give smaller numbers.'
            )
    return array.astype(dtype)
