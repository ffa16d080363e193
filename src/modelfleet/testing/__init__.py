"""Train one member alone with a plain loop, and compare, in your own tests.

    expected = testing.alone(fleet["3"], "3", (x, y), optimizer="adam", loss="mse", lr=1e-3, epochs=2)
    fleet.fit((x, y), epochs=2)
    difference, where = testing.largest_difference(fleet["3"], expected)

The module of each framework, named after it, has `alone` for its models, and `weights`, which returns {name:
array}.
"""

from collections.abc import Callable, Collection
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import numpy as np

from modelfleet import frameworks
from modelfleet.members import member_seed
from modelfleet.testing.reference import Training
from modelfleet.types import Data, LossLike, Model, OptimizerLike, Precision, ScheduleLike, Tree


def alone(
    model: Model,
    name: str,
    data: Data,
    *,
    optimizer: OptimizerLike,
    loss: LossLike = None,
    objective: Callable[[Model, Tree], Any] | None = None,
    seed: int = 0,
    epochs: int = 1,
    batch_size: int = 32,
    shuffle: bool = True,
    clip_norm: float | None = None,
    precision: Precision = "float32",
    schedule: ScheduleLike = None,
    schedule_per: Literal["epoch", "step"] = "epoch",
    **hyperparameters: Any,
) -> Model:
    """Return a copy of `model`, trained as the member `name` of a fleet, but by a plain loop of its framework.

    Nothing is fused or traced. Optimizers, schedulers, clipping and losses are the framework's own. Only the
    member's random streams are modelfleet's: the order of its rows and its dropout.

    Args:
        model: The model. It is not changed.
        name: Name of the member, which decides its random streams together with `seed`.
        data: Arrays `(x, y)`.
        optimizer: As for `Fleet.compile`; for a Keras model that is compiled, None.
        loss: As for `Fleet.compile`.
        objective: As for `Fleet.compile`.
        seed: Seed of the fleet.
        epochs: Number of epochs.
        batch_size: Rows per batch.
        shuffle: Shuffle the rows in every epoch.
        clip_norm: Largest norm of the gradient.
        precision: As for `Fleet.compile`.
        schedule: Function that makes a scheduler for an optimizer (torch), or a schedule of Optax or Keras.
        schedule_per: When a scheduler steps: after each "epoch" or after each "step".
        **hyperparameters: Hyperparameters of the optimizer, such as `lr`.

    Returns:
        The trained copy.

    Example:
        ```python
        expected = testing.alone(net, "0", (x, y), optimizer="adam", loss="mse", lr=1e-3)
        ```
    """
    training = Training(
        name=name,
        optimizer=optimizer,
        loss=loss,
        objective=objective,
        seed=member_seed(seed, name),
        epochs=epochs,
        batch_size=batch_size,
        shuffle=shuffle,
        clip_norm=clip_norm,
        precision=precision,
        schedule=schedule,
        schedule_per=schedule_per,
        hyperparameters=hyperparameters,
    )
    return _reference(model).alone(model, data, training)


def largest_difference(model: Model, other: Model, *, ignoring: Collection[str] = ()) -> tuple[float, str]:
    """Return the largest difference between the weights and buffers of two models, and the name of that tensor.

    Args:
        model: A model.
        other: A model of the same structure.
        ignoring: Names of tensors to leave out.

    Returns:
        The difference, relative to the largest magnitude within the tensor, and the tensor's name.

    Raises:
        ValueError: The models have different weights, or `ignoring` names a weight that does not exist.
    """
    weights = _reference(model).weights
    first, second = weights(model), weights(other)
    if first.keys() != second.keys():
        raise ValueError(f"the models have different weights: {sorted(first.keys() ^ second.keys())}.")
    unknown = set(ignoring) - first.keys()
    if unknown:
        raise ValueError(f"there is no {sorted(unknown)[0]!r} to ignore. Weights: {', '.join(first)}.")
    worst = (0.0, "")
    for name in first:
        a, b = first[name].astype(np.float64), second[name].astype(np.float64)
        if name in ignoring or not a.size:
            continue
        difference = float(np.abs(a - b).max()) / (float(np.abs(b).max()) or 1.0)
        worst = max(worst, (difference if np.isfinite(difference) else np.inf, name))
    return worst


def _reference(model: Model) -> ModuleType:
    return import_module(f"modelfleet.testing.{frameworks.adapter_of(model, 'model').NAME}")
