"""The plain way to train a Keras model: its own `train_on_batch`, for comparison."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from modelfleet.frameworks import keras as adapter
from modelfleet.members import Member, member_seed
from modelfleet.recipe import Recipe
from modelfleet.streams import permutations
from modelfleet.trees import leaves, map_tree

UNTRACED = 20  # steps on TensorFlow: to trace one takes as long as to take a dozen


def alone(
    model: keras.Model,
    name: str,
    data: Any,
    *,
    optimizer: Any,
    loss: Any,
    objective: Callable[[Any, Any], Any] | None,
    seed: int,
    epochs: int,
    batch_size: int,
    shuffle: bool,
    clip_norm: float | None,
    precision: str,
    schedule: Any,
    schedule_per: str,
    **hyperparameters: Any,
) -> keras.Model:
    """A trained copy of `model`; see `modelfleet.testing.alone`. With no optimizer it stays compiled as it is."""
    model = adapter.copy_model(model)
    if optimizer is not None:
        recipe = Recipe(
            optimizer,
            loss,
            objective=objective,
            clip_norm=clip_norm,
            precision=precision,
            schedule=schedule,
            hyperparameters=hyperparameters,
        )
        adapter.compile(recipe, [Member(name, model, 0, adapter)])
    own_seed = member_seed(seed, name)
    arrays = map_tree(np.asarray, data)
    steps = epochs * -(-len(leaves(arrays)[0]) // batch_size)
    untraced = keras.backend.backend() == "tensorflow" and steps <= UNTRACED and not model.run_eagerly
    if untraced:
        model.run_eagerly = True
    taken = 0
    for epoch in range(epochs):
        for batch in _batches(arrays, own_seed if shuffle else None, epoch, batch_size):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            with _streams(own_seed, taken):
                model.train_on_batch(x, y, sample_weight)
            taken += 1
    if untraced:
        model.run_eagerly, model.train_function = False, None  # who trains it on has it traced
    return model


def _batches(data: Any, seed: int | None, epoch: int, size: int) -> Iterator[Any]:
    rows = len(leaves(data)[0])
    order = np.arange(rows)
    if seed is not None:
        order = permutations(np.array([seed]), epoch, np.array([rows]))[0]
    for start in range(0, rows, size):
        yield map_tree(lambda leaf, start=start: leaf[order[start : start + size]], data)


def _streams(seed: int, step: int) -> AbstractContextManager[Any]:
    """On torch, a member's dropout is drawn from modelfleet's streams; elsewhere from the model's own seeds."""
    if keras.backend.backend() != "torch":
        return nullcontext()
    from modelfleet.frameworks.keras.torch import drawing

    return drawing(seed, step)


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    """Weights by their place and name: Keras numbers the names of layers through the process."""
    return {f"{place}.{v.name}": keras.ops.convert_to_numpy(v.value) for place, v in enumerate(model.weights)}
