"""Rules for normalization of padded tensors."""

import torch
from torch import Tensor

from modelfleet.frameworks.torch.widths.padding import PaddedCall
from modelfleet.frameworks.torch.widths.rule_helpers import (
    own_count,
    refuse_other_numbers,
    refuse_other_options,
    unequal_integers,
)

HALF_DTYPES = (torch.float16, torch.bfloat16)


def by_channel(call: PaddedCall) -> Tensor:
    """Normalize each channel by itself: a channel of zeros stays zero."""
    refuse_other_numbers(call)
    x = call.axes[0]
    eps = call.argument(7, "eps", 1e-5)
    if x[0] is not None or any(x[2:]) or not eps > 0:
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    return call.run()


def layer_norm(call: PaddedCall) -> Tensor:
    """Normalize by the mean and the variance of the own numbers."""
    x, shape = call.args[0], call.argument(1, "normalized_shape")
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias")
    eps = call.argument(4, "eps", 1e-5)
    dims = list(range(x.dim() - len(shape), x.dim()))
    refuse_other_options(call, dims)
    if not any(call.axes[0][dim] for dim in dims):
        return call.cleared(call.run(), call.out[0])
    if call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")
    return standardized(call, x, dims, weight, bias, eps, center=True)


def rms_norm(call: PaddedCall) -> Tensor:
    """Normalize by the root of the mean square of the own numbers."""
    x, shape = call.args[0], call.argument(1, "normalized_shape")
    weight, eps = call.argument(2, "weight"), call.argument(3, "eps")
    dims = list(range(x.dim() - len(shape), x.dim()))
    refuse_other_options(call, dims)
    if not any(call.axes[0][dim] for dim in dims):
        return call.run()
    if call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return standardized(call, x, dims, weight, None, eps, center=False)


def standardized(
    call: PaddedCall,
    x: Tensor,
    dims: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    center: bool,
) -> Tensor:
    """Return own numbers, centered or not, over the root of their mean square."""
    axes, dtype = call.axes[0], x.dtype
    x = call.filled(x.float() if dtype in HALF_DTYPES else x, axes)
    count = own_count(call, x, axes, dims)
    if center:
        x = call.filled(x - x.sum(dims, keepdim=True) / count, axes)
    result = x * torch.rsqrt((x * x).sum(dims, keepdim=True) / count + eps)
    result = result if weight is None else result * weight
    if bias is not None:
        result = result + bias
        if any(axis for dim, axis in enumerate(axes) if dim not in dims):
            result = call.filled(result, axes)
    return result.to(dtype)


def group_norm(call: PaddedCall) -> Tensor:
    """Normalize in groups of channels: one group, or groups of one size."""
    axes, x = call.axes[0], call.args[0]
    groups = call.argument(1, "num_groups")
    if axes[0] is not None or any(axes[2:]):
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias")
    eps = call.argument(4, "eps", 1e-5)
    if call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")
    if groups == 1 and not call.numbers:
        shape = [-1, *[1] * (x.dim() - 2)]
        weight, bias = (t if t is None else t.view(shape) for t in (weight, bias))
        return standardized(call, x, list(range(1, x.dim())), weight, bias, eps, center=True)
    channels = axes[1]
    assert channels is not None
    numbers = unequal_integers(call)
    if len(numbers) != 1 or len({divmod(c, g) for c, g in zip(channels, numbers[0], strict=True)}) != 1:
        raise call.refuse("has groups of unequal sizes")
    return call.run()
