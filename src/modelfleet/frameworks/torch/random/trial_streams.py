"""Streams that are not random, to find out how a model uses its random numbers (see `row_independence.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modelfleet.frameworks.torch.random.streams import Streams


class ConstantStreams(Streams):
    """Streams whose draws are the same number everywhere: they show what a step does to its rows without chance.

    Attributes:
        shapes: The shapes of all draws so far.
        permutations: Which of the draws are permutations.
    """

    def __init__(self, seed: Tensor, step: Tensor) -> None:
        super().__init__(seed, step)
        self.shapes: list[tuple[int, ...]] = []
        self.permutations: list[int] = []

    def words32(self, shape: Sequence[int]) -> Tensor:
        """Return the middle word everywhere."""
        self.shapes.append(tuple(shape))
        return torch.zeros(list(shape), dtype=torch.int32, device=self._seed.device)

    def words64(self, shape: Sequence[int]) -> Tensor:
        """Return the middle word everywhere."""
        return self.words32(shape).to(torch.int64)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return -1 everywhere."""
        return self.words32(shape).to(dtype) - 1.0

    def permutation(self, shape: Sequence[int]) -> Tensor:
        """Return the numbers in their order."""
        self.permutations.append(len(self.shapes))
        return super().permutation(shape)


class ExtremeStreams(Streams):
    """Streams that draw only the least or the greatest number: they show which row gets which, however rare a
    dropout is."""

    def words32(self, shape: Sequence[int]) -> Tensor:
        """Return the least or the greatest word."""
        return (super().words32(shape) >> 31) ^ 0x7FFFFFFF

    def words64(self, shape: Sequence[int]) -> Tensor:
        """Return the least or the greatest word."""
        return (super().words64(shape) >> 63) ^ 0x7FFFFFFFFFFFFFFF

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return 0 or a large number."""
        return (self.words32(shape) < 0).to(dtype) * 5.0
