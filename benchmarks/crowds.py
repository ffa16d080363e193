"""The work of the contests on several devices: one network, its users and their rows, and the right answers."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

BATCH = 32
CLASSES = 10
IMAGE = (1, 20, 20)
SLOW, TIMES = "cpu:1", 5  # the device that is slowed, and how many times

Rows = dict[str, np.ndarray]


class Slowed(nn.Module):
    """A network that does its work five times over on one of the devices.

    `MODELFLEET_DEVICE` says which device a worker is for.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """What the network gives."""
        for _ in range(TIMES - 1 if os.environ.get("MODELFLEET_DEVICE") == SLOW else 0):
            self.net(x)
        return self.net(x)


def network() -> nn.Module:
    """A CNN of a few milliseconds per batch; always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 100, CLASSES),
        ).eval()


def crowd(quick: bool) -> Rows:
    """Fifty users with 16 to 256 rows each."""
    random = np.random.default_rng(0)
    sizes = random.integers(2, 5, 6) if quick else random.integers(16, 257, 50)
    return {f"user{number}": _rows(random, size) for number, size in enumerate(sizes)}


def uneven(quick: bool) -> Rows:
    """Two users with a thousand times the rows of the forty others; the large ones first."""
    random = np.random.default_rng(0)
    large = {f"large{number}": _rows(random, 40 if quick else 4000) for number in range(2)}
    return large | {f"small{number}": _rows(random, 4) for number in range(4 if quick else 40)}


def _rows(random: np.random.Generator, count: int) -> np.ndarray:
    return random.standard_normal((count, *IMAGE), dtype=np.float32)


def count(rows: Rows) -> int:
    """How many rows all users have."""
    return sum(map(len, rows.values()))


@dataclass(frozen=True)
class Batch:
    """Up to 32 rows of one user, and where they begin."""

    user: str
    start: int
    rows: np.ndarray


def batches(rows: Rows) -> Iterator[Batch]:
    """Every user's rows in batches."""
    for user, own in rows.items():
        for start in range(0, len(own), BATCH):
            yield Batch(user, start, own[start : start + BATCH])


def answer(net: nn.Module, rows: np.ndarray) -> np.ndarray:
    """What a network says of some rows."""
    with torch.inference_mode():
        return net(torch.from_numpy(rows)).numpy()


def gathered(rows: Rows, answers: Iterable[tuple[str, int, np.ndarray]]) -> Rows:
    """Batches of answers, in whatever order they come, as every user's answers in the order of the rows."""
    found = {user: np.full((len(own), CLASSES), np.nan, np.float32) for user, own in rows.items()}
    for user, start, values in answers:
        found[user][start : start + len(values)] = values
    return found


def by_loop(net: nn.Module, rows: Rows) -> Rows:
    """What the plain loop gives: what all must give."""
    return gathered(rows, ((one.user, one.start, answer(net, one.rows)) for one in batches(rows)))


def check(found: Mapping[str, np.ndarray], rows: Rows) -> None:
    """Refuse answers that are not those of the plain loop; rows may have shared other batches than there."""
    expected = by_loop(network(), rows)
    if list(found) != list(expected):
        raise ValueError(f"answers for {list(found)}; expected those of {list(expected)}")
    for user, values in expected.items():
        np.testing.assert_allclose(np.asarray(found[user]), values, rtol=1e-4, atol=1e-5, err_msg=user)
