"""A member's random numbers, as docs/how-fusing-works.md defines them, in NumPy and for plain torch."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


def seed_of(name: str, fleet_seed: int = 0) -> int:
    """The seed of a member."""
    digest = hashlib.blake2b(f"{fleet_seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def threefry(key: tuple[int, int], counter: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds (Salmon and others, 2011): two words for each counter."""
    with np.errstate(over="ignore"):
        first, second = (np.uint32(word & 0xFFFFFFFF) for word in key)
        keys = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
        a, b = np.broadcast_arrays(*(np.asarray(words).astype(np.uint32) for words in counter))
        a, b = a + keys[0], b + keys[1]
        for block in range(5):
            for turn in _TURNS[block % 2]:
                a = a + b
                b = (b << np.uint32(turn)) | (b >> np.uint32(32 - turn))
                b = a ^ b
            a = a + keys[(block + 1) % 3]
            b = b + keys[(block + 2) % 3] + np.uint32(block + 1)
        return a, b


def order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The order of a member's rows in an epoch."""
    first, second = threefry((seed, (seed >> 32) + 2**31), (np.arange(rows), epoch))
    return np.argsort((first.astype(np.uint64) << np.uint64(32)) | second, kind="stable")


class Draws:
    """The draws of one step of one member."""

    def __init__(self, seed: int, step: int) -> None:
        self.seed, self.step, self.number = seed, step, 0

    def _words(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        key = (self.seed, (self.seed >> 32) + self.number)
        self.number += 1
        return threefry(key, (np.arange(count), self.step))

    def uniform(self, count: int, digits: int) -> np.ndarray:
        """Uniform numbers in [0, 1) of so many binary digits."""
        if digits > 32:
            first, second = self._words(count)
            words = ((first.astype(np.uint64) << np.uint64(32)) | second).view(np.int64)
            return (words >> (64 - digits)) * 2.0**-digits + 0.5
        pairs = np.stack(self._words(-(-count // 2)), axis=1).ravel()[:count]
        return (pairs.view(np.int32) >> (32 - digits)) * 2.0**-digits + 0.5

    def normal(self, count: int) -> np.ndarray:
        """Normal numbers in double precision, by Box and Muller."""
        pairs = self.uniform(2 * -(-count // 2), 53).reshape(-1, 2)
        radius, angle = np.sqrt(-2 * np.log1p(-pairs[:, 0])), 2 * np.pi * pairs[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()[:count]

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """In the place of torch's."""
        if not training or p == 0:
            return x
        kept = torch.from_numpy(self.uniform(x.numel(), 24) < 1 - p).view(x.shape)
        return x * kept.to(x.dtype) / (1 - p)

    def rand_like(self, x: Tensor) -> Tensor:
        """In the place of torch's."""
        return torch.from_numpy(self.uniform(x.numel(), 53)).view(x.shape).to(x.dtype)

    def randn_like(self, x: Tensor) -> Tensor:
        """In the place of torch's."""
        return torch.from_numpy(self.normal(x.numel())).view(x.shape).to(x.dtype)


@contextmanager
def drawing(name: str, step: int) -> Iterator[None]:
    """Within this context plain torch draws what a member of a fleet draws in this step."""
    draws = Draws(seed_of(name), step)
    with (
        mock.patch("torch.nn.functional.dropout", draws.dropout),
        mock.patch("torch.rand_like", draws.rand_like),
        mock.patch("torch.randn_like", draws.randn_like),
    ):
        yield
