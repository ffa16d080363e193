"""Random numbers of a member's own: dropout masks and noise that depend on its seed and step alone.

torch draws from one generator, so under `vmap` a member's dropout would depend on who else is in the lane. Here
every number is made of Threefry's words for (seed, step, which draw, position in the tensor). `drawing.py` says
what each random operation makes of them. docs/how-fusing-works.md says which number is which.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from modelfleet.errors import StrategyError
from modelfleet.frameworks.torch.random.threefry import threefry, wide

# The binary digits of a uniform number, as torch has them: as many as keep it below 1.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


DrawShapes = tuple[tuple[tuple[int, ...], int | None], ...]
"""The random draws of a step in their order: the shape of each, and which of its axes has the batch's rows; there
the shape says how many a row has. None: it is one draw for all rows."""


@dataclass(frozen=True)
class BatchRows:
    """Some rows of a batch: they draw what they would have drawn within the whole batch."""

    start: Tensor
    """The first of them."""
    count: Tensor
    """The rows of the whole batch."""
    rows: int
    draws: DrawShapes

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

    def __init__(self, seed: Tensor, step: Tensor, part: BatchRows | None = None) -> None:
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
            pair = self._first(number, (size + 1) // 2)
            return torch.stack(pair, -1).flatten(-2)[..., :size].reshape(list(shape))
        left, right = self._block(number, (positions >> 1).to(torch.int32))
        return torch.where((positions & 1).bool(), right, left).view(list(shape))

    def wide(self, shape: Sequence[int]) -> Tensor:
        """64-bit words, as int64: a number has a counter to itself."""
        number, size, positions = self._next(shape)
        if positions is None:
            return wide(*self._first(number, size)).view(list(shape))
        return wide(*self._block(number, positions.to(torch.int32))).view(list(shape))

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
        last = high - 2**64 if high == 2**63 else high
        return words if count == 2**64 else torch.where(words < 0, words + last, words + low)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, two by two by Box and Muller."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        number, size, positions = self._next(shape)
        first, second = (_unit(words, exact) for words in self._pairs(number, size, positions, exact))
        radius, angle = torch.sqrt(-2.0 * torch.log1p(-first)), second * (2.0 * math.pi)
        even, odd = radius * torch.cos(angle), radius * torch.sin(angle)
        if positions is None:
            found = torch.stack((even, odd), -1).flatten(-2)[..., :size].reshape(list(shape))
        else:
            found = torch.where((positions & 1).bool(), odd, even).view(list(shape))
        return found.to(dtype)

    def permutation(self, shape: Sequence[int]) -> Tensor:
        """The numbers from 0 on in a random order, along the last axis."""
        unsigned = self.wide(shape) ^ -(2**63)  # in their order
        return torch.argsort(unsigned, dim=-1, stable=True)

    @property
    def members(self) -> int | None:
        """How many members are stacked; None for one by itself."""
        return len(self._seed) if self._stacked else None

    @property
    def by_torch(self) -> bool:
        """Whether an operation without a rule may be left to torch: one member's, on its whole batch."""
        return type(self) is Streams and not self._stacked and self._part is None

    def _pairs(
        self, number: int, size: int, positions: Tensor | None, exact: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The words number 2i and 2i + 1 of a draw, for every i or for that of every position."""
        if positions is None:
            half = (size + 1) // 2
            if exact == torch.float32:
                return self._first(number, half)
            words = wide(*self._first(number, 2 * half))
            return words[..., ::2], words[..., 1::2]
        pairs = (positions >> 1).to(torch.int32)
        if exact == torch.float32:
            return self._block(number, pairs)
        left, right = (wide(*self._block(number, pairs * 2 + second)) for second in (0, 1))
        return left, right

    def _next(self, shape: Sequence[int]) -> tuple[int, int, Tensor | None]:
        """The number of the next draw, how many numbers a member's has, and where they are if not in order."""
        own = list(shape[1:] if self._stacked else shape)
        number, self._draws = self._draws, self._draws + 1
        return number, math.prod(own), None if self._part is None else self._part.positions(number, own).flatten()

    def _block(self, number: int, counters: Tensor) -> tuple[Tensor, Tensor]:
        first, second, step = self._words
        return threefry(first, second + number, counters, step)

    def _first(self, number: int, blocks: int) -> tuple[Tensor, Tensor]:
        return self._block(number, torch.arange(blocks, dtype=torch.int32, device=self._seed.device))


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
        self.orders: list[int] = []
        """Which of the draws are permutations."""

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

    def permutation(self, shape: Sequence[int]) -> Tensor:
        """The numbers as they are."""
        self.orders.append(len(self.shapes))
        return super().permutation(shape)


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
