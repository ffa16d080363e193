"""modelfleet: a fleet of MLPs on one device or on two, one thread each."""

from collections.abc import Callable

import torch

import modelfleet as mf
from benchmarks.peers import Round, compete
from benchmarks.variants import BATCH, EPOCHS, MEMBERS, dataset, net, steps, width
from modelfleet.types import Strategy


def prepare(devices: str, strategy: Strategy, quick: bool) -> Callable[[], Round]:
    torch.set_num_threads(1)
    members, epochs = (4, 1) if quick else (MEMBERS, EPOCHS)
    data = dataset(quick)
    fleet = mf.Fleet.build(net, members, seed=0, devices=devices, width=width(quick))
    fleet.compile("adam", "cross_entropy", lr=1e-3)

    def train_round() -> Round:
        history = fleet.fit(data, epochs=epochs, batch_size=BATCH, strategy=strategy, progress=False)
        if history.failed:
            raise RuntimeError(f"members failed: {history.failed}")
        losses = [history[name]["loss"][-1] for name in fleet.names]
        return Round(members * steps(quick) * epochs, sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
