"""Arrays of any kind as torch tensors, and the operations on them that feeds need."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.arrays import Placing, is_array, size
from modelfleet.frameworks.torch import pickling
from modelfleet.frameworks.torch.devices import memory, new_stream
from modelfleet.frameworks.torch.uploading import Uploader

__all__ = ["as_numpy", "concatenate", "from_host", "host", "index", "is_array", "padded_otherwise", "place"]
__all__ += ["on_host", "pickle_reduction", "restored", "room", "sender", "size", "stack", "take"]

ROOM = 0.5  # of an accelerator's free memory: the most that a data set may take


def place(leaf: Any, device: torch.device | str | None, *, copy: bool = False, exact: bool = False) -> Tensor:
    """Return an array as a tensor on `device`, or on its own device if that is None.

    Torch tensors keep their dtype. In other arrays, float64 becomes torch's default dtype, since float64 is only
    NumPy's default and models are float32. Integers become int64, which torch takes as labels and indices; but
    uint8 stays, for images.

    Args:
        leaf: An array of any framework.
        device: The device.
        copy: Never share memory with `leaf`.
        exact: Keep float64.
    """
    tensor = leaf.detach() if isinstance(leaf, Tensor) else _from_host(leaf, exact)
    return tensor.to(tensor.device if device is None else device, copy=copy)


def index(positions: np.ndarray, device: torch.device | str | None) -> Tensor:
    """Return row numbers for `take`, on `device`."""
    return place(positions, device)


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return the rows of `tensor` at an index of one or two axes: `(*index axes, …)`."""
    rows = tensor.index_select(0, index.reshape(-1))
    return rows if index.ndim == 1 else rows.view(*index.shape, *tensor.shape[1:])


def sender(device: torch.device | str) -> Uploader | Placing:
    """Return what sends batches to a device: beside its work, if its kind has streams."""
    where = torch.device(device)
    stream = None if where.type == "cpu" else new_stream(where)
    return Placing(place, where) if stream is None else Uploader(where, stream)


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in the host's memory."""
    return tensor.cpu()


def room(device: torch.device | str) -> int | None:
    """Return how many bytes of data may be stored on a device; None if the host's memory is the only limit."""
    found = memory(torch.device(device))
    return None if found is None else int(found.free * ROOM)


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors along the first axis."""
    return torch.cat(list(tensors))


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors along a new first axis."""
    return torch.stack(list(tensors))


def _from_host(leaf: Any, exact: bool) -> Tensor:
    array = np.asarray(leaf)
    if array.dtype.name == "bfloat16":  # of JAX: an extension type of NumPy, which torch reads only as bits
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype.kind == "i" or array.dtype in (np.uint16, np.uint32):
        array = array.astype(np.int64, copy=False)
    # Torch takes no foreign byte orders, no negative strides and, without a warning, no read-only memory.
    array = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if exact or tensor.dtype != torch.float64 else tensor.to(torch.get_default_dtype())


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor's numbers, which may share its memory; bfloat16, which NumPy does not have, as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def host(tensor: Tensor) -> np.ndarray:
    """Return a tensor's numbers as a NumPy array; for bfloat16, which NumPy does not have, the bits."""
    tensor = tensor.detach().cpu()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def from_host(array: np.ndarray, like: Tensor) -> Tensor:
    """Return an array of `host` as a tensor with the dtype of `like`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if like.dtype == torch.bfloat16 else tensor


def pickle_reduction(value: Any) -> Any:
    """Return how to pickle a plain CPU tensor without copying its numbers; NotImplemented for other values.

    Also handles modules that torch itself can't pickle (`sending`), and parameters with hooks, which torch would
    silently drop. What is on an accelerator arrives on the host: another process may not have that device, and
    engines and replicas put models on their own.
    """
    if type(value) is nn.Parameter and (value._backward_hooks or value._post_accumulate_grad_hooks):
        hooks = (value._backward_hooks, value._post_accumulate_grad_hooks)
        return _with_hooks, (value.detach(), value.requires_grad, *(tuple((own or {}).values()) for own in hooks))
    if not isinstance(value, Tensor):
        return pickling.reduce(value)
    plain = type(value) is Tensor and not value.is_quantized and value.layout == torch.strided
    if plain and value.device.type not in ("cpu", "meta"):
        return _arrived, (value.detach().cpu(), value.requires_grad)
    if not plain or value.is_meta or value.requires_grad or value.is_conj() or value.is_neg():
        return NotImplemented
    return restored, (host(value), value.dtype == torch.bfloat16)


def _with_hooks(
    data: Tensor, requires_grad: bool, backward: Sequence[Any], accumulated: Sequence[Any]
) -> nn.Parameter:
    parameter = nn.Parameter(data, requires_grad=True)
    for hook in backward:
        parameter.register_hook(hook)
    for hook in accumulated:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(requires_grad)
    return parameter


def _arrived(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.requires_grad_(requires_grad)


def restored(array: np.ndarray, bits: bool = False) -> Tensor:
    """Return the tensor of a pickled array, in the same memory, which may be read-only.

    `bits` is True for the bits of bfloat16.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory, to which nothing here writes
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bits else tensor


def padded_otherwise(leaf: Tensor, real: int) -> Tensor:
    """Return a batch with different padding, which changes means and variances if they include the padding."""
    leaf = leaf.clone()
    leaf[real:] = leaf[0]
    if leaf.is_floating_point():
        leaf[real:] = 1.5 * leaf[real:] + 0.5
    return leaf
