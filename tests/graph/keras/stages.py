"""Stages of Keras models, their undivided model, and its plain loop on JAX."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 64)
ROWS = 16


def stages(*, dropout: float = 0.3, norm: bool = False) -> list[keras.Model]:
    """Return two stages with the same weights at every call."""
    keras.utils.set_random_seed(0)
    first: list[Any] = [layers.Input((6,)), layers.Dense(8, "relu"), layers.Dropout(dropout)]
    if norm:
        first.append(layers.BatchNormalization())
    second = [layers.Input((8,)), layers.GaussianNoise(0.1 if dropout else 0.0), layers.Dense(3)]
    return [keras.Sequential(first), keras.Sequential(second)]


def whole() -> keras.Model:
    """Return a model with skips over any cut and dropout, with the same weights at every call."""
    keras.utils.set_random_seed(0)
    given = keras.Input((6,))
    first = layers.Dense(8, "relu")(given)
    dropped = layers.Dropout(0.3, seed=1)(layers.Dense(8, "relu")(first))
    added = layers.Add()([first, layers.Dense(8)(dropped)])
    return keras.Model(given, layers.Dense(3)(layers.Concatenate()([added, given])))


def outputs(models: Sequence[keras.Model], x: Any) -> np.ndarray:
    """Return the outputs of models one after the other."""
    for model in models:
        x = model(x)
    return np.asarray(keras.ops.convert_to_numpy(x))


def train(
    models: Sequence[keras.Model],
    optimizers: Sequence[keras.Optimizer],
    *,
    epochs: int = 5,
    loss: keras.Loss | None = None,
    weights: np.ndarray | None = None,
    clip_norm: float | None = None,
) -> list[float]:
    """Train models as one, by a plain loop of JAX and Keras. Return the loss of every epoch."""
    import jax

    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if loss is None else loss
    history = []
    for _ in range(epochs):
        total = 0.0
        for start in range(0, len(X), ROWS):
            rows = slice(start, start + ROWS)

            def compute(params: list[Any], rows: slice = rows) -> tuple[Any, list[Any]]:
                value, kept = X[rows], []
                for model, own in zip(models, params, strict=True):
                    value, after = model.stateless_call(
                        own, [v.value for v in model.non_trainable_variables], value, training=True
                    )
                    kept.append(after)
                return criterion(Y[rows], value, None if weights is None else weights[rows]), kept

            params = [[v.value for v in model.trainable_variables] for model in models]
            (value, kept), gradients = jax.value_and_grad(compute, has_aux=True)(params)
            for model, after in zip(models, kept, strict=True):
                for variable, new in zip(model.non_trainable_variables, after, strict=True):
                    variable.assign(new)
            if clip_norm is not None:
                norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradients)))
                gradients = jax.tree.map(lambda g, n=norm: g * min(1.0, clip_norm / n), gradients)
            for model, optimizer, own in zip(models, optimizers, gradients, strict=True):
                if own:
                    optimizer.apply(own, model.trainable_variables)
            total += float(value) * ROWS
        history.append(total / len(X))
    return history


def assert_equal(found: Sequence[keras.Model], expected: Sequence[keras.Model]) -> None:
    """Check that all variables are equal, seeds included."""
    for one, other in zip(found, expected, strict=True):
        for own, wanted in zip(one.variables, other.variables, strict=True):
            np.testing.assert_allclose(np.asarray(own), np.asarray(wanted), rtol=1e-4, atol=1e-6, err_msg=own.path)
