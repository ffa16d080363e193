"""Fifty heads on one encoder, trained as a graph: which target is easy to read from what the encoder knows?"""

import numpy as np
import torch
from torch import nn

import modelfleet as mf

ROWS, HEADS = 1024, 50


def make_data() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows of 16 numbers, and for every head a target with more noise than the one before."""
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, 16), dtype=np.float32)
    clean = np.tanh(x @ random.standard_normal((16, HEADS), dtype=np.float32))
    noise = random.standard_normal((ROWS, HEADS), dtype=np.float32) * np.linspace(0, 2, HEADS, dtype=np.float32)
    y = clean + noise
    return x, {f"target-{number:02}": y[:, number : number + 1] for number in range(HEADS)}


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))


def main() -> None:
    torch.manual_seed(0)
    x, targets = make_data()
    encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    heads = mf.Fleet.build(head, targets, seed=0)
    heads.compile("adam", "mse", metrics=["r2"], lr=3e-3)

    graph = mf.Graph({"encoder": encoder, "heads": heads}, [("encoder", "heads")], outputs="heads")
    graph.compile("adam", lr=3e-3)
    print(graph.plan((x, targets), batch_size=64))
    history = graph.fit((x, targets), epochs=15, batch_size=64, progress=False)

    loss = history["graph"]["loss"]
    print(f"the sum of {len(heads)} losses: {loss[0]:.1f} → {loss[-1]:.1f}")
    best, worst = (history[name]["r2"][-1] for name in ("target-00", "target-49"))
    print(f"R² without noise {best:.2f}, with the most {worst:.2f}")
    print(f"a head is a plain {type(graph['heads']['target-00']).__name__}")


if __name__ == "__main__":
    main()
