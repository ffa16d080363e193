"""The work of the contests of chains: two equal stages, their data, and how they are trained by hand."""

import numpy as np
import torch
from torch import Tensor, nn

WIDTH, CLASSES = 1024, 10
BATCH, BATCHES = 512, 8  # rows of a batch, and batches of a round
MICRO_BATCHES = 8
RATE = 1e-3


def width(quick: bool) -> int:
    """The width of all layers."""
    return 16 if quick else WIDTH


def batches(quick: bool) -> int:
    """The batches of a round."""
    return 2 if quick else BATCHES


def stages(quick: bool) -> list[nn.Module]:
    """Two stages that take about as long; always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = width(quick)
        blocks = [nn.Sequential(nn.Linear(size, size), nn.ReLU()) for _ in range(8)]
        return [nn.Sequential(*blocks[:4]), nn.Sequential(*blocks[4:], nn.Linear(size, CLASSES))]


def dataset(quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rows and labels of a round."""
    random = np.random.default_rng(0)
    rows = BATCH * batches(quick)
    return random.standard_normal((rows, width(quick)), dtype=np.float32), random.integers(0, CLASSES, rows)


def optimizer_of(stage: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a stage."""
    return torch.optim.Adam(stage.parameters(), lr=RATE)


def train_step(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], x: Tensor, y: Tensor) -> float:
    """Train the stages in turn on one batch, as a plain loop does."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    for model in models:
        x = model(x)
    loss = nn.functional.cross_entropy(x, y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()
