"""Reference for Keras members: one model, trained alone by its own `train_on_batch`."""

from contextlib import AbstractContextManager, nullcontext

import keras
import numpy as np

from modelfleet.frameworks import keras as adapter
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.testing.reference import Training
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Arrays, Data

MAX_UNTRACED = 20  # steps on TensorFlow: tracing a step takes as long as a dozen steps


def alone(model: keras.Model, data: Data, training: Training) -> keras.Model:
    """Return a trained copy of `model` (see `modelfleet.testing.alone`).

    Without an optimizer, the copy is compiled as `model` is.
    """
    model = adapter.copy_model(model)
    if training.optimizer is not None:
        recipe = Recipe(
            training.optimizer,
            training.loss,
            objective=training.objective,
            clip_norm=training.clip_norm,
            precision=training.precision,
            schedule=training.schedule,
            hyperparameters=training.hyperparameters,
        )
        adapter.compile(recipe, [Member(training.name, model, 0, adapter)])
    arrays = map_tree(np.asarray, data)
    count = len(leaves(arrays)[0])
    total = training.epochs * -(-count // training.batch_size)
    untraced = keras.backend.backend() == "tensorflow" and total <= MAX_UNTRACED and not model.run_eagerly
    if untraced:
        model.run_eagerly = True
    steps = 0
    for epoch in range(training.epochs):
        for rows in training.rows(count, epoch):
            batch = map_tree(lambda leaf, rows=rows: leaf[rows], arrays)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            with _streams(training.seed, steps):
                model.train_on_batch(x, y, sample_weight)
            steps += 1
    if untraced:
        model.run_eagerly, model.train_function = False, None  # later training is traced
    return model


def _streams(seed: int, step: int) -> AbstractContextManager[object]:
    """Draw dropout from modelfleet's streams on torch. Other backends draw from the model's own seeds."""
    if keras.backend.backend() != "torch":
        return nullcontext()
    from modelfleet.frameworks.keras.torch import drawing

    return drawing(seed, step)


def weights(model: keras.Model) -> Arrays:
    """Return weights by position and name. Keras numbers the names of layers across the process."""
    return {f"{index}.{v.name}": keras.ops.convert_to_numpy(v.value) for index, v in enumerate(model.weights)}
