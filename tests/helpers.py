"""Small models, small data and exact comparisons, for tests of whole fleets."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import modelfleet as mf

Arrays = tuple[np.ndarray, np.ndarray]


def mlp(width: int = 6, dropout: float = 0.0) -> nn.Sequential:
    """Four numbers in, three classes out."""
    layers = [
        nn.Linear(4, width),
        nn.Tanh(),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(width, 3),
    ]
    return nn.Sequential(*layers)


def toy(rows: int = 20, seed: int = 0) -> Arrays:
    """Rows of four numbers, and a class for each that can be learnt from them."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3] + 0.1 * generator.normal(size=(rows, 3)), axis=1)


def fleet_of(members: int | list[str] = 3, *, seed: int = 0, dropout: float = 0.0, **recipe: Any) -> mf.Fleet:
    """A compiled fleet of `mlp`s: SGD on cross-entropy, unless `recipe` says otherwise."""
    fleet = mf.Fleet.build(mlp, members, seed=seed, dropout=dropout)
    whole: dict[str, Any] = {"optimizer": "sgd", "loss": "cross_entropy", "lr": 0.1, **recipe}
    fleet.compile(**whole)
    return fleet


def fit(fleet: mf.Fleet, data: Any, **options: Any) -> mf.History:
    """`fleet.fit` in silence."""
    return fleet.fit(data, progress=False, **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def all_weights(fleet: mf.Fleet) -> dict[str, dict[str, Tensor]]:
    """A copy of every member's weights."""
    return {name: weights(fleet[name]) for name in fleet.names}


def equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two trees of weights are the same, bit for bit."""
    if left.keys() != right.keys():
        return False
    return all(
        equal(value, right[name]) if isinstance(value, Mapping) else torch.equal(value, right[name])
        for name, value in left.items()
    )


def close(left: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float = 1e-5) -> bool:
    """Whether two models' weights are the same within rounding."""
    return left.keys() == right.keys() and all(
        torch.allclose(value, right[name], rtol=tolerance, atol=tolerance) for name, value in left.items()
    )


def threads() -> int:
    """How many threads there are, but for those that tidy up after the last work and end by themselves."""
    tidying = ("modelfleet-idle", "modelfleet-malloc")
    return sum(thread.name not in tidying for thread in threading.enumerate())
