"""Torch and Keras models in one fleet: two groups, a lone CNN and two Keras models, fitted in one call.

One member's data fail half-way; the others train on unchanged.
"""

import os
from collections.abc import Iterator

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import torch
from torch import nn

import modelfleet as mf

random = np.random.default_rng(0)
X = random.standard_normal((320, 16), dtype=np.float32)
Y = X[:, :4].argmax(1)


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))


def on_jax(rate: float) -> keras.Model:
    model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(24, "relu"), keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class BreaksOff:
    """A loader whose disk fails in the middle of the first epoch."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield X[:32], Y[:32]
        raise OSError("the disk is gone")


def main() -> None:
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)
    torch_models = {
        **{f"narrow-{number}": dense(16) for number in range(3)},
        **{f"wide-{number}": dense(64) for number in range(2)},
        "convolutional": convolutional(),
    }
    fleet = mf.Fleet({**torch_models, "keras-slow": on_jax(1e-3), "keras-fast": on_jax(1e-2)})
    fleet.compile("adam", "cross_entropy", lr=1e-2, members=list(torch_models))
    batches = [(X[row : row + 32], Y[row : row + 32]) for row in range(0, 320, 32)]
    data = mf.each({name: BreaksOff() if name == "narrow-1" else batches for name in fleet.names})
    history = fleet.fit(data, epochs=3, progress=False)
    print(fleet.plan(data))
    for name in fleet.names:
        if name in history.failed:
            print(f"{name}: {history.failed[name].reason}")
        else:
            print(f"{name}: loss {history[name]['loss'][0]:.3f} → {history[name]['loss'][-1]:.3f}")


if __name__ == "__main__":
    main()
