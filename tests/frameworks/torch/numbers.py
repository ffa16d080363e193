"""Fleets whose members differ in numbers, beside the same members alone, in float64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.each import Each

Make = Callable[[Any], nn.Module]
ROWS, CLASSES = 22, 3


def rows(
    features: Sequence[int] = (4,), seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Rows, and a class for each. With batches of eight, the last one is smaller."""
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(ROWS, *features)), generator.integers(0, CLASSES, ROWS)
    return torch.tensor(x, dtype=dtype), torch.tensor(y)


def build(make: Make, values: Sequence[Any], dtype: torch.dtype = torch.float64) -> dict[str, nn.Module]:
    """One model for each value, with weights of its own."""
    models = {}
    for place, value in enumerate(values):
        torch.manual_seed(place)
        models[f"m{place}"] = make(value).to(dtype)
    return models


def compiled(models: Mapping[str, nn.Module], only: str | None = None, **recipe: Any) -> mf.Fleet:
    """A fleet of these models, or of one of them with its own part of the recipe."""
    chosen = {name: model for name, model in models.items() if only in (None, name)}
    own: dict[str, Any] = {key: _only(value, list(models), only) for key, value in recipe.items()}
    own.setdefault("lr", 0.01)
    fleet = mf.Fleet(chosen)
    fleet.compile(own.pop("optimizer", "adam"), **own)
    return fleet


def _only(value: Any, names: list[str], only: str | None) -> Any:
    if not isinstance(value, Each) or only is None:
        return value
    return list(value.values)[names.index(only)]


def check(
    make: Make,
    values: Sequence[Any],
    *,
    features: Sequence[int] = (4,),
    bound: float = 1e-10,
    dtype: torch.dtype = torch.float64,
    data: Any = None,
    **recipe: Any,
) -> mf.Fleet:
    """Train members fused in one lane, evaluate and predict, and compare with each of them alone."""
    recipe = recipe if {"loss", "objective"} & recipe.keys() else {"loss": "cross_entropy", **recipe}
    data = rows(features, dtype=dtype) if data is None else data
    fleet = compiled(build(make, values, dtype), **recipe)
    plan = fleet.plan(data, batch_size=8)
    assert len(plan.lanes) == 1, [lane.reason for lane in plan.lanes]
    compare(fleet, lambda name: compiled(build(make, values, dtype), name, **recipe), data, bound)
    return fleet


def compare(fleet: mf.Fleet, alone: Callable[[str], mf.Fleet], data: Any, bound: float = 1e-10) -> None:
    """Train a fleet twice, and every member alone, and compare all that they give."""
    options: dict[str, Any] = {"validation": data, "batch_size": 8, "progress": False}
    histories = [fleet.fit(data, epochs=epochs, **options) for epochs in (2, 1)]
    evaluated, predicted = fleet.evaluate(data, batch_size=8), fleet.predict(data[0], batch_size=8)
    for name in fleet.names:
        single = alone(name)
        own = [single.fit(data, epochs=epochs, **options) for epochs in (2, 1)]
        for one, other in zip(histories, own, strict=True):
            assert one[name].keys() == other[name].keys()
            for metric, values in one[name].items():
                near(values, other[name][metric], bound, f"{metric} of {name}")
        theirs = single[name].state_dict()
        for key, tensor in fleet[name].state_dict().items():
            near(tensor, theirs[key], bound, f"{key} of {name}")
        for metric, value in single.evaluate(data, batch_size=8)[name].items():
            near(evaluated[name][metric], value, bound, f"evaluated {metric} of {name}")
        near(predicted[name], single.predict(data[0], batch_size=8)[name], bound, f"outputs of {name}")


def near(one: Any, other: Any, bound: float, what: str) -> None:
    """Check that two arrays agree."""
    one, other = (
        np.asarray(value.detach() if isinstance(value, Tensor) else value, float) for value in (one, other)
    )
    assert np.array_equal(np.isnan(one), np.isnan(other)), what
    off = np.abs(np.nan_to_num(one - other)).max(initial=0)
    assert off <= bound, f"{what} is off by {off}"
