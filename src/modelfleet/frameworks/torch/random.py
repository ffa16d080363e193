"""Random numbers of a member's own: dropout masks and noise that depend on its seed and step alone.

torch draws from one generator, so under `vmap` a member's dropout would depend on who else is in the lane. Here
every random operation is replaced by a hash of (seed, step, which draw, position in the tensor). The replacement
happens below autograd and vmap, at the level of ATen operations, so that it reaches every way a model can draw:
`nn.Dropout`, attention's dropout, `torch.rand_like` in a forward, and so on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelfleet.errors import StrategyError

aten = torch.ops.aten

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    # A 32-bit avalanche hash on int64 tensors. Both multipliers are below 2**31, so no product overflows.
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


Draws = tuple[tuple[tuple[int, ...], int | None], ...]
"""The random draws of a step in their order: the shape of each, and which of its axes has the batch's rows; there
the shape says how many a row has. None: it is one draw for all rows."""


@dataclass(frozen=True)
class Part:
    """Some rows of a batch: they draw what they would have drawn within the whole batch."""

    start: Tensor
    """The first of them."""
    count: Tensor
    """The rows of the whole batch."""
    rows: int
    draws: Draws

    def positions(self, number: int, shape: Sequence[int]) -> Tensor:
        """Where the numbers of a draw of this shape are in that of the whole batch, counted through."""
        own, axis = self.draws[number] if number < len(self.draws) else ((), None)
        each = 0 if axis is None else own[axis]
        expected = tuple(each * self.rows if place == axis else size for place, size in enumerate(own))
        if tuple(shape) != expected or number >= len(self.draws):
            raise StrategyError(
                f"the model's random draw {number + 1} has the shape {tuple(shape)}; expected {expected} for "
                f"{self.rows} rows, by what it drew at first: which numbers are whose row's can't be told. "
                f"Draw alike in every step, or train on one device."
            )
        found = torch.arange(math.prod(shape), dtype=torch.int64, device=self.start.device).view(shape)
        if axis is None:
            return found
        inner = each * math.prod(shape[axis + 1 :])  # numbers of a row that follow each other
        before = torch.arange(math.prod(shape[:axis]), dtype=torch.int64, device=self.start.device)
        skipped = self.start + before * (self.count - self.rows)  # rows of the other parts
        return found + (skipped * inner).view(*shape[:axis], *[1] * (len(shape) - axis))


class Streams:
    """The random numbers of one step: of stacked members (`seed` is `(member,)`) or of one (`seed` is `()`).

    part: the rows of a batch that are computed here, if they are not all.
    """

    def __init__(self, seed: Tensor, step: Tensor, part: Part | None = None) -> None:
        self._seed, self._step = seed, step
        self._stacked = seed.dim() == 1
        self._draws = 0
        self._part = part

    @cached_property
    def _key(self) -> tuple[Tensor, Tensor]:
        # When something is drawn, and not before: most steps draw nothing, and every operation is traced.
        step = self._step.to(torch.int64)
        low = _mix((self._seed & _WORD) ^ _mix(step & _WORD))
        return _mix(low ^ ((self._seed >> 32) & _WORD)), _mix(low + 0x5BD1E995 & _WORD)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers in [0, 1); with stacked members the first axis of `shape` is the member."""
        own = list(shape[1:] if self._stacked else shape)
        self._draws += 1
        first, second = (_mix((key + self._draws * 0x9E3779B1) & _WORD) for key in self._key)
        if self._part is None:
            position = torch.arange(math.prod(own), dtype=torch.int64, device=first.device).view(own)
        else:
            position = self._part.positions(self._draws - 1, own)
        if self._stacked:
            first, second = (key.view(-1, *[1] * len(own)) for key in (first, second))
        bits = _mix((_mix((position & _WORD) ^ first) + second) & _WORD)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return ((bits >> 8).to(exact) * 2.0**-24).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, by Box and Muller."""
        radius = torch.sqrt(-2.0 * torch.log1p(-self.uniform(shape, torch.float32)))
        return (radius * torch.cos(2.0 * math.pi * self.uniform(shape, torch.float32))).to(dtype)


class Still(Streams):
    """Every draw is the same number: to see what a step does to its rows apart from chance. Notes their shapes."""

    def __init__(self, seed: Tensor, step: Tensor) -> None:
        super().__init__(seed, step)
        self.shapes: list[tuple[int, ...]] = []

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The middle of [0, 1), everywhere."""
        self.shapes.append(tuple(shape))
        return torch.full(list(shape), 0.5, dtype=dtype, device=self._seed.device)


class Coins(Streams):
    """Every number is the least or the greatest: to see who gets which, though a dropout be ever so rare."""

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Nothing, or nearly 1."""
        return (super().uniform(shape, torch.float32) < 0.5).to(dtype) * (1 - 2.0**-24)


def _bernoulli(streams: Streams, like: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    chosen = streams.uniform(like.shape, torch.float32) < p
    return chosen.to(like.dtype if like.is_floating_point() else torch.float32)


def _native_dropout(streams: Streams, like: Tensor, p: float, train: bool | None = True) -> Any:
    if not train:
        return like, torch.ones_like(like, dtype=torch.bool)
    mask = streams.uniform(like.shape, torch.float32) >= p
    return like * mask * (1.0 / (1.0 - p)), mask


def _rand(streams: Streams, size: Sequence[int], **options: Any) -> Tensor:
    return streams.uniform(size, options.get("dtype") or torch.get_default_dtype())


def _randn(streams: Streams, size: Sequence[int], **options: Any) -> Tensor:
    return streams.normal(size, options.get("dtype") or torch.get_default_dtype())


def _randint_low(streams: Streams, low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    drawn = low + torch.floor(streams.uniform(size, torch.float64) * (high - low))
    return drawn.to(options.get("dtype") or torch.int64)


def _inplace(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(streams: Streams, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("generator", None)
        return self.copy_(draw(streams, self, *args, **kwargs))

    return fill


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def same(streams: Streams, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return draw(streams, *args, self.shape, dtype=kwargs.get("dtype") or self.dtype)

    return same


# Every random ATen operation that has a replacement.
DRAWS: Mapping[Any, Callable[..., Any]] = {
    aten.bernoulli.default: lambda streams, p, **_: _bernoulli(streams, p, p),
    aten.bernoulli.p: lambda streams, like, p, **_: _bernoulli(streams, like, p),
    aten.bernoulli_.float: _inplace(_bernoulli),
    aten.bernoulli_.Tensor: _inplace(_bernoulli),
    aten.native_dropout.default: _native_dropout,
    aten.rand.default: _rand,
    aten.rand.generator: _rand,
    aten.rand_like.default: _like(_rand),
    aten.randn.default: _randn,
    aten.randn.generator: _randn,
    aten.randn_like.default: _like(_randn),
    aten.normal.float_float: lambda streams, mean, std, size, **o: mean + std * _randn(streams, size, **o),
    aten.randint.default: lambda streams, high, size, **o: _randint_low(streams, 0, high, size, **o),
    aten.randint.low: _randint_low,
    aten.randint.low_generator: _randint_low,
    aten.uniform_.default: _inplace(
        lambda streams, x, low=0.0, high=1.0: low + (high - low) * streams.uniform(x.shape, x.dtype)
    ),
    aten.normal_.default: _inplace(
        lambda streams, x, mean=0.0, std=1.0: mean + std * streams.normal(x.shape, x.dtype)
    ),
    aten.exponential_.default: _inplace(
        lambda streams, x, rate=1.0: -torch.log1p(-streams.uniform(x.shape, x.dtype)) / rate
    ),
}


# Tagged as random by torch, but without dropout on the CPU: torch takes another kernel if there is any.
_NOT_RANDOM = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default})


def is_random(operation: Any) -> bool:
    """Whether an ATen operation draws random numbers."""
    tags = getattr(operation, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and operation not in _NOT_RANDOM


def draw(streams: Streams, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a random operation, from a member's own stream."""
    if operation not in DRAWS:
        raise NotImplementedError(f"{operation} draws random numbers in a way that has no stream per member")
    return DRAWS[operation](streams, *args, **kwargs)


class DrawFromStreams(TorchDispatchMode):
    """Within this context every random operation draws from `streams`."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random(func) and not _on_meta(args, kwargs):
            return draw(self._streams, func, args, kwargs)
        return func(*args, **kwargs)


def _on_meta(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether only shapes are asked for, as Keras does before a model's first step: nothing is drawn."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    device = kwargs.get("device") if first is None else first.device
    return device is not None and torch.device(device).type == "meta"
