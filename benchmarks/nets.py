"""The networks of the rows, as plain torch modules."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.rows import RECURRENT_INPUT, TOKENS, VOCABULARY, Row

WIDTH = 32


class Transformer(nn.Module):
    """Two encoder layers over embedded tokens and learned positions, then the mean over the tokens."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
                for _ in range(2)
            )
        )
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `(batch, class)` of `tokens` `(batch, token)`."""
        return self.head(self.layers(self.embedding(tokens) + self.positions).mean(1))


class Recurrent(nn.Module):
    """An LSTM whose last step is classified."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(RECURRENT_INPUT, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of `x` `(batch, step, feature)`."""
        return self.head(self.lstm(x)[0][:, -1])


def make_net(row: Row) -> nn.Module:
    """A fresh network of `row`, its weights drawn from torch's global generator."""
    if row.net == "transformer":
        return Transformer(row.classes)
    if row.net == "lstm":
        return Recurrent(row.classes)
    if row.net == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, row.classes),
        )
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(row.widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
