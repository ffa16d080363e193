"""modelfleet: a fleet of MLPs on one device or on two, one thread each."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import modelfleet as mf
from benchmarks.peers import Round, compete

MEMBERS, BATCH, STEPS, EPOCHS = 64, 64, 32, 10
WIDTHS = (64, 128, 128, 10)


def net(width: int) -> nn.Module:
    first, *_, last = WIDTHS
    return nn.Sequential(
        nn.Linear(first, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, last)
    )


def prepare(devices: str, strategy: str, quick: bool) -> Callable[[], Round]:
    torch.set_num_threads(1)
    members, steps, epochs = (4, 2, 1) if quick else (MEMBERS, STEPS, EPOCHS)
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH * steps, WIDTHS[0]), dtype=np.float32)
    y = random.integers(0, WIDTHS[-1], BATCH * steps)
    fleet = mf.Fleet.build(net, members, seed=0, devices=devices, width=8 if quick else WIDTHS[1])
    fleet.compile("adam", "cross_entropy", lr=1e-3)

    def train_round() -> Round:
        history = fleet.fit((x, y), epochs=epochs, batch_size=BATCH, strategy=strategy, progress=False)
        if history.failed:
            raise RuntimeError(f"members failed: {history.failed}")
        losses = [history[name]["loss"][-1] for name in fleet.names]
        return Round(members * steps * epochs, sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
