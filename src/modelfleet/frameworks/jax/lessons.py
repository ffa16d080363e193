"""Loss of what a JAX member learns from the others (`frameworks/lessons.py`)."""

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.frameworks.lessons import Lesson

CLASS_AXIS = -1


def lesson_loss(output: jax.Array, lesson: Lesson, weights: jax.Array | np.ndarray | None) -> jax.Array:
    """Return the weighted mean over the rows of how far an output is from that of the others.

    Args:
        output: The member's output, `(row, …)`.
        lesson: What the others answer.
        weights: `(row,)`: 1 for a row that counts and 0 for padding; None if every row counts.
    """
    rows = lesson.weight.astype(output.dtype) * _by_row(output, lesson)
    if weights is None:
        return rows.mean()
    count = jnp.where((weights != 0).any(), weights.sum(), 1)
    return jnp.where(weights == 0, 0, weights * rows).sum() / count


def _by_row(output: jax.Array, lesson: Lesson) -> jax.Array:
    others = lesson.others.astype(output.dtype)
    if lesson.comparison == "outputs":
        return _row_means((others - output) ** 2)
    temperature = lesson.temperature.astype(output.dtype).reshape(-1, *[1] * (output.ndim - 1))
    scores = output / temperature
    if lesson.comparison == "softmax":
        divergence = _cross(others, jax.nn.log_softmax(scores, CLASS_AXIS)).sum(CLASS_AXIS, keepdims=True)
    else:
        divergence = _cross(others, jax.nn.log_sigmoid(scores))
        divergence = divergence + _cross(1 - others, jax.nn.log_sigmoid(-scores))
    return _row_means(temperature**2 * divergence)


def _cross(share: jax.Array, log_own: jax.Array) -> jax.Array:
    """Return what each probability adds to a KL divergence. A probability of 0 adds nothing."""
    return jax.scipy.special.xlogy(share, share) - share * log_own


def _row_means(values: jax.Array) -> jax.Array:
    return values.reshape(len(values), -1).mean(1)
