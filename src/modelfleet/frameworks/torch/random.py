"""Random numbers of a member's own: dropout masks and noise that depend on its seed and step alone.

torch draws from one generator, so under `vmap` a member's dropout would depend on who else is in the lane. Here
every random operation is replaced by Threefry's words for (seed, step, which draw, position in the tensor). The
replacement happens below autograd and vmap, at the level of ATen operations, so that it reaches every way a model
can draw: `nn.Dropout`, attention's dropout, `torch.rand_like` in a forward, and so on. Which number is which is
said in docs/how-fusing-works.md.
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
from modelfleet.frameworks.torch.threefry import threefry, wide

aten = torch.ops.aten

# The binary digits of a uniform number, as torch has them: as many as keep it below 1.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


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

    Every method draws once. With stacked members the first axis of `shape` is the member.
    part: the rows of a batch that are computed here, if they are not all.
    """

    def __init__(self, seed: Tensor, step: Tensor, part: Part | None = None) -> None:
        self._seed, self._step = seed, step
        self._stacked = seed.dim() == 1
        self._draws = 0
        self._part = part

    @cached_property
    def _words(self) -> tuple[Tensor, Tensor, Tensor]:
        # When something is drawn, and not before: most steps draw nothing, and every operation is traced.
        step = self._step.to(torch.int64)
        parts = (part.to(torch.int32) for part in (self._seed, self._seed >> 32, step))
        first, second, third = (part.unsqueeze(1) if self._stacked else part for part in parts)
        return first, second, third

    def narrow(self, shape: Sequence[int]) -> Tensor:
        """32-bit words, as int32: two numbers of a draw are the words of one counter."""
        number, size, positions = self._next(shape)
        if positions is None:
            pair = self._block(number, self._counted((size + 1) // 2))
            return torch.stack(pair, -1).flatten(-2)[..., :size].reshape(list(shape))
        left, right = self._block(number, (positions >> 1).to(torch.int32))
        return torch.where((positions & 1).bool(), right, left).view(list(shape))

    def wide(self, shape: Sequence[int]) -> Tensor:
        """64-bit words, as int64: a number has a counter to itself."""
        number, size, positions = self._next(shape)
        blocks = self._counted(size) if positions is None else positions.to(torch.int32)
        return wide(*self._block(number, blocks)).view(list(shape))

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers in [0, 1), with all the digits that the dtype has below 1."""
        return _unit(self.wide(shape) if dtype == torch.float64 else self.narrow(shape), dtype)

    def below(self, shape: Sequence[int], p: Any) -> Tensor:
        """Whether uniform numbers of 24 digits are below p, a number or a tensor."""
        if isinstance(p, Tensor):
            return _unit(self.narrow(shape), torch.float32) < p
        words, least = self.narrow(shape), math.ceil(p * 2**24)  # the first of the 2**24 numbers not below p
        if least <= 0 or least >= 2**24:
            return torch.full(list(shape), least > 0, dtype=torch.bool, device=self._seed.device)
        return words < (least - 2**23) << 8  # words count from -2**31

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Integers from low up to high, without high, as int64."""
        words, count = self.wide(shape), high - low
        if count < 2**63:
            return torch.remainder(words, count).add_(low)
        # As many as fit no int64. A signed word below 0 lacks the count: it is low + count + word then.
        return words if count == 2**64 else torch.where(words < 0, words + high, words + low)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, two by two by Box and Muller."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        number, size, positions = self._next(shape)
        pairs = self._counted((size + 1) // 2) if positions is None else (positions >> 1).to(torch.int32)
        if exact == torch.float64:
            pair = (wide(*self._block(number, pairs * 2 + second)) for second in (0, 1))
        else:
            pair = self._block(number, pairs)
        first, second = (_unit(words, exact) for words in pair)
        radius, angle = torch.sqrt(-2.0 * torch.log1p(-first)), second * (2.0 * math.pi)
        even, odd = radius * torch.cos(angle), radius * torch.sin(angle)
        if positions is None:
            found = torch.stack((even, odd), -1).flatten(-2)[..., :size].reshape(list(shape))
        else:
            found = torch.where((positions & 1).bool(), odd, even).view(list(shape))
        return found.to(dtype)

    def _next(self, shape: Sequence[int]) -> tuple[int, int, Tensor | None]:
        """The number of the next draw, how many numbers a member's has, and where they are if not in order."""
        own = list(shape[1:] if self._stacked else shape)
        number, self._draws = self._draws, self._draws + 1
        return number, math.prod(own), None if self._part is None else self._part.positions(number, own).flatten()

    def _block(self, number: int, counters: Tensor) -> tuple[Tensor, Tensor]:
        first, second, step = self._words
        return threefry(first, second + number, counters, step)

    def _counted(self, size: int) -> Tensor:
        return torch.arange(size, dtype=torch.int32, device=self._seed.device)


def _unit(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Signed words as numbers in [0, 1), the least of them as 0."""
    digits, exact = _DIGITS[dtype], torch.float64 if dtype == torch.float64 else torch.float32
    drawn = (words >> (words.element_size() * 8 - digits)).to(exact)
    return drawn.mul_(2.0**-digits).add_(0.5).to(dtype)


class Still(Streams):
    """Every draw is the same number: to see what a step does to its rows apart from chance. Notes their shapes."""

    def __init__(self, seed: Tensor, step: Tensor) -> None:
        super().__init__(seed, step)
        self.shapes: list[tuple[int, ...]] = []

    def narrow(self, shape: Sequence[int]) -> Tensor:
        """The middle word, everywhere."""
        self.shapes.append(tuple(shape))
        return torch.zeros(list(shape), dtype=torch.int32, device=self._seed.device)

    def wide(self, shape: Sequence[int]) -> Tensor:
        """The middle word, everywhere."""
        return self.narrow(shape).to(torch.int64)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One number, everywhere."""
        return self.narrow(shape).to(dtype) - 1.0


class Coins(Streams):
    """Every number is the least or the greatest: to see who gets which, though a dropout be ever so rare."""

    def narrow(self, shape: Sequence[int]) -> Tensor:
        """The least word, or the greatest."""
        return (super().narrow(shape) >> 31) ^ 0x7FFFFFFF

    def wide(self, shape: Sequence[int]) -> Tensor:
        """The least word, or the greatest."""
        return (super().wide(shape) >> 63) ^ 0x7FFFFFFFFFFFFFFF

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A small number, or a large one."""
        return (self.narrow(shape) < 0).to(dtype) * 5.0


def _bernoulli(streams: Streams, like: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return streams.below(like.shape, p)


def _native_dropout(streams: Streams, like: Tensor, p: float, train: bool | None = True) -> Any:
    if not train:
        return like, torch.ones_like(like, dtype=torch.bool)
    mask = streams.below(like.shape, 1.0 - p)
    return like * mask * (0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def _rand(streams: Streams, size: Sequence[int], **options: Any) -> Tensor:
    return streams.uniform(size, options.get("dtype") or torch.get_default_dtype())


def _randn(streams: Streams, size: Sequence[int], **options: Any) -> Tensor:
    return streams.normal(size, options.get("dtype") or torch.get_default_dtype())


def _randint_low(streams: Streams, low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return streams.integers(size, low, high).to(options.get("dtype") or torch.int64)


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
    aten.bernoulli.default: lambda streams, p, **_: _bernoulli(streams, p, p).to(p.dtype),
    aten.bernoulli.p: lambda streams, like, p, **_: _bernoulli(streams, like, p).to(like.dtype),
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
