"""Activations, norms, distances and new tensors with a number per member.

Each rule takes the arguments of torch's function. A number is a tensor without axes below `vmap`, in float64.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.tracing.number_dropout import Rules
from modelfleet.frameworks.torch.tracing.recurrent import RECURRENT_RULES


def like(number: Any, x: Tensor) -> Any:
    """Return a number in the dtype that it has beside a tensor."""
    if not isinstance(number, Tensor):
        return number
    return number.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())


# --- activations -------------------------------------------------------------------------------------------------


def _leaky_relu(input: Tensor, negative_slope: Any = 0.01, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, input * like(negative_slope, input))


def _elu(input: Tensor, alpha: Any = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, like(alpha, input) * torch.expm1(input.clamp(max=0)))


def _celu(input: Tensor, alpha: Any = 1.0, inplace: bool = False) -> Tensor:
    alpha = like(alpha, input)
    return torch.where(input > 0, input, alpha * torch.expm1(input.clamp(max=0) / alpha))


def _softplus(input: Tensor, beta: Any = 1.0, threshold: float = 20.0) -> Tensor:
    beta = like(beta, input)
    return F.softplus(input * beta, 1.0, threshold) / beta


def _hardshrink(input: Tensor, lambd: Any = 0.5) -> Tensor:
    lambd = like(lambd, input)
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, input)


def _softshrink(input: Tensor, lambd: Any = 0.5) -> Tensor:
    lambd = like(lambd, input)
    shrunk = torch.where(input > lambd, input - lambd, input + lambd)
    return torch.where((input > lambd) | (input < -lambd), shrunk, input * 0.0)


def _threshold(input: Tensor, threshold: Any, value: Any, inplace: bool = False) -> Tensor:
    return torch.where(input <= like(threshold, input), like(value, input), input)


def _hardtanh(input: Tensor, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Tensor:
    low, high = like(min_val, input), like(max_val, input)
    return torch.where(input <= low, low, torch.where(input >= high, high, input))


def _rrelu(
    input: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    lower, upper = like(lower, input), like(upper, input)
    if not training:
        return torch.where(input >= 0, input, input * ((lower + upper) / 2))
    return torch.where(input <= 0, input * (lower + (upper - lower) * torch.rand_like(input)), input)


def _gumbel_softmax(logits: Tensor, tau: Any = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    # The noise is drawn as F.gumbel_softmax draws it; dividing by tau is left to the end.
    gumbels = -torch.empty_like(logits).exponential_().log()
    soft = torch.softmax((logits + gumbels) / like(tau, logits), dim)
    if not hard:
        return soft
    found = soft.argmax(dim, keepdim=True)
    classes = torch.arange(logits.shape[dim], device=logits.device)
    choice = (classes.view(-1, *[1] * (logits.dim() - 1 - dim % logits.dim())) == found).to(logits.dtype)
    return choice - soft.detach() + soft


# --- norms -------------------------------------------------------------------------------------------------------


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: Any = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    return _affine(_standardized(input, axes, eps), weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    found = input * torch.rsqrt(input.square().mean(axes, keepdim=True) + like(eps, input))
    return _affine(found, weight, None)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: Any = 1e-5
) -> Tensor:
    groups, rest = input.reshape(len(input), num_groups, -1), input.shape[2:]
    found = _standardized(groups, (-1,), eps).reshape(input.shape)
    return _affine(found, *(_by_channel(t, len(rest)) for t in (weight, bias)))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Tensor:
    rest = input.dim() - 2
    if training:
        axes = (0, *range(2, input.dim()))
        mean, var = input.mean(axes), input.var(axes, correction=0)
        count = input.numel() // input.shape[1]
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                step = like(momentum, running_mean)
                unbiased = var.detach() * (count / max(count - 1, 1))
                running_mean.copy_(running_mean + step * (mean.detach().to(running_mean.dtype) - running_mean))
                running_var.copy_(running_var + step * (unbiased.to(running_var.dtype) - running_var))
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = running_mean, running_var
    scale = torch.rsqrt(var + like(eps, input))
    found = (input - _by_channel(mean, rest)) * _by_channel(scale, rest)
    return _affine(found, *(_by_channel(t, rest) for t in (weight, bias)))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: Any = 1e-5,
) -> Tensor:
    rest = input.dim() - 2
    if running_mean is not None or not use_input_stats:
        raise NotImplementedError("instance_norm with running statistics has no rule for a number per member")
    found = _standardized(input, tuple(range(2, input.dim())), eps)
    return _affine(found, *(_by_channel(t, rest) for t in (weight, bias)))


def _standardized(x: Tensor, axes: tuple[int, ...], eps: Any) -> Tensor:
    centered = x - x.mean(axes, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(axes, keepdim=True) + like(eps, x))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(tensor: Any, rest: int) -> Any:
    return None if tensor is None else tensor.view(-1, *[1] * rest)


# --- distances ---------------------------------------------------------------------------------------------------


def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: Any = 1e-12, out: None = None) -> Tensor:
    norm = torch.linalg.vector_norm(input, p, dim, keepdim=True)
    return input / torch.maximum(norm, like(eps, input))


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: Any = 1e-8) -> Tensor:
    scaled = []
    for x in (x1, x2):
        norm = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
        # As in torch, gradients do not see that a short vector's length is replaced by eps.
        scaled.append(x / (norm + (torch.maximum(norm, like(eps, x)) - norm).detach()))
    return (scaled[0] * scaled[1]).sum(dim)


def _pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: Any = 1e-6, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + like(eps, x1), p, -1, keepdim=keepdim)


# --- new tensors -------------------------------------------------------------------------------------------------


def _tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return _built(data, dtype or torch.get_default_dtype(), device)


def _new_tensor(
    self: Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return _built(data, dtype or self.dtype, device or self.device)


def _built(data: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """Return a nested list of numbers, of which some are tensors, as a tensor."""
    if isinstance(data, Tensor):
        return data.to(dtype)
    if isinstance(data, list | tuple):
        return torch.stack([_built(part, dtype, device) for part in data])
    return torch.tensor(data, dtype=dtype, device=device)


def _full(size: Any, fill_value: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    size = (size,) if isinstance(size, int) else size
    return fill_value.to(dtype or torch.get_default_dtype()).expand(size).clone()


def _full_like(input: Tensor, fill_value: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return fill_value.to(dtype or input.dtype).expand(input.shape).clone()


def _new_full(
    self: Tensor, size: Any, fill_value: Tensor, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return fill_value.to(dtype or self.dtype).expand(size).clone()


# --- random numbers ----------------------------------------------------------------------------------------------


def _normal_into(self: Tensor, mean: Any = 0.0, std: Any = 1.0, *, generator: None = None) -> Tensor:
    return like(mean, self) + like(std, self) * torch.randn_like(self)


def _uniform_into(self: Tensor, low: Any = 0.0, high: Any = 1.0, *, generator: None = None) -> Tensor:
    low, high = like(low, self), like(high, self)
    return low + (high - low) * torch.rand_like(self)


def _bernoulli_into(self: Tensor, p: Any = 0.5, *, generator: None = None) -> Tensor:
    return torch.bernoulli(p.expand(self.shape))


def _bernoulli(input: Tensor, p: Any, *, generator: None = None) -> Tensor:
    return torch.bernoulli(p.expand(input.shape))


def _normal(mean: Any, std: Any, size: Any = None, *, generator: None = None, **options: Any) -> Tensor:
    if size is None:
        return torch.normal(mean, std)
    drawn = torch.randn(size, **options)
    return like(mean, drawn) + like(std, drawn) * drawn


RULES: Rules = {
    F.leaky_relu: (_leaky_relu, ("negative_slope",)),
    F.elu: (_elu, ("alpha",)),
    F.celu: (_celu, ("alpha",)),
    F.softplus: (_softplus, (1, "beta")),
    F.hardshrink: (_hardshrink, (1, "lambd")),
    F.softshrink: (_softshrink, (1, "lambd")),
    F.threshold: (_threshold, ("threshold", "value")),
    F.hardtanh: (_hardtanh, ("min_val", "max_val")),
    F.rrelu: (_rrelu, ("lower", "upper")),
    F.gumbel_softmax: (_gumbel_softmax, ("tau",)),
    F.layer_norm: (_layer_norm, ("eps",)),
    F.rms_norm: (_rms_norm, ("eps",)),
    F.group_norm: (_group_norm, ("eps",)),
    F.batch_norm: (_batch_norm, ("eps", "momentum")),
    F.instance_norm: (_instance_norm, ("eps",)),
    F.normalize: (_normalize, ("eps",)),
    F.cosine_similarity: (_cosine_similarity, ("eps", 3)),
    F.pairwise_distance: (_pairwise_distance, ("eps", 3)),
    torch.tensor: (_tensor, (0,)),
    torch.as_tensor: (_tensor, (0,)),
    torch.scalar_tensor: (_tensor, (0,)),
    Tensor.new_tensor: (_new_tensor, (1,)),
    torch.full: (_full, (1, "fill_value")),
    torch.full_like: (_full_like, (1, "fill_value")),
    Tensor.new_full: (_new_full, (2, "fill_value")),
    torch.normal: (_normal, (0, 1, "mean", "std")),
    torch.bernoulli: (_bernoulli, (1, "p")),
    Tensor.bernoulli: (_bernoulli, (1, "p")),
    **{function: (rule, (5,)) for function, rule in RECURRENT_RULES.items()},
}
WRITING_RULES: Rules = {
    Tensor.normal_: (_normal_into, (1, 2, "mean", "std")),
    Tensor.uniform_: (_uniform_into, (1, 2, "from", "to")),
    Tensor.bernoulli_: (_bernoulli_into, (1, "p")),
}
