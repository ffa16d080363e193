"""One torch model: a fleet of one against the loop that a person would write."""

from collections.abc import Callable
from dataclasses import replace

import torch

import modelfleet as mf
from benchmarks.contests import FLEET
from benchmarks.nets import make_net
from benchmarks.peers import Round, compete
from benchmarks.peers.torch_loop import trainees
from benchmarks.rows import ROWS, datasets

NETS = {"mlp": "mlp-64", "cnn": "cnn", "lstm": "lstm", "transformer": "transformer"}


def prepare(net: str, who: str, quick: bool) -> Callable[[], Round]:
    row = replace(ROWS[NETS[net]], members=1, alone=1)
    row = row.quick() if quick else replace(row, examples=64 * row.batch, epochs=4)
    if who != FLEET:
        (trainee,) = trainees(row, range(1))

        def loop() -> Round:
            losses = [trainee.train_epoch(row.batch)[0] for _ in range(row.epochs)]
            return Round(row.steps * row.epochs, losses[-1])

        loop()
        return loop
    torch.manual_seed(0)
    fleet = mf.Fleet([make_net(row)])
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=float(row.rates()[0]))

    def fit() -> Round:
        history = fleet.fit(datasets(row)[0], epochs=row.epochs, batch_size=row.batch, progress=False)
        return Round(row.steps * row.epochs, history["0"]["loss"][-1])

    fit()
    return fit


if __name__ == "__main__":
    compete(prepare)
