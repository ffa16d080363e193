"""Fifty variants of a network at once: each with its own learning rate, stopped when it gets no better."""

import numpy as np
from sklearn.datasets import make_moons
from torch import nn

import modelfleet as mf


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def main() -> None:
    x, y = make_moons(600, noise=0.25, random_state=0)
    train, validation = (x[:400], y[:400]), (x[400:], y[400:])

    fleet = mf.Fleet.build(make_net, 50, seed=0)
    rates = np.geomspace(1e-4, 1e-1, 50)
    fleet.compile("adamw", "cross_entropy", metrics=["accuracy"], lr=mf.each(rates))
    print(fleet.plan(train))

    stop = mf.EarlyStopping("val_loss", patience=5, restore_best=True)
    history = fleet.fit(train, validation=validation, epochs=20, callbacks=[stop], progress=False)

    print(f"{len(history.stopped)} of {len(fleet)} stopped early")
    for name, loss in history.ranking("val_loss")[:3]:
        print(f"member {name}: lr {rates[int(name)]:.2g}, val_loss {loss:.3f}")
    best = fleet[history.best("val_loss")]
    print(f"the best is a plain {type(best).__name__}")


if __name__ == "__main__":
    main()
