"""Models for the tests on GPUs, beside those of the stand-in's tests: everything that draws random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from tests.standin.models import IMAGES, LABELS, TOKENS, Attending, X, Y, convolution, dropping
from torch import Tensor, nn


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them, which cuDNN would draw itself."""

    def __init__(self, layer: Callable[..., nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.recurrent = layer(4, 5, 2, batch_first=True, dropout=0.3)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.recurrent(self.words(tokens))[0][:, -1]))


class Noisy(nn.Module):
    """Draws by torch's own functions."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.bernoulli(torch.full_like(x, 0.7)) + 0.1 * torch.rand_like(x)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "mlp": (dropping, X, Y),
    "cnn": (convolution, IMAGES, LABELS),
    "transformer": (Attending, TOKENS, LABELS),
    "lstm": (Recurrent, TOKENS, LABELS),
}
"""A model, and its data."""

DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.3),
    "channels": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Dropout1d(0.4), nn.Flatten()),
    "alpha": lambda: nn.AlphaDropout(0.3),
    "alpha of channels": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.FeatureAlphaDropout(0.4), nn.Flatten()),
    "rrelu": nn.RReLU,
    "functions": Noisy,
}
"""Layers that draw."""


def drawing(kind: str) -> nn.Module:
    """A network with such a layer."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), DRAWING[kind](), nn.Linear(6, 3))


def typed(data: Any, dtype: torch.dtype) -> Tensor:
    """Data as a tensor: numbers in a dtype, tokens and labels as they are."""
    tensor = torch.from_numpy(data)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
