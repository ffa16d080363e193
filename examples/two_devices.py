"""A fleet over two devices, and one large member over both: the same weights as on one device.

`cpu:0` and `cpu:1` are logical devices, each with a part of the cores; with GPUs write "cuda:0,cuda:1".
"""

import numpy as np
import torch
from torch import nn

import modelfleet as mf
from modelfleet.testing import largest_difference
from modelfleet.types import Strategy

random = np.random.default_rng(0)
X = random.standard_normal((512, 16), dtype=np.float32)
Y = X[:, :4].argmax(1)


def dense(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))


def trained(devices: str, strategy: Strategy = "auto", members: int = 8) -> mf.Fleet:
    fleet = mf.Fleet.build(dense, members, seed=0, devices=devices, width=mf.each([32, 48] * (members // 2)))
    fleet.compile("adam", "cross_entropy", lr=0.01)
    fleet.fit((X, Y), epochs=3, batch_size=32, strategy=strategy, progress=False)
    return fleet


def difference(one: mf.Fleet, other: mf.Fleet) -> float:
    return max(largest_difference(one[name], other[name])[0] for name in one.names)


def main() -> None:
    torch.set_num_threads(1)
    alone = trained("cpu")
    spread = trained("cpu:0,cpu:1", "processes")
    print(spread.plan((X, Y), batch_size=32))
    print(f"8 members over two devices: the weights differ by {difference(alone, spread):.0e}")

    two = trained("cpu", members=2)
    parallel = trained("cpu:0,cpu:1", "data_parallel", members=2)
    print(f"each of 2 members over both devices: the weights differ by {difference(two, parallel):.0e}")


if __name__ == "__main__":
    main()
