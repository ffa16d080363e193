"""For tests of one's own: train one member alone, the plain way, and compare.

    expected = testing.alone(fleet["3"], "3", (x, y), optimizer="adam", loss="mse", lr=1e-3, epochs=2)
    fleet.fit((x, y), epochs=2)
    difference, where = testing.largest_difference(fleet["3"], expected)

A module for each framework, named after it, has `alone` for its models, and `weights`: {name: array}.
"""

from collections.abc import Callable, Collection
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from modelfleet import frameworks


def alone(
    model: Any,
    name: str,
    data: Any,
    *,
    optimizer: Any,
    loss: Any = None,
    objective: Callable[[Any, Any], Any] | None = None,
    seed: int = 0,
    epochs: int = 1,
    batch_size: int = 32,
    shuffle: bool = True,
    clip_norm: float | None = None,
    precision: str = "float32",
    schedule: Callable[[Any], Any] | None = None,
    schedule_per: str = "epoch",
    **hyperparameters: Any,
) -> Any:
    """A copy of `model`, trained as the member `name` of a fleet would be, by a plain loop of its framework.

    The arguments are those of `Fleet` (seed), `compile` and `fit`, with one value where a fleet may have
    `each(...)`. Nothing is fused or traced here, and the optimizers, schedulers, clipping and losses are the
    framework's own. Only the member's random streams are modelfleet's: the order of its rows and its dropout.

    schedule: what makes a scheduler of an optimizer.
    schedule_per: whether it steps per "epoch" or per "step".
    """
    return _reference(model).alone(
        model,
        name,
        data,
        optimizer=optimizer,
        loss=loss,
        objective=objective,
        seed=seed,
        epochs=epochs,
        batch_size=batch_size,
        shuffle=shuffle,
        clip_norm=clip_norm,
        precision=precision,
        schedule=schedule,
        schedule_per=schedule_per,
        **hyperparameters,
    )


def largest_difference(model: Any, other: Any, *, ignoring: Collection[str] = ()) -> tuple[float, str]:
    """How far the weights and buffers of two models are apart at most, and the name of that tensor.

    Relative to the largest magnitude within each tensor. `ignoring` names tensors to leave out.
    """
    weights = _reference(model).weights
    first, second = weights(model), weights(other)
    if first.keys() != second.keys():
        raise ValueError(f"the models have different weights: {sorted(first.keys() ^ second.keys())}.")
    strangers = set(ignoring) - first.keys()
    if strangers:
        raise ValueError(f"there is no {sorted(strangers)[0]!r} to ignore. Weights: {', '.join(first)}.")
    worst = (0.0, "")
    for name in first:
        a, b = first[name].astype(np.float64), second[name].astype(np.float64)
        if name in ignoring or not a.size:
            continue
        difference = float(np.abs(a - b).max()) / (float(np.abs(b).max()) or 1.0)
        worst = max(worst, (difference if np.isfinite(difference) else np.inf, name))
    return worst


def _reference(model: Any) -> ModuleType:
    return import_module(f"modelfleet.testing.{frameworks.adapter_of(model, 'model').NAME}")
