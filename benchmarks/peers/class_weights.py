"""64 MLPs whose loss weighs the classes by a tensor of the user's, or does not."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import modelfleet as mf
from benchmarks.contests import FLEET
from benchmarks.nets import make_net
from benchmarks.peers import Round, compete
from benchmarks.rows import MLP_64, datasets


def prepare(who: str, quick: bool) -> Callable[[], Round]:
    row = MLP_64.quick() if quick else MLP_64
    weights = torch.linspace(0.5, 1.5, row.classes)

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weights)

    fleet = mf.Fleet.build(partial(make_net, row), row.members, seed=0)
    fleet.compile("adam", weighted if who == FLEET else F.cross_entropy, lr=mf.each(row.rates().tolist()))

    def train_round() -> Round:
        history = fleet.fit(datasets(row)[0], epochs=row.epochs, batch_size=row.batch, progress=False)
        losses = [history[name]["loss"][-1] for name in fleet.names]
        return Round(row.members * row.steps * row.epochs, sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
