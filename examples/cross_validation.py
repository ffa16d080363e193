"""Cross-validation in one fit: a member per fold, each trained and validated on its own rows."""

import numpy as np
from sklearn.datasets import load_wine
from sklearn.model_selection import StratifiedKFold
from torch import nn

import modelfleet as mf

FOLDS = 8


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


def main() -> None:
    x, y = load_wine(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)

    train, validation = {}, {}
    for number, (rows, held_out) in enumerate(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y)):
        train[f"fold-{number}"] = (x[rows], y[rows])
        validation[f"fold-{number}"] = (x[held_out], y[held_out])

    fleet = mf.Fleet.build(make_net, list(train), seed=0)
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=1e-2)
    history = fleet.fit(mf.each(train), validation=mf.each(validation), epochs=15, progress=False)

    scores = [history[name]["val_accuracy"][-1] for name in fleet]
    for name, score in zip(fleet, scores, strict=True):
        print(f"{name}: {score:.3f}")
    print(f"accuracy over {FOLDS} folds: {np.mean(scores):.3f} ± {np.std(scores):.3f}")


if __name__ == "__main__":
    main()
