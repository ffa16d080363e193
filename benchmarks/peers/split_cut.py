"""A model cut in two by `mf.split`, or at the best of all cuts: the seconds of the slower stage.

`mf.split` chooses once, before the rounds. In every round, all cuts are measured in turns.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.entrants import FLEET
from benchmarks.peers import Round, compete_in_cases
from modelfleet.graph.split import cut_times

ROWS = 64


class Residual(nn.Module):
    """A block of a ResNet, which may have more channels than the one before."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Conv2d(before, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The input, in as many channels, and what two convolutions make of it."""
        return torch.relu(self.skip(x) + self.second(torch.relu(self.norm(self.first(x)))))


def mlp() -> tuple[nn.Module, Tensor]:
    """Layers whose cost shrinks, so that the middle layer is not the middle of the time."""
    widths = [512, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32]
    layers = [nn.Sequential(nn.Linear(one, other), nn.ReLU()) for one, other in pairwise(widths)]
    return nn.Sequential(*layers), torch.randn(ROWS, widths[0])


def resnet() -> tuple[nn.Module, Tensor]:
    """Few channels on large pictures, then many on small ones."""
    blocks = [Residual(3, 8), Residual(8, 8), nn.MaxPool2d(2), Residual(8, 16), Residual(16, 16), nn.MaxPool2d(2)]
    ends = [Residual(16, 32), Residual(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*blocks, *ends), torch.randn(ROWS // 4, 3, 32, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    """Equal layers between an embedding that costs little and a head that costs much."""
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(6)]
    return nn.Sequential(nn.Embedding(1000, 64), *layers, nn.Linear(64, 1000)), torch.randint(0, 1000, (8, 32))


def tiny() -> tuple[nn.Module, Tensor]:
    """What a smoke test cuts."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)


MODELS = {"mlp": mlp, "resnet": resnet, "transformer": transformer}


def prepare(who: str, quick: bool) -> Callable[[str], Round]:
    torch.set_num_threads(1)
    chosen: dict[str, int] = {}

    def measure(case: str) -> Round:
        torch.manual_seed(0)
        model, example = tiny() if quick else MODELS[case]()
        if case not in chosen:
            chosen[case] = cut_times(model, example).chosen
        slower = [max(pair) for pair in cut_times(model, example).seconds]
        best = min(range(len(slower)), key=slower.__getitem__)
        if who == FLEET:
            return Round(1, 0.0, slower[chosen[case]], {"cuts": len(slower), "cut": chosen[case] + 1})
        return Round(1, 0.0, slower[best], {"best cut": best + 1})

    return measure


if __name__ == "__main__":
    compete_in_cases(prepare)
