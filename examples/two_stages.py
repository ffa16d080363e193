"""A model cut into two stages of even time, each on its own device, trained as one and compared with the undivided
model.

    python examples/two_stages.py
"""

import copy

import numpy as np
import torch
from torch import nn

import modelfleet as mf


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(torch.relu(self.wide(self.norm(x)))))


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 48), *(Block(48) for _ in range(6)), nn.Linear(48, 3))
    alone = copy.deepcopy(net)
    random = np.random.default_rng(0)
    x = random.standard_normal((512, 20)).astype(np.float32)
    y = x[:, :3].argmax(1)

    cut = mf.split(net, 2, x[:16])
    print(cut)
    chain = mf.Chain(cut, devices="cpu:0,cpu:1")  # "cuda:0,cuda:1" on two GPUs
    chain.compile("adamw", "cross_entropy", metrics=["accuracy"], lr=1e-3)
    history = chain.fit((x, y), epochs=4, batch_size=64, progress=False)
    print(chain.last_plan)
    print(f"accuracy {history['chain']['accuracy'][-1]:.2f} on two devices")

    fleet = mf.Fleet([alone])
    fleet.compile("adamw", "cross_entropy", lr=1e-3)
    fleet.fit((x, y), epochs=4, batch_size=64, progress=False)
    with torch.no_grad():
        rows = torch.from_numpy(x)
        difference = (net.eval()(rows) - alone.eval()(rows)).abs().max().item()
    print(f"the undivided model differs by {difference:.0e}")


if __name__ == "__main__":
    main()
