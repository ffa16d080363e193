"""Fleets for the tests on the stand-in: the same members on the CPU and on an accelerator."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tests.helpers import all_weights, mlp, toy
from torch import Tensor, nn

import modelfleet as mf

X, Y = toy(40)
IMAGES = np.random.default_rng(0).normal(size=(24, 1, 6, 6)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 7, (24, 5))
LABELS = np.arange(24) % 3


class Attending(nn.Module):
    """Looks up words, attends, and normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Recurrent(nn.Module):
    """An LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


def convolution() -> nn.Module:
    """Convolution, batch normalization and dropout of whole channels."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers)


def wide(width: int = 64) -> nn.Module:
    """A network whose weights are more than its batches."""
    return mlp(width)


def dropping(rate: float = 0.3, width: int = 6) -> nn.Module:
    """A network with dropout."""
    return mlp(width, rate)


DATA: dict[Callable[..., nn.Module], Any] = {
    mlp: (X, Y),
    dropping: (X, Y),
    convolution: (IMAGES, LABELS),
}
"""Models whose kernels are the same on the CPU and on an accelerator."""
ROUNDED: dict[Callable[..., nn.Module], Any] = {Attending: (TOKENS, LABELS), Recurrent: (TOKENS, LABELS)}
"""Models for which torch has other kernels on the CPU, which round otherwise."""


def fleet_on(
    devices: str | Sequence[str], build: Callable[..., nn.Module] = mlp, members: int = 3, **recipe: Any
) -> mf.Fleet:
    """A compiled fleet on some devices, with the weights that it has on any."""
    kwargs = {name: recipe.pop(name) for name in ("width", "rate") if name in recipe}
    fleet = mf.Fleet.build(build, members, seed=3, devices=devices, **kwargs)
    optimizer = {} if "optimizer" in recipe else {"optimizer": "sgd", "momentum": 0.9}
    whole: dict[str, Any] = {"loss": "cross_entropy", "lr": 0.1, **optimizer, **recipe}
    fleet.compile(**whole)
    return fleet


def fitted(devices: str | Sequence[str], data: Any, options: dict[str, Any], **recipe: Any) -> mf.Fleet:
    """A fleet after a fit."""
    fleet = fleet_on(devices, **recipe)
    whole: dict[str, Any] = {"epochs": 2, "batch_size": 8, **options}
    history = fleet.fit(data, progress=False, **whole)
    assert not history.failed
    return fleet


def differing(fleet: mf.Fleet, other: mf.Fleet) -> list[str]:
    """The weights in which two fleets differ, by bits."""
    mine, theirs = all_weights(fleet), all_weights(other)
    return [
        f"{name}: {path} by {float((tensor.cpu().double() - theirs[name][path].cpu().double()).abs().max())}"
        for name, own in mine.items()
        for path, tensor in own.items()
        if not torch.equal(tensor.cpu(), theirs[name][path].cpu())
    ]


def close(fleet: mf.Fleet, other: mf.Fleet) -> None:
    """Raise unless two fleets have the same weights but for rounding."""
    mine, theirs = all_weights(fleet), all_weights(other)
    for name, own in mine.items():
        for path, tensor in own.items():
            torch.testing.assert_close(tensor.cpu(), theirs[name][path].cpu(), rtol=1e-5, atol=1e-6)
