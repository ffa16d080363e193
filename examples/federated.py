"""Eight clinics train one model, and none of them gives its patients' data away.

Every clinic sees patients of two kinds only, and has its own member. After each epoch the members average their
weights (federated averaging). Then the clinics learn alone, for comparison.
"""

import numpy as np
import torch
from torch import nn

import modelfleet as mf

CLINICS, KINDS, ROWS = 8, 4, 150


def make_net() -> nn.Module:
    """Return the model, with the same weights at every clinic."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, KINDS))


def patients(rows: int, kinds: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return measurements of patients of some kinds, and the kind of each."""
    rng = np.random.default_rng(seed)
    y = rng.choice(kinds, size=rows)
    x = rng.normal(size=(rows, 10)) + 1.5 * np.eye(10)[y]
    return x.astype("float32"), y


def main() -> None:
    """Train together and alone, and compare on patients of all kinds."""
    names = [f"clinic-{number}" for number in range(CLINICS)]
    own = {
        name: patients(ROWS + 10 * number, [number % KINDS, (number + 1) % KINDS], seed=number)
        for number, name in enumerate(names)
    }
    x, y = patients(1000, list(range(KINDS)), seed=99)
    for what, exchange in {"alone": None, "together": mf.Average(every=1, weights="rows")}.items():
        fleet = mf.Fleet.build(make_net, names, seed=0)
        fleet.compile("sgd", "cross_entropy", lr=0.1)
        fleet.fit(mf.each(own), epochs=10, batch_size=16, exchange=exchange, progress=False)
        right = [(output.argmax(1) == y).mean() for output in fleet.predict(x).values()]
        print(f"{what}: accuracy {np.mean(right):.2f}, the worst clinic {min(right):.2f}")


if __name__ == "__main__":
    main()
