"""Models, data, and comparisons of a graph with the undivided model, for all tests of graphs."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import modelfleet as mf

SEED = 5
RECIPE: dict[str, Any] = {"optimizer": "adam", "loss": "cross_entropy", "lr": 0.01}
FIT: dict[str, Any] = {"epochs": 4, "batch_size": 8}  # of 40 rows: 20 steps
TWO, THREE = ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2"]
HYBRID = [["cpu:0", "cpu:1"], ["cpu:2"], ["cpu:3", "cpu:4", "cpu:5"]]

Rows = tuple[Tensor, Tensor]


def rows(count: int = 40, width: int = 4, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Rows:
    """Rows of numbers, and one of three classes for each. Tensors, as float64 arrays become float32."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, width))
    classes = np.argmax(x[:, :3] + 0.1 * generator.normal(size=(count, 3)), axis=1)
    return torch.from_numpy(x).to(dtype), torch.from_numpy(classes)


def stages(*, dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Module]:
    """Three stages of an MLP, from four numbers to three classes."""
    torch.manual_seed(seed)
    found: list[nn.Module] = [
        nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(dropout)),
        nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(6, 3),
    ]
    return [stage.to(dtype) for stage in found]


def chain_of(
    models: Mapping[str, nn.Module] | Sequence[nn.Module] | None = None,
    devices: Any = None,
    *,
    seed: int = SEED,
    **recipe: Any,
) -> mf.Chain:
    """A compiled chain: three stages on three devices, unless said otherwise."""
    chain = mf.Chain(stages() if models is None else models, devices=devices or THREE, seed=seed)
    chain.compile(**{**RECIPE, **recipe})
    return chain


def fit(graph: mf.Graph, data: Any, **options: Any) -> mf.History:
    """`graph.fit` in silence, with the options of `FIT`."""
    return graph.fit(data, progress=False, **{**FIT, **options})


def weights(model: mf.Graph | nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters and buffers of a model, or of all nodes of a graph."""
    if isinstance(model, nn.Module):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    parts = {f"{node}.": model[node].state_dict() for node in model.names}
    return {f"{node}{name}": t.detach().clone() for node, own in parts.items() for name, t in own.items()}


def undivided(model: nn.Module, data: Any, *, seed: int = SEED, recipe: Any = None, **options: Any) -> mf.History:
    """Train a model as the only member of a fleet, as the tests do. Return the history."""
    fleet = mf.Fleet([model], seed=seed)
    fleet.compile(**{**RECIPE, **(recipe or {})})
    return fleet.fit(data, progress=False, **{**FIT, **options})


def tolerances(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """1e-10 for float64, else 1e-4 of the number."""
    if all(tensor.dtype == torch.float64 for tensor in tensors.values() if tensor.is_floating_point()):
        return {"rtol": 1e-10, "atol": 1e-10}
    return {"rtol": 1e-4, "atol": 1e-5}


def assert_same_weights(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], *, tolerance: float | None = None
) -> None:
    """Both have the same names, and the same numbers within rounding."""
    wanted = tolerances(left) if tolerance is None else {"rtol": tolerance, "atol": tolerance}
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=wanted["rtol"], atol=wanted["atol"], msg=name)


def assert_same_history(graph: mf.History, fleet: mf.History, tolerance: float) -> None:
    """All losses and metrics of a graph are those of the only member of a fleet."""
    (own,), (other,) = graph.to_dict()["metrics"].values(), fleet.to_dict()["metrics"].values()
    assert own.keys() == other.keys()
    for name, series in own.items():
        np.testing.assert_allclose(series, other[name], rtol=tolerance, atol=tolerance, err_msg=name)


def assert_as_undivided(
    models: Sequence[nn.Module],
    data: Any,
    *,
    devices: Any = None,
    recipe: Any = None,
    options: Any = None,
    shared: Any = None,
    tolerance: float | None = None,
    whole: nn.Module | None = None,
) -> mf.Chain:
    """Train a chain, and the same models as one; return the chain. Losses, metrics and weights are the same.

    Args:
        models: The stages.
        data: The data.
        devices: The devices of the chain; three by default.
        recipe: Arguments of both `compile`s, beside those of `RECIPE`. `each(...)` counts for the chain only.
        options: Arguments of the chain's `fit` alone.
        shared: Arguments of both `fit`s, beside those of `FIT`.
        tolerance: Of losses and weights, instead of the usual one.
        whole: The undivided model; by default the stages in a row.
    """
    whole = nn.Sequential(*copy.deepcopy(list(models))) if whole is None else whole
    chain = chain_of(models, devices, **(recipe or {}))
    before = undivided(whole, data, recipe=recipe, **(shared or {}))
    after = fit(chain, data, **(shared or {}), **(options or {}))
    assert_same_history(after, before, tolerances(weights(chain))["rtol"] if tolerance is None else tolerance)
    assert_same_weights(weights(chain), weights(whole), tolerance=tolerance)
    return chain
