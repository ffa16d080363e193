"""The work of the contest of sharded fleets: variants of one network on shared data, and how they are trained by
hand."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEMBERS, BATCH, STEPS, EPOCHS = 64, 64, 32, 10
BY_HAND = 16  # members that are trained one by one in a round, an epoch each: each further one costs the same
WIDTHS = (64, 128, 128, 10)

Data = tuple[np.ndarray, np.ndarray]


def net(width: int) -> nn.Module:
    """An MLP with two hidden layers."""
    first, *_, last = WIDTHS
    return nn.Sequential(
        nn.Linear(first, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, last)
    )


def width(quick: bool) -> int:
    """Of the hidden layers."""
    return 8 if quick else WIDTHS[1]


def steps(quick: bool) -> int:
    """The batches of an epoch."""
    return 2 if quick else STEPS


def by_hand(quick: bool) -> range:
    """The members that the one-by-one peers train in a round."""
    return range(4 if quick else BY_HAND)


def dataset(quick: bool) -> Data:
    """The data that all members are trained on."""
    random = np.random.default_rng(0)
    rows = BATCH * steps(quick)
    return random.standard_normal((rows, WIDTHS[0]), dtype=np.float32), random.integers(0, WIDTHS[-1], rows)


class Variant:
    """A member as people write it: a module and its optimizer."""

    def __init__(self, number: int, quick: bool) -> None:
        torch.manual_seed(number)
        self.model = net(width(quick))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def train_epoch(self, x: Tensor, y: Tensor) -> float:
        """One shuffled epoch; its mean loss."""
        total = torch.zeros(())
        for rows in torch.randperm(len(x)).split(BATCH):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x[rows]), y[rows])
            loss.backward()
            self.optimizer.step()
            total += loss.detach() * len(rows)
        return total.item() / len(x)
