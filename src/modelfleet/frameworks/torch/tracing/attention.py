"""Attention of stacked members by torch's fused kernels: its memory grows with the sequence, not with its square.

The kernels have no batching rule. Members do not meet in attention, so here the member axis becomes a part of the
batch, forward and backward. Attention takes its plain form where there is no such kernel, where the mask has a
gradient, and with dropout, whose mask comes from the member's own stream.
"""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.tracing.attention_kernels import Kernel, kernel_for

aten = torch.ops.aten


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` for one member, below `vmap` or not."""
    kind = query.device.type
    if torch.is_autocast_enabled(
        kind
    ):  # below vmap, autocast would see only the operations that attention is made of
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (_cast(tensor, dtype) for tensor in (query, key, value))
        attn_mask = None if attn_mask is None else _cast(attn_mask, dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    with torch.autocast(kind, enabled=False):
        if not dropout_p:
            found = _fused(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            if found is not None:
                return found
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor | None:
    """Return attention by a fused kernel; None if there is none for these tensors."""
    tensors = query, key, value
    if (
        min(tensor.dim() for tensor in tensors) < 2
        or not all(tensor.numel() for tensor in tensors)
        or len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1
        or (mask is not None and (causal or _has_gradient(mask)))
    ):
        return None
    if grouped:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    try:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        mask = None if mask is None else _with_four_axes(mask, lead, query, key)
    except RuntimeError:  # shapes that do not fit: the plain form says so
        return None
    batch, heads = math.prod(lead[:-1]), lead[-1] if lead else 1
    query, key, value = (
        one.expand(*lead, *one.shape[-2:]).reshape(batch, heads, *one.shape[-2:]) for one in (query, key, value)
    )
    kernel = kernel_for(query, key, value, mask, causal)
    if kernel is None:
        return None
    features, scale = value.shape[-1], query.shape[-1] ** -0.5 if scale is None else scale
    if kernel.multiple > 1:
        query, key, value = (F.pad(one, (0, -one.shape[-1] % kernel.multiple)) for one in (query, key, value))
    found = _Attention.apply(kernel, causal, scale, mask, query, key, value)[0]
    return found[..., :features].reshape(*lead, query.shape[-2], features)


def _has_gradient(tensor: Tensor) -> bool:
    """Return True if a gradient by this tensor is asked for at any level."""
    functorch: Any = torch._C._functorch
    while True:
        if tensor.requires_grad:
            return True
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)


def _with_four_axes(mask: Tensor, lead: Sequence[int], query: Tensor, key: Tensor) -> Tensor:
    """Return what is added to the scores, as `(batch, head, query, key)`. Any axis may have the size 1."""
    scores = *[1] * (2 - len(lead)), *lead, query.shape[-2], key.shape[-2]
    if torch.broadcast_shapes(mask.shape, scores) != scores:
        raise RuntimeError("the mask has more axes than the scores")
    mask = mask.reshape(*[1] * (len(scores) - mask.dim()), *mask.shape)
    if mask.shape[:-3].numel() > 1:
        mask = mask.expand(*scores[:-3], *mask.shape[-3:])
    return mask.reshape(-1, *mask.shape[-3:])


class _Attention(torch.autograd.Function):
    """Takes a kernel and its arguments, and returns what it returns. All tensors have four axes."""

    @staticmethod
    def forward(
        kernel: Kernel, causal: bool, scale: float, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, ...]:
        return kernel.forward(*_in_rows(query, key, value), mask, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.given = inputs[:3]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[3:], *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _Gradient.apply(*ctx.given, ctx.saved_tensors[0], grad_outputs[0], *ctx.saved_tensors[1:])
        return None, None, None, None, *gradients

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        mask = _mask_of_all(args[3], in_dims[3], info.batch_size, _batch_of(args[4], in_dims[4]))
        tensors = (_of_all(*pair, info.batch_size) for pair in zip(args[4:], in_dims[4:], strict=True))
        out, sums, *seeds = _Attention.apply(*args[:3], mask, *tensors)
        found = tuple(one.unflatten(0, (info.batch_size, -1)) for one in (out, sums))
        return (*found, *seeds), (0, 0, *[None] * len(seeds))


class _Gradient(torch.autograd.Function):
    """Takes a kernel, its arguments with the result's gradient before them, and what it returned."""

    @staticmethod
    def forward(
        kernel: Kernel,
        causal: bool,
        scale: float,
        mask: Tensor | None,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *results: Tensor,
    ) -> tuple[Tensor, ...]:
        return kernel.backward(*_in_rows(grad, query, key, value), mask, results, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.given = inputs[1:3]
        ctx.results = len(inputs) - 8
        ctx.save_for_backward(*inputs[3:8])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Second derivatives are rare: those of the plain form, as a function of the inputs alone.
        mask, *inputs = ctx.saved_tensors
        causal, scale = ctx.given

        def plain(*tensors: Tensor) -> Tensor:
            return aten._scaled_dot_product_attention_math(*tensors, mask, 0.0, causal, scale=scale)[0]

        def gradient(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            pull: Any = torch.func.vjp(plain, *tensors)[1]
            return pull(grad)

        pull: Any = torch.func.vjp(gradient, *inputs)[1]
        return None, None, None, None, *pull(grad_outputs), *[None] * ctx.results

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        width = info.batch_size
        mask = _mask_of_all(args[3], in_dims[3], width, _batch_of(args[5], in_dims[5]))
        pairs = list(zip(args[4:], in_dims[4:], strict=True))
        # Behind the gradient, the inputs, the result and the sums are the seeds, which have no batch.
        tensors = [_of_all(*pair, width) for pair in pairs[:6]]
        seeds = [seed for seed, _ in pairs[6:]]
        found = _Gradient.apply(*args[:3], mask, *tensors, *seeds)
        return tuple(one.unflatten(0, (width, -1)) for one in found), (0, 0, 0)


def _in_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose features lie side by side, as kernels want them."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _batch_of(tensor: Tensor, axis: int | None) -> int:
    """Return the size of the batch below the member axis."""
    return tensor.shape[0 if axis is None or axis > 0 else 1]


def _of_all(tensor: Tensor, axis: int | None, width: int) -> Tensor:
    """Return the tensor of all members, with their axis as a part of the batch."""
    whole = tensor.expand(width, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return whole.flatten(0, 1)


def _mask_of_all(mask: Tensor | None, axis: int | None, width: int, batch: int) -> Tensor | None:
    """Return the mask of all members. One that is the same for all rows and members stays one."""
    if mask is None or (axis is None and mask.shape[0] == 1):
        return mask
    whole = mask.expand(width, *mask.shape) if axis is None else mask.movedim(axis, 0)
    return whole.expand(-1, batch, -1, -1, -1).flatten(0, 1)


def multi_head_attention(**own: Callable[..., Any]) -> types.FunctionType:
    """Return `F.multi_head_attention_forward`, whose code calls these functions in place of those of their names.

    Modes of torch functions see it as one call, and nothing within it.
    """
    function: Any = F.multi_head_attention_forward
    names = {**function.__globals__, "has_torch_function": lambda _: False, **own}
    found = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found
