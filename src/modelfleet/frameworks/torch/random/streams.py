"""Random numbers of a member's own: dropout masks and noise that depend on its seed and step alone.

torch draws from one generator, so under `vmap` a member's dropout would depend on the other members of the lane.
Here every number is computed from Threefry's words for (seed, step, number of the draw, position in the tensor).
`operations.py` has what each random operation makes of them. docs/how-fusing-works.md says which number is which.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from modelfleet.errors import StrategyError
from modelfleet.frameworks.torch.random.threefry import WORDS, join_words, kept_scale, last_kept, noise

# Binary digits of a uniform number, as in torch: as many as keep it below 1.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


DrawShapes = tuple[tuple[tuple[int, ...], int | None], ...]
"""For each random draw of a step, in order: its shape, and the axis that has the batch's rows.

Along that axis, the shape has the count per row. An axis of None means one draw for all rows.
"""


@dataclass(frozen=True)
class BatchRows:
    """Some rows of a batch. They draw what they would have drawn as part of the whole batch.

    Attributes:
        start: The index of the first of them.
        count: The number of rows of the whole batch.
        rows: The number of these rows.
        draws: What a step on the batch draws.
    """

    start: Tensor
    count: Tensor
    rows: int
    draws: DrawShapes

    def positions(self, number: int, shape: Sequence[int]) -> Tensor:
        """Return the flat positions of a draw's numbers within the draw of the whole batch.

        Axes that do not have the rows may be longer or shorter than before, as in a batch of longer sentences: so
        they are in the draw of the whole batch.

        Raises:
            StrategyError: It can't be told any more which axis has the rows.
        """
        own, axis = self.draws[number] if number < len(self.draws) else ((), None)
        each = 0 if axis is None else own[axis]
        expected = tuple(each * self.rows if index == axis else size for index, size in enumerate(own))
        checked = range(len(own)) if axis is None else [axis]
        if (
            number >= len(self.draws)
            or len(shape) != len(own)
            or any(shape[index] != expected[index] for index in checked)
        ):
            raise StrategyError(
                f"the model's random draw {number + 1} has the shape {tuple(shape)}. Its first step drew "
                f"{expected} for {self.rows} rows, so it is unknown which row each number belongs to. "
                f"Draw the same number for each row in every step, or train on one device."
            )
        found = torch.arange(math.prod(shape), dtype=torch.int64, device=self.start.device).view(shape)
        if axis is None:
            return found
        inner = each * math.prod(shape[axis + 1 :])  # numbers of one row that lie next to each other
        before = torch.arange(math.prod(shape[:axis]), dtype=torch.int64, device=self.start.device)
        skipped = self.start + before * (self.count - self.rows)  # rows of the batch that are not here
        return found + (skipped * inner).view(*shape[:axis], *[1] * (len(shape) - axis))


class Streams:
    """Random numbers of one step. Every method draws once.

    Args:
        seed: `(member,)` for stacked members, `()` for one member. With stacked members, the first axis of every
            `shape` below is the member.
        step: How many steps the members have taken, in the shape of `seed`.
        rows: The rows of the batch that are computed here, if they are not all.
        first: The number of the first draw.
    """

    def __init__(self, seed: Tensor, step: Tensor, rows: BatchRows | None = None, *, first: int = 0) -> None:
        self._seed, self._step = seed, step
        self._stacked = seed.dim() == 1
        self._draws = first
        self._skipped: Tensor | None = None  # draws that each member left out, `(member, 1)`
        self._rows = rows
        self._padded: tuple[Sequence[Any], tuple[int, ...], Callable[[Any], Tensor]] | None = None

    @contextmanager
    def at_own_positions(
        self, axes: Sequence[Any], shape: Sequence[int], own: Callable[[Any], Tensor]
    ) -> Iterator[None]:
        """Draw at the positions that a padded member's numbers have in its own shape.

        Args:
            axes: For each axis of a draw, what `own` takes; None if the axis is not padded.
            shape: The padded shape, without the member's axis. A draw may have some of its axes merged.
            own: Returns the own sizes `(member,)` of an axis.
        """
        self._padded = axes, tuple(shape), own
        try:
            yield
        finally:
            self._padded = None

    @cached_property
    def _key(self) -> tuple[Tensor, Tensor, Tensor]:
        # Computed at the first draw: most steps draw nothing, and every operation is traced.
        step = self._step.to(torch.int64)
        parts = (part.to(torch.int32) for part in (self._seed, self._seed >> 32, step))
        first, second, third = (part.unsqueeze(1) if self._stacked else part for part in parts)
        return first, second, third

    def words32(self, shape: Sequence[int]) -> Tensor:
        """Return 32-bit words as int32. Two numbers of a draw are the two words of one counter."""
        number, size, positions = self._next(shape)
        if positions is None:
            drawn = self._first_words(number, (size + 1) // 2)
        else:
            drawn = self._words_of(number, (positions >> 1).to(torch.int32))
        return _in_turn(drawn, shape, size, positions)

    def words64(self, shape: Sequence[int]) -> Tensor:
        """Return 64-bit words as int64. Every number has a counter of its own."""
        number, size, positions = self._next(shape)
        if positions is None:
            return join_words(self._first_words(number, size)).view(list(shape))
        return join_words(self._words_of(number, positions.to(torch.int32))).view(list(shape))

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return numbers in [0, 1), with all the digits that the dtype has below 1."""
        return _unit(self.words64(shape) if dtype == torch.float64 else self.words32(shape), dtype)

    def below(self, shape: Sequence[int], p: float | Tensor) -> Tensor:
        """Return for uniform numbers of 24 digits whether each is below p."""
        if isinstance(p, Tensor):
            return _unit(self.words32(shape), torch.float32) < p
        words, least = self.words32(shape), math.ceil(p * 2**24)  # the first of the 2**24 numbers not below p
        if least <= 0 or least >= 2**24:
            return torch.full(list(shape), least > 0, dtype=torch.bool, device=self._seed.device)
        return words < (least - 2**23) << 8  # words count from -2**31

    def kept(self, shape: Sequence[int], p: Tensor) -> Tensor:
        """Return which numbers dropout keeps. `p` is `(member,)`, the rate at which each member drops, in float64.

        As in torch, a member with a rate of 0 or 1 draws nothing: its next draw has the number of this one.
        """
        mask = self.words32(shape) <= last_kept(p).view(-1, *[1] * (len(shape) - 1))
        self._skip_whole_rates(p)
        return mask

    def noise(self, shape: Sequence[int], p: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1 / (1 - p) for the numbers that `kept` keeps, and 0 for the others."""
        if type(self) is not Streams or self._rows is not None or math.prod(shape[1:]) >= 2**31:
            return self.kept(shape, p) * kept_scale(p, dtype).view(-1, *[1] * (len(shape) - 1))
        number, size, positions = self._next(shape)
        first, second, step = self._key
        at = None if positions is None else positions.to(torch.int32)
        drawn = noise(first, self._numbered(second, number), step, at, p, size, dtype)
        self._skip_whole_rates(p)
        return drawn.view(list(shape))

    def _skip_whole_rates(self, p: Tensor) -> None:
        """Have members with a rate of 0 or 1 use the number of the last draw again."""
        skipped = ((p <= 0) | (p >= 1)).to(torch.int32).unsqueeze(1)
        self._skipped = skipped if self._skipped is None else self._skipped + skipped

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Return integers from `low` up to, but not including, `high`, as int64."""
        words, count = self.words64(shape), high - low
        if count < 2**63:
            return torch.remainder(words, count).add_(low)
        # The count does not fit into an int64. A negative word stands for low + count + word.
        last = high - 2**64 if high == 2**63 else high
        return words if count == 2**64 else torch.where(words < 0, words + last, words + low)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return standard normal numbers, computed in pairs by the Box-Muller transform."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        number, size, positions = self._next(shape)
        first, second = (_unit(words, exact) for words in self._pairs(number, size, positions, exact))
        radius, angle = torch.sqrt(-2.0 * torch.log1p(-first)), second * (2.0 * math.pi)
        pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1)
        return _in_turn(pairs, shape, size, positions).to(dtype)

    def permutation(self, shape: Sequence[int]) -> Tensor:
        """Return the numbers from 0 on in a random order, along the last axis."""
        unsigned = self.words64(shape) ^ -(2**63)  # whose signed order is the unsigned order
        return torch.argsort(unsigned, dim=-1, stable=True)

    @property
    def members(self) -> int | None:
        """Return the number of stacked members; None for a single member."""
        return len(self._seed) if self._stacked else None

    @property
    def may_use_torch(self) -> bool:
        """Return True if torch may run an operation that has no rule: for a single member, on its whole batch."""
        return type(self) is Streams and not self._stacked and self._rows is None

    def _pairs(
        self, number: int, size: int, positions: Tensor | None, exact: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the words 2i and 2i + 1 of a draw, for every i or for the i of every position."""
        if positions is None:
            half = (size + 1) // 2
            if exact == torch.float32:
                return _both(self._first_words(number, half))
            drawn = join_words(self._first_words(number, 2 * half))
            return drawn[..., ::2], drawn[..., 1::2]
        pairs = (positions >> 1).to(torch.int32)
        if exact == torch.float32:
            return _both(self._words_of(number, pairs))
        left, right = (join_words(self._words_of(number, pairs * 2 + second)) for second in (0, 1))
        return left, right

    def _next(self, shape: Sequence[int]) -> tuple[int, int, Tensor | None]:
        """Return the number of the next draw, its size per member, and its positions if they are not in order."""
        own = list(shape[1:] if self._stacked else shape)
        number, self._draws = self._draws, self._draws + 1
        positions = None
        if self._rows is not None:
            positions = self._rows.positions(number, own).flatten()
        elif self._padded is not None and any(self._padded[0]):
            positions = self._own_positions(own)
        return number, math.prod(own), positions

    def _own_positions(self, shape: Sequence[int]) -> Tensor:
        """Return `(member, number)`: the flat positions of a draw's numbers in the own shape of each member."""
        assert self._padded is not None
        axes, padded, own_sizes = self._padded
        if math.prod(shape) == math.prod(padded):
            shape = padded
        if len(shape) != len(padded) or any(n not in (1, m) for n, m in zip(shape, padded, strict=True)):
            raise NotImplementedError(f"a padded draw has the shape {tuple(shape)}, expected {padded}")
        found = torch.zeros((), dtype=torch.int64, device=self._seed.device)
        stride: int | Tensor = 1
        for index in reversed(range(len(shape))):
            place = torch.arange(shape[index], dtype=torch.int64, device=self._seed.device)
            place = place.view(-1, *[1] * (len(shape) - 1 - index))
            found = found + place * stride
            own, size = axes[index], shape[index]
            if own is not None and size == padded[index]:
                stride = stride * own_sizes(own).to(torch.int64).view(-1, *[1] * len(shape))
            else:
                stride = stride * size
        return found.expand(len(self._seed), *shape).flatten(1)

    def _words_of(self, number: int, counters: Tensor) -> Tensor:
        first, second, step = self._key
        return WORDS(first, self._numbered(second, number), counters, step)

    def _numbered(self, second: Tensor, number: int) -> Tensor:
        """Return the second word of the keys of a draw."""
        return second + number if self._skipped is None else second + (number - self._skipped)

    def _first_words(self, number: int, blocks: int) -> Tensor:
        return self._words_of(number, torch.arange(blocks, dtype=torch.int32, device=self._seed.device))


def _both(pairs: Tensor) -> tuple[Tensor, Tensor]:
    return pairs[..., 0], pairs[..., 1]


def _in_turn(pairs: Tensor, shape: Sequence[int], size: int, positions: Tensor | None) -> Tensor:
    """Return the numbers of a draw from pairs `(…, 2)`: those at even positions, and those at odd ones."""
    if positions is None:
        return pairs.flatten(-2)[..., :size].reshape(list(shape))
    return torch.where((positions & 1).bool(), pairs[..., 1], pairs[..., 0]).view(list(shape))


def _unit(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return signed words as numbers in [0, 1). The least word is 0."""
    digits, exact = _DIGITS[dtype], torch.float64 if dtype == torch.float64 else torch.float32
    drawn = (words >> (words.element_size() * 8 - digits)).to(exact)
    return drawn.mul_(2.0**-digits).add_(0.5).to(dtype)
