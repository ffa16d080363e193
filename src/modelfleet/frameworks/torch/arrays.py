"""Arrays of any kind as torch tensors, and the few operations that feeds need of them."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch import pickling


def is_array(value: Any) -> bool:
    """Whether `place` can take it: arrays of NumPy, torch, JAX, TensorFlow, pandas and polars."""
    return isinstance(value, Tensor) or (hasattr(value, "__array__") and not isinstance(value, type))


def size(leaf: Any) -> int:
    """The length of the first axis."""
    return int(leaf.shape[0])


def place(leaf: Any, device: torch.device | str | None, *, copy: bool = False, exact: bool = False) -> Tensor:
    """The tensor of an array, on `device`; None: wherever it is now. It may share memory unless `copy`.

    Torch tensors keep their dtype. Of all other arrays, float64 becomes torch's default dtype, for NumPy
    makes float64 unasked and models are float32; and integers become int64, which torch takes as labels and
    indices, except bytes (uint8), which are images. With `exact`, float64 stays.
    """
    tensor = leaf.detach() if isinstance(leaf, Tensor) else _from_host(leaf, exact)
    return tensor.to(tensor.device if device is None else device, copy=copy)


def index(positions: np.ndarray, device: torch.device | str | None) -> Tensor:
    """Row numbers for `take`, on `device`."""
    return place(positions, device)


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows of `tensor` at an index of one or two axes: `(*index axes, …)`."""
    rows = tensor.index_select(0, index.reshape(-1))
    return rows if index.ndim == 1 else rows.view(*index.shape, *tensor.shape[1:])


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, joined along the first axis."""
    return torch.cat(list(tensors))


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, joined along a new first axis."""
    return torch.stack(list(tensors))


def _from_host(leaf: Any, exact: bool) -> Tensor:
    array = np.asarray(leaf)
    if array.dtype.name == "bfloat16":  # of JAX: NumPy's extension type, which torch reads only as bits
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype.kind == "i" or array.dtype in (np.uint16, np.uint32):
        array = array.astype(np.int64, copy=False)
    # Torch takes neither foreign byte orders, nor negative strides, nor (without a warning) read-only memory.
    array = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if exact or tensor.dtype != torch.float64 else tensor.to(torch.get_default_dtype())


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers; of bfloat16, which NumPy has not, as float32. The memory may be the same."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def host(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers as a NumPy array; of bfloat16, which NumPy has not, the bits."""
    tensor = tensor.detach().cpu()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def from_host(array: np.ndarray, like: Tensor) -> Tensor:
    """What `host` gave, as a tensor of the dtype of another."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if like.dtype == torch.bfloat16 else tensor


def reduced(value: Any) -> Any:
    """How to pickle a plain tensor of the CPU without copying its numbers, and modules that torch itself can't
    pickle (`sending`); NotImplemented for all else.

    A parameter takes its hooks along, which torch itself leaves behind without a word.
    """
    if type(value) is nn.Parameter and (value._backward_hooks or value._post_accumulate_grad_hooks):
        hooks = (value._backward_hooks, value._post_accumulate_grad_hooks)
        return _hooked, (value.detach(), value.requires_grad, *(tuple((own or {}).values()) for own in hooks))
    if not isinstance(value, Tensor):
        return pickling.reduce(value)
    plain = (
        type(value) is Tensor
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.layout == torch.strided
    )
    if not plain or value.requires_grad or value.is_conj() or value.is_neg():
        return NotImplemented
    bits = value.dtype == torch.bfloat16  # which NumPy does not have
    return restored, (value.view(torch.int16).numpy() if bits else value.numpy(), bits)


def _hooked(
    data: Tensor, requires_grad: bool, backward: Sequence[Any], accumulated: Sequence[Any]
) -> nn.Parameter:
    """A parameter with hooks again."""
    parameter = nn.Parameter(data, requires_grad=True)
    for hook in backward:
        parameter.register_hook(hook)
    for hook in accumulated:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(requires_grad)
    return parameter


def restored(array: np.ndarray, bits: bool = False) -> Tensor:
    """The tensor that `reduced` took apart. Where the array is only to be read, so is the tensor.

    bits: they are those of bfloat16.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch can't know that nobody will write
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bits else tensor


def padded_otherwise(leaf: Tensor, real: int) -> Tensor:
    """The rows of a batch with other padding: its own, real rows again, might leave means and variances alone."""
    leaf = leaf.clone()
    leaf[real:] = leaf[0]
    if leaf.is_floating_point():
        leaf[real:] = 1.5 * leaf[real:] + 0.5
    return leaf
