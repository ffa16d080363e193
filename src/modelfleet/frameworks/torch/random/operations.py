"""Rules for torch's random operations: how each draws from a member's own stream.

Operations are replaced below autograd and vmap, at the level of ATen. So every way in which a model can draw is
covered: `nn.Dropout`, attention's dropout, `torch.rand_like` in a forward, and so on. At that level, stacked
members are the first axis of every tensor. Poisson, binomial, gamma and Dirichlet numbers are drawn by rejection,
with no fixed number of draws. They have no rule, and models that draw them are not fused (see `eager.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from modelfleet.frameworks.torch.devices import seeded
from modelfleet.frameworks.torch.random.streams import Streams

aten = torch.ops.aten
Rule = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""Takes the streams and the arguments of an operation, and returns what the operation returns."""


def _native_dropout(streams: Streams, like: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if not train:
        return like, torch.ones_like(like, dtype=torch.bool)
    mask = streams.below(like.shape, 1.0 - p)
    return like * mask * (0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def _rand(streams: Streams, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return streams.uniform(size, dtype or torch.get_default_dtype())


def _randn(streams: Streams, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return streams.normal(size, dtype or torch.get_default_dtype())


def _randint(
    streams: Streams, low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    return streams.integers(size, low, high).to(dtype or torch.int64)


def _randint_like(
    streams: Streams, like: Tensor, *bounds: int, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return streams.integers(like.shape, low, high).to(dtype or like.dtype)


def _randperm(streams: Streams, count: int, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    if streams.members is not None:  # vmap draws one at a time; batching_rules.py draws all at once
        raise NotImplementedError("randperm draws random numbers in a way that has no stream per member")
    return streams.permutation([count]).to(dtype or torch.int64)


def _normal(streams: Streams, mean: float | Tensor, std: float | Tensor, **_: object) -> Tensor:
    """Draw in the shape of the mean and the deviation, of which at least one is a tensor."""
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return mean + std * streams.normal(shape, tensors[0].dtype)


def _bernoulli(streams: Streams, like: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return streams.below(like.shape, p)


def _uniform(streams: Streams, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * streams.uniform(like.shape, like.dtype)


def _exponential(streams: Streams, like: Tensor, rate: float = 1.0) -> Tensor:
    return -torch.log1p(-streams.uniform(like.shape, _exact(like))) / rate


def _cauchy(streams: Streams, like: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return median + sigma * torch.tan(math.pi * (streams.uniform(like.shape, _exact(like)) - 0.5))


def _log_normal(streams: Streams, like: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return torch.exp(mean + std * streams.normal(like.shape, _exact(like)))


def _geometric(streams: Streams, like: Tensor, p: float) -> Tensor:
    tries = torch.log1p(-streams.uniform(like.shape, _exact(like))) / math.log1p(-p) if p < 1 else like * 0
    return tries.ceil().clamp(min=1)


def _random(streams: Streams, like: Tensor, *bounds: int | None) -> Tensor:
    """Draw integers below a bound, or between two; by default, from 0 to the largest that the dtype has."""
    low, high = (0, None) if not bounds else (0, bounds[0]) if len(bounds) == 1 else bounds
    if high is None and like.dtype == torch.bool:
        high = 2
    elif high is None and like.is_floating_point():
        # As in torch, the largest integer whose successor the dtype can represent.
        high = 2 ** (1 - round(math.log2(torch.finfo(like.dtype).eps))) + 1
    elif high is None:
        high = torch.iinfo(like.dtype).max + 1
    assert low is not None
    return streams.integers(like.shape, low, high)


def _exact(like: Tensor) -> torch.dtype:
    return torch.float32 if like.is_floating_point() and like.dtype != torch.float64 else torch.float64


def _multinomial(streams: Streams, weights: Tensor, count: int, replacement: bool = False, **_: object) -> Tensor:
    """Draw indices `(…, count)` by weights `(…, category)`, as torch does on a GPU."""
    shape = list(weights.shape)
    if streams.members is not None:  # vmap has merged the members with the rows
        weights = weights.reshape(streams.members, -1, shape[-1])
    if not replacement or count == 1:
        waits = _exponential(streams, weights)
        found = (weights / waits).topk(count, dim=-1).indices
    else:
        sums = weights.double().cumsum(-1)
        drawn = streams.uniform([*weights.shape[:-1], count], torch.float64) * sums[..., -1:]
        found = torch.searchsorted(sums, drawn, right=True).clamp(max=shape[-1] - 1)
    return found.reshape([*shape[:-1], count])


def _rrelu(
    streams: Streams,
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,
) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slopes = lower + (upper - lower) * streams.uniform(x.shape, x.dtype)
    noise.copy_(torch.where(x <= 0, slopes, 1.0))
    return x * noise


def _rrelu_in_place(streams: Streams, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.copy_(_rrelu(streams, x, *args, **kwargs))


def _into(rule: Callable[..., Tensor]) -> Rule:
    """Turn a rule that draws like a tensor into the rule of the operation that fills the tensor."""

    def fill(streams: Streams, self: Tensor, *args: Any, generator: None = None, **kwargs: Any) -> Tensor:
        return self.copy_(rule(streams, self, *args, **kwargs))

    return fill


def _like(rule: Callable[..., Tensor]) -> Rule:
    """Turn a rule that takes a shape and a dtype into the rule of the operation that takes both from a tensor."""

    def same(streams: Streams, self: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return rule(streams, self.shape, dtype=dtype or self.dtype)

    return same


def _for_each(operation: Any, names: Sequence[str], rule: Rule) -> dict[Callable[..., Any], Rule]:
    """Return one rule for several overloads of an operation."""
    return {getattr(operation, name): rule for name in names}


_EITHER = ("default", "generator")  # overloads without a generator and with one

DRAW_RULES: Mapping[Callable[..., Any], Rule] = {
    aten.bernoulli.default: lambda streams, p, **_: streams.below(p.shape, p).to(p.dtype),
    **_for_each(aten.bernoulli, ("p", "Tensor"), lambda s, like, p, **_: s.below(like.shape, p).to(like.dtype)),
    **_for_each(aten.bernoulli_, ("float", "Tensor"), _into(_bernoulli)),
    aten.native_dropout.default: _native_dropout,
    **_for_each(aten.rand, _EITHER, _rand),
    **_for_each(aten.rand_like, _EITHER, _like(_rand)),
    **_for_each(aten.randn, _EITHER, _randn),
    **_for_each(aten.randn_like, _EITHER, _like(_randn)),
    aten.normal.float_float: lambda streams, mean, std, size, **o: mean + std * _randn(streams, size, **o),
    aten.normal.Tensor_float: lambda streams, mean, std=1.0, **_: _normal(streams, mean, std),
    **_for_each(aten.normal, ("float_Tensor", "Tensor_Tensor"), _normal),
    **_for_each(aten.randint, _EITHER, lambda streams, high, size, **o: _randint(streams, 0, high, size, **o)),
    **_for_each(aten.randint, ("low", "low_generator"), _randint),
    **_for_each(aten.randint_like, (*_EITHER, "low_dtype", "low_generator_dtype"), _randint_like),
    **_for_each(aten.randperm, _EITHER, _randperm),
    aten.multinomial.default: _multinomial,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: _rrelu_in_place,
    aten.uniform_.default: _into(_uniform),
    aten.normal_.default: _into(
        lambda streams, like, mean=0.0, std=1.0: mean + std * streams.normal(like.shape, like.dtype)
    ),
    aten.exponential_.default: _into(_exponential),
    aten.cauchy_.default: _into(_cauchy),
    aten.log_normal_.default: _into(_log_normal),
    aten.geometric_.default: _into(_geometric),
    **_for_each(aten.random_, ("default", "to", "from"), _into(_random)),
}

# Tagged as random by torch, but it never is: with dropout, torch takes another kernel on the CPU.
_NOT_RANDOM = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default})


def is_random(operation: object) -> bool:
    """Return True if an ATen operation draws random numbers."""
    tags = getattr(operation, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and operation not in _NOT_RANDOM


def is_without_dropout(operation: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return True for a call of an attention kernel that may draw random numbers, but has a rate of 0."""
    names = [argument.name for argument in operation._schema.arguments]
    return "dropout_p" in names and not {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p")


def has_own_generator(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return True if an operation draws from a generator that the model has passed."""
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


class DrawFromStreams(TorchDispatchMode):
    """Context in which every random operation draws from `streams`."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    @property
    def streams(self) -> Streams:
        """Return the streams."""
        return self._streams

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func) or is_on_meta(args, kwargs) or is_without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        if has_own_generator(args, kwargs):
            if self._streams.may_use_torch:
                return func(*args, **kwargs)
            raise NotImplementedError(
                f"{func} draws random numbers from a generator of its own, one for all members"
            )
        if func in DRAW_RULES:
            return DRAW_RULES[func](self._streams, *args, **kwargs)
        if self._streams.may_use_torch:
            return draw_by_torch(self._streams, func, args, kwargs)
        raise NotImplementedError(f"{func} draws random numbers in a way that has no stream per member")


def current_streams() -> Streams:
    """Return the streams that random operations draw from now."""
    mode = _get_current_dispatch_mode()
    assert isinstance(mode, DrawFromStreams)
    return mode.streams


@contextmanager
def active_streams() -> Iterator[Streams]:
    """Yield the streams that random operations draw from now, to draw from them without such an operation.

    As within such an operation, what is computed in the context is seen neither by modes of torch functions nor by
    `DrawFromStreams`. A step makes hundreds of calls for its draws.
    """
    mode = _get_current_dispatch_mode()
    assert isinstance(mode, DrawFromStreams)
    with torch._C.DisableTorchFunction(), _pop_mode_temporarily():
        yield mode.streams


def device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device on which an operation draws."""
    first = next((value for value in args if isinstance(value, Tensor)), None)
    return first.device if first is not None else torch.device(kwargs.get("device") or "cpu")


def draw_by_torch(streams: Streams, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a random operation that has no rule with torch's generator, seeded from the member's stream."""
    device, seed = device_of(args, kwargs), int(streams.words64([1])) % 2**63
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, **{**kwargs, "generator": torch.Generator(device).manual_seed(seed)})
    with seeded(device, seed):
        return func(*args, **kwargs)


def is_on_meta(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if only shapes are computed, as in Keras before a first step. Nothing is drawn then."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    device = kwargs.get("device") if first is None else first.device
    return device is not None and torch.device(device).type == "meta"
