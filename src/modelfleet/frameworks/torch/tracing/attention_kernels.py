"""torch's fused attention kernels behind one signature: `(batch, head, position, feature)` in, and the same out.

They compute attention block by block, forward and backward, so no tensor has a number for each query and key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
Results = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel and its gradient.

    Attributes:
        forward: Takes query, key, value, mask, whether it is causal, and the scale. Returns the result, the
            logarithms of the softmaxes' sums, and what else the gradient needs that has no batch.
        backward: Takes the result's gradient, query, key, value, mask, what `forward` returned, whether it is
            causal, and the scale. Returns the gradients of query, key and value.
        multiple: The number of features must be a multiple of this.
    """

    forward: Callable[..., Results]
    backward: Callable[..., Results]
    multiple: int = 1


def _flash_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Results:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )


def _flash_on_cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    results: Results,
    causal: bool,
    scale: float,
) -> Results:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *results, 0.0, causal, attn_mask=mask, scale=scale
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: None, causal: bool, scale: float) -> Results:
    found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return found[0], found[1], found[6], found[7]  # the others are for sequences of many lengths


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    results: Results,
    causal: bool,
    scale: float,
) -> Results:
    out, sums, *seeds = results
    sizes = None, None, query.shape[2], key.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, sums, *sizes, 0.0, causal, *seeds, scale=scale
    )


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Results:
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned(mask, query, key), True, 0.0, causal, scale=scale
    )


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    results: Results,
    causal: bool,
    scale: float,
) -> Results:
    wanted = [True, True, True, False]  # gradients of query, key and value, but not of the mask
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, _aligned(mask, query, key), *results, 0.0, wanted, causal, scale=scale
    )[:3]


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask of the scores' shape whose rows begin at multiples of 16 numbers, as the kernel wants them."""
    if mask is None:
        return None
    keys = key.shape[2]
    mask = mask.expand(*mask.shape[:2], query.shape[2], keys)
    if keys % 16:
        mask = F.pad(mask, (0, -keys % 16))[..., :keys]
    return mask.expand(*query.shape[:2], query.shape[2], keys)


_EFFICIENT = Kernel(_efficient, _efficient_backward)
_KERNELS = {
    ("cpu", SDPBackend.FLASH_ATTENTION): Kernel(_flash_on_cpu, _flash_on_cpu_backward),
    ("cuda", SDPBackend.FLASH_ATTENTION): Kernel(_flash, _flash_backward, multiple=8),
    ("cuda", SDPBackend.EFFICIENT_ATTENTION): _EFFICIENT,
    # Whatever cuDNN takes, this one takes, too.
    ("cuda", SDPBackend.CUDNN_ATTENTION): _EFFICIENT,
}


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Kernel | None:
    """Return the kernel that torch chooses for one member alone; None if it has none for these tensors."""
    forms = [None if one is None else (one.shape, one.dtype, one.device) for one in (query, key, value, mask)]
    choose: Any = torch._fused_sdp_choice
    # The choice depends on the form only, and no transform and no mode has a rule for it.
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        *tensors, mask = [form and torch.empty(form[0], dtype=form[1], device=form[2]) for form in forms]
        choice = choose(*(one.requires_grad_() for one in tensors if one is not None), mask, 0.0, causal)
    chosen = next((one for one in SDPBackend.__members__.values() if one.value == choice), SDPBackend.ERROR)
    return _KERNELS.get((query.device.type, chosen))
