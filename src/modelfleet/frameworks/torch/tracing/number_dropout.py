"""Dropout at a rate per member: in layers, in attention, and between recurrent layers.

Each rule takes the arguments of torch's function. A rate is a tensor without axes below `vmap`, in float64. As in
torch, a member with a rate of 0 or 1 draws no random numbers.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.random.operations import active_streams
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.tracing.attention import attention, multi_head_attention

Rules = dict[Callable[..., Any], tuple[Callable[..., Any], tuple[str | int, ...]]]
"""For each function, its rule, and the parameters that may be numbers per member, by name or position."""

_ALPHA = 1.7580993408473766  # of SELU times its scale, as in torch


def dropout(input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop single numbers, and scale those that are kept."""
    return input * _noise(input, input.shape, p) if training and input.numel() else input


def _feature_dropout(input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not input.numel():
        return input
    return input * _noise(input, _feature_shape(input), p)


def _dropout_1d(input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _by_rows(input, p, training, 3)


def _dropout_3d(input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _by_rows(input, p, training, 5)


def _by_rows(input: Tensor, p: Any, training: bool, batched: int) -> Tensor:
    """Drop whole channels. An input without rows gets an axis for them."""
    if input.dim() == batched:
        return _feature_dropout(input, p, training)
    return _feature_dropout(input.unsqueeze(0), p, training).squeeze(0)


def _alpha_dropout(input: Tensor, p: Any = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _selu_dropout(input, input.shape, p) if training and input.numel() else input


def _feature_alpha_dropout(input: Tensor, p: Any = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _selu_dropout(input, _feature_shape(input), p) if training and input.numel() else input


def _selu_dropout(input: Tensor, shape: Any, p: Tensor) -> Tensor:
    kept = _kept(shape, p).to(input.dtype)
    a = 1.0 / torch.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    a = torch.where(p == 1, 0.0, a).to(input.dtype)
    shift = (kept - 1) * (_ALPHA * a) + _ALPHA * a * p.to(input.dtype)
    return torch.where(p == 0, input, input * (kept * a) + shift)


def _feature_shape(input: Tensor) -> tuple[int, ...]:
    if input.dim() < 2:
        raise CannotFuseError("feature dropout needs at least two axes")
    return (*input.shape[:2], *[1] * (input.dim() - 2))


def _noise(input: Tensor, shape: Any, p: Tensor) -> Tensor:
    """Return 1 / (1 - p) for numbers that are kept, and 0 for those that are dropped."""
    return _drawn(p, lambda streams, rates: streams.noise([len(rates), *shape], rates, input.dtype))


def _kept(shape: Any, p: Tensor) -> Tensor:
    """Draw which numbers are kept, each member from its own stream and by its own rate."""
    return _drawn(p, lambda streams, rates: streams.kept([len(rates), *shape], rates))


def _drawn(p: Tensor, draw: Callable[[Streams, Tensor], Tensor]) -> Tensor:
    """Return what `draw` returns for the current streams and the rates `(member,)`, as a tensor below `vmap`."""
    functorch: Any = torch._C._functorch
    while functorch.is_gradtrackingtensor(p):
        p = functorch.get_unwrapped(p)
    level = functorch.maybe_get_level(p)
    if functorch.maybe_current_level() > level + 1:  # below the members' vmap there is at most one grad
        raise CannotFuseError("it draws random numbers at its own rate within a torch.func transform")
    rates = functorch.get_unwrapped(p)
    # Here the members' axis is the first one, and nothing is hidden.
    with temporarily_clear_interpreter_stack(), active_streams() as streams:
        found = draw(streams, rates)
    return functorch._add_batch_dim(found, 0, level)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with a rate or a scale per member: with a rate, as torch's plain form does."""
    if not isinstance(dropout_p, Tensor) and not dropout_p:
        if isinstance(scale, Tensor):
            query, scale = query * scale.to(query.dtype), 1.0
        return attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    root = scale.sqrt().to(query.dtype) if isinstance(scale, Tensor) else math.sqrt(scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if attn_mask is not None:
        is_mask = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_mask else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # a row without any key is zero, as in torch
        weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
    if isinstance(dropout_p, Tensor):
        weights = dropout(weights, dropout_p)
    elif dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights @ value


class _Rate:
    """A rate per member, in code that asks if it is above 0 before it calls dropout."""

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def __gt__(self, other: float) -> bool:
        return True


def _dropout_at(input: Tensor, p: Any = 0.5, training: bool = True) -> Tensor:
    return dropout(input, p.p, training) if isinstance(p, _Rate) else F.dropout(input, p, training)


def _attention_at(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: Any, is_causal: bool
) -> Tensor:
    rate = dropout_p.p if isinstance(dropout_p, _Rate) else dropout_p
    return _attention(query, key, value, attn_mask, rate, is_causal)


def _multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    return _WITH_RATES(
        *(_rate(value) if place == _DROPOUT_P else value for place, value in enumerate(args)),
        **{name: _rate(value) if name == "dropout_p" else value for name, value in kwargs.items()},
    )


def _rate(value: Any) -> Any:
    return _Rate(value) if isinstance(value, Tensor) else value


_WITH_RATES = multi_head_attention(dropout=_dropout_at, scaled_dot_product_attention=_attention_at)
_DROPOUT_P = list(inspect.signature(F.multi_head_attention_forward).parameters).index("dropout_p")

RULES: Rules = {
    F.multi_head_attention_forward: (_multi_head_attention, ("dropout_p",)),
    F.dropout: (dropout, ("p",)),
    torch.dropout: (lambda x, p, train: dropout(x, p, train), (1, "p")),
    F.dropout1d: (_dropout_1d, ("p",)),
    F.dropout2d: (_feature_dropout, ("p",)),
    F.dropout3d: (_dropout_3d, ("p",)),
    F.alpha_dropout: (_alpha_dropout, ("p",)),
    F.feature_alpha_dropout: (_feature_alpha_dropout, ("p",)),
    F.scaled_dot_product_attention: (_attention, ("dropout_p", "scale", 4, 6)),
}

IN_OWN_DTYPE = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
"""Functions that round 1 / (1 - p) to the dtype of their input, as torch does on the CPU, also for halves."""
