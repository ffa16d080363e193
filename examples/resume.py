"""A run that is cut short and resumed: running the same script again ends with the same weights."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import modelfleet as mf
from modelfleet.callbacks import Run

EPOCHS = 6


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def make_fleet() -> mf.Fleet:
    fleet = mf.Fleet.build(make_net, 8, seed=0)
    fleet.compile("adam", "mse", lr=mf.each(np.geomspace(1e-3, 1e-1, 8)), schedule="cosine")
    return fleet


class PowerCut(mf.Callback):
    """Cuts the run short in its fourth epoch, as a crash or a kill would."""

    def __init__(self, *, comes: bool) -> None:
        self.comes = comes

    def on_epoch_end(self, run: Run) -> None:
        """Raise before the checkpoint of this epoch is written."""
        if self.comes and run.epoch == 4:
            raise KeyboardInterrupt


def main() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 4), dtype=np.float32)
    data = x, x.sum(1, keepdims=True)

    unbroken = make_fleet()
    unbroken.fit(data, epochs=EPOCHS, progress=False)

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = mf.Checkpoint(Path(folder) / "run")
        try:
            make_fleet().fit(data, epochs=EPOCHS, callbacks=[checkpoint, PowerCut(comes=True)], progress=False)
        except KeyboardInterrupt:
            print("cut short in its fourth epoch")
        fleet = make_fleet()  # as a new process would make it
        history = fleet.fit(data, epochs=EPOCHS, callbacks=[checkpoint, PowerCut(comes=False)], progress=False)
        print(f"went on to epoch {history.epochs}")

    same = all(
        torch.equal(a, b)
        for name in fleet
        for a, b in zip(fleet[name].parameters(), unbroken[name].parameters(), strict=True)
    )
    print(f"the same weights as the unbroken run: {same}")


if __name__ == "__main__":
    main()
