"""Rules for torch functions on padded tensors: what keeps a member's own numbers as they are alone.

A rule may rely on zeros in the padding of its arguments, and must leave zeros in the padding of its result, and in
the gradients of the padding of its arguments.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.widths import (
    attention_rules,
    axis_rules,
    elementwise_rules,
    norm_rules,
    product_rules,
    recurrent_rules,
    shape_rules,
)
from modelfleet.frameworks.torch.widths.padding import Rule

_LIBRARIES = (torch, F, torch._C._nn, torch.special, torch.linalg, Tensor)


def _functions(names: Iterable[str]) -> Iterable[Callable[..., Any]]:
    """Yield torch's functions and methods of some names, also in place, and as operators."""
    for name in names:
        forms = (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")
        for library in _LIBRARIES:
            for form in forms:
                found = getattr(library, form, None)
                if callable(found):
                    yield found


def _attributes(names: Iterable[str]) -> Iterable[Callable[..., Any]]:
    for name in names:
        yield getattr(Tensor, name).__get__


_BY_NAMES: Mapping[Rule, str] = {
    elementwise_rules.as_is: (
        "relu relu6 leaky_relu elu celu selu gelu silu mish tanh hardswish softsign tanhshrink "
        "softshrink hardshrink sin tan sinh asinh asin atan arctan arcsinh arcsin atanh arctanh erf "
        "expm1 log1p abs absolute neg negative square floor ceil round trunc fix sign sgn positive "
        "nan_to_num prelu clone detach contiguous to type float double half bfloat16 int long bool cpu "
        "cuda type_as zeros_like zero alias isnan isinf deg2rad rad2deg requires_grad_ retain_grad conj "
        "resolve_conj resolve_neg real tril triu"
    ),
    elementwise_rules.elementwise: (
        "sigmoid softplus exp exp2 cos cosh logsigmoid hardsigmoid erfc gt lt ge le eq ne greater less "
        "greater_equal less_equal not_equal logical_not logical_and logical_or logical_xor clamp "
        "clamp_min clamp_max clip where maximum minimum fmax fmin masked_fill threshold hardtanh lerp "
        "addcmul isfinite bitwise_not bitwise_and bitwise_or and or xor invert acos arccos logit "
        "log_sigmoid expit sinc fill"
    ),
    elementwise_rules.singular: (
        "log log2 log10 sqrt rsqrt reciprocal acosh arccosh digamma lgamma float_power xlogy atan2 hypot"
    ),
    elementwise_rules.sum_like: "add sub subtract rsub",
    elementwise_rules.product_like: "mul multiply",
    elementwise_rules.quotient: "div divide true_divide truediv floor_divide floordiv",
    elementwise_rules.power: "pow",
    product_rules.linear: "linear",
    product_rules.matmul: "matmul mm bmm mv dot inner vdot chain_matmul outer ger",
    product_rules.add_matmul: "addmm baddbmm addbmm addmv addr",
    product_rules.einsum: "einsum",
    product_rules.convolution: "conv1d conv2d conv3d",
    product_rules.convolution_transposed: "conv_transpose1d conv_transpose2d conv_transpose3d",
    product_rules.embedding: "embedding",
    norm_rules.by_channel: "batch_norm instance_norm",
    norm_rules.layer_norm: "layer_norm",
    norm_rules.rms_norm: "rms_norm",
    norm_rules.group_norm: "group_norm",
    attention_rules.scaled_attention: "scaled_dot_product_attention",
    attention_rules.multi_head_attention: "multi_head_attention_forward",
    recurrent_rules.recurrent: "lstm gru rnn_tanh rnn_relu",
    recurrent_rules.cell: "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    axis_rules.softmax_over: "softmax log_softmax",
    axis_rules.logsumexp_over: "logsumexp",
    axis_rules.sum_over: "sum",
    axis_rules.mean_over: "mean",
    axis_rules.variance_over: "var std",
    axis_rules.largest: "max amax argmax",
    axis_rules.smallest: "min amin argmin",
    axis_rules.product_over: "prod all",
    axis_rules.norm_over: "norm vector_norm normalize",
    axis_rules.cumulative: "cumsum",
    axis_rules.pooling: (
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d"
    ),
    shape_rules.moved: (
        "zeros new_zeros permute transpose movedim moveaxis swapaxes swapdims t unsqueeze squeeze adjoint"
    ),
    shape_rules.viewed: "view reshape flatten unflatten view_as reshape_as ravel",
    shape_rules.expanded: "expand expand_as broadcast_to",
    shape_rules.created: ("ones full empty ones_like full_like empty_like new_ones new_full new_empty arange eye"),
    shape_rules.stacked: "stack",
    shape_rules.unbound: "unbind",
    shape_rules.turned: "flip roll",
    shape_rules.repeated: "repeat tile",
    shape_rules.joined: "cat concat concatenate",
    shape_rules.divided: "chunk split tensor_split",
    shape_rules.glu: "glu",
    shape_rules.indexed: "getitem",
    shape_rules.selected: "index_select select narrow",
    shape_rules.padded_around: "pad interpolate upsample",
    elementwise_rules.dropout: "alpha_dropout feature_alpha_dropout",
    elementwise_rules.plain_dropout: "dropout dropout1d dropout2d dropout3d feature_dropout",
    elementwise_rules.drawn: "rand randn rand_like randn_like bernoulli normal",
}

RULES: Mapping[Callable[..., Any], Rule] = {
    **{func: rule for rule, names in _BY_NAMES.items() for func in _functions(names.split())},
    **dict.fromkeys(_attributes(("T", "mT", "H", "mH", "data", "real")), shape_rules.moved),
}
