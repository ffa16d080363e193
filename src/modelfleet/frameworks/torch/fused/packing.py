"""Buffers that hold all trained parameters of a lane, so that one operation can update them all.

The parameters `(member, …)` are views into one buffer `(member, number)`, one after the other, and so are the
optimizer's tensors of each kind. Everything that reads and writes a state by name sees the views.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from modelfleet.frameworks.torch.optimizers.rules import STEP
from modelfleet.types import State


def pack(state: State) -> State:
    """Return a state whose parameters and optimizer tensors are copies in buffers, as far as they can be."""
    params = _packed(state["params"])
    kinds: dict[str, dict[str, Tensor]] = {}
    for path, tensor in state["optimizer"].items():
        kinds.setdefault(path.partition("/")[0], {})[path] = tensor
    optimizer = {path: tensor for own in kinds.values() for path, tensor in _packed(own).items()}
    return {**state, "params": params, "optimizer": {path: optimizer[path] for path in state["optimizer"]}}


def buffers_of(state: State) -> dict[str, Tensor] | None:
    """Return the buffers of a packed state: of the parameters as "", and of the optimizer's tensors by kind.

    Returns None if some tensors are not in buffers, or do not have one number for each number of the parameters.
    """
    kinds = {"": list(state["params"].values())}
    for path, tensor in state["optimizer"].items():
        kinds.setdefault(path.partition("/")[0], []).append(tensor)
    found = {kind: _buffer(tensors) for kind, tensors in kinds.items()}
    buffers = {kind: buffer for kind, buffer in found.items() if buffer is not None}
    whole = {buffer.shape for kind, buffer in buffers.items() if kind != STEP}
    return buffers if len(buffers) == len(found) and len(whole) == 1 else None


def split(buffer: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of a buffer by name, in the shapes of other tensors."""
    parts = buffer.split([_numbers(tensor) for tensor in like.values()], 1)
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


def join(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors as one buffer, in their order."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors.values()], 1)


def _packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or next(iter(dtypes)).is_complex:
        return tensors
    return split(join(tensors), tensors)


def _buffer(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer that tensors are the parts of, one after the other; None if they are not."""
    if not tensors:
        return None
    first, numbers = tensors[0], sum(_numbers(tensor) for tensor in tensors)
    memory, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != memory
            or tensor.dtype != first.dtype
            or tensor.storage_offset() != at
            or (len(tensor) > 1 and tensor.stride(0) != numbers)
            or not tensor[0].is_contiguous()
        ):
            return None
        at += _numbers(tensor)
    return first.as_strided((len(first), numbers), (numbers, 1))


def _numbers(tensor: Tensor) -> int:
    return tensor[0].numel()
