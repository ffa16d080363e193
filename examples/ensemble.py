"""Eight networks on two devices as one model: mean, vote and deviation, and an answer without a broken member.

`cpu:0` and `cpu:1` are logical devices, each with a part of the cores; with GPUs write "cuda:0,cuda:1".
"""

import numpy as np
import torch
from torch import nn

import modelfleet as mf

random = np.random.default_rng(0)
X = random.standard_normal((600, 16), dtype=np.float32)
Y = (X[:, :4] + 0.5 * random.standard_normal((600, 4))).argmax(1)
TRAIN, TEST = slice(0, 200), slice(200, None)


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))


def diverged() -> nn.Module:
    net = dense(32)
    nn.init.constant_(next(net.parameters()), float("nan"))
    return net


def main() -> None:
    torch.set_num_threads(1)
    fleet = mf.Fleet.build(dense, 8, seed=0, devices="cpu:0,cpu:1", width=mf.each([32, 48] * 4))
    fleet.compile("adam", "cross_entropy", lr=0.01, metrics=["accuracy"])
    fleet.fit((X[TRAIN], Y[TRAIN]), epochs=10, progress=False)
    alone = [values["accuracy"] for values in fleet.evaluate((X[TEST], Y[TEST])).values()]
    print(f"a member alone: accuracy {np.mean(alone):.3f} on average")
    for combine in ("mean", "vote"):
        values = mf.Ensemble(fleet, combine).evaluate((X[TEST], Y[TEST]))
        print(f"the {combine} of eight: accuracy {values['accuracy']:.3f}")

    ensemble = mf.Ensemble(fleet)
    here = ensemble.predict(X)
    elsewhere, deviation = ensemble.predict(X, std=True, strategy="processes")
    print(f"combined in two processes: differs by {abs(here - elsewhere).max():.0e}")
    print(f"the members' logits deviate by {deviation.mean():.2f}")

    fleet.add("broken", diverged())
    answer = mf.Ensemble(fleet).predict(X, quorum=8)
    print(f"missing: {answer.missing}; the same answer: {np.allclose(answer.output, here, atol=1e-5)}")


if __name__ == "__main__":
    main()
