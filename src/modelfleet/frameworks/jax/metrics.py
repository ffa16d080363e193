"""Metrics of JAX members, summed on the device batch by batch.

JAX has no float64 by default, and float32 can't count the rows of an epoch. So every sum is kept as two numbers,
`(2, …)`: the sum, and what rounding has lost of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.frameworks import metrics as common
from modelfleet.frameworks.jax.losses import LOSSES, matched
from modelfleet.frameworks.jax.target_checks import shape_of
from modelfleet.frameworks.target_checks import IGNORED
from modelfleet.types import MetricLike, Tree

Array = jax.Array | np.ndarray
Parts = dict[str, Array]


def added(sums: Array, value: Array) -> Array:
    """Add a value to a sum `(2, …)`, whose second number collects the rounding errors."""
    total, rest = sums
    new = total + value
    part = new - total
    return jnp.stack([new, rest + ((total - (new - part)) + (value - part))])


@dataclass(frozen=True)
class Metric:
    """Number per member and epoch.

    `parts` returns numbers for one member's batch, from its output, target and row weights `(row,)`. `joined` adds
    them to the parts of earlier batches, starting from `begun`. `value` computes the metric from the joined parts.
    Padded rows have weight 0 and do not count. A metric that is not `can_mask_rows` must only see real rows.
    """

    name: str
    parts: Callable[[Tree, Tree, Array], Parts]
    value: Callable[[Parts], Array]
    can_mask_rows: bool = True
    moments: bool = False
    """True if the parts are a count, a mean and a sum of squares around the mean, instead of sums."""

    def begun(self, parts: Parts) -> Parts:
        """Return the parts with which `joined` starts."""
        if self.moments:
            return {name: jnp.zeros_like(value) for name, value in parts.items()}
        return {name: jnp.zeros((2, *jnp.shape(value)), jnp.float32) for name, value in parts.items()}

    def joined(self, before: Parts, parts: Parts) -> Parts:
        """Return the parts of some batches and one more."""
        if not self.moments:
            return {name: added(before[name], value.astype(jnp.float32)) for name, value in parts.items()}
        # The variance of two sets from the variances of each (Chan et al. 1979), without subtracting large
        # numbers.
        count = before["count"] + parts["count"]
        fraction = parts["count"] / jnp.maximum(count, 1)
        step = parts["mean"] - before["mean"]
        squares = before["squares"] + parts["squares"] + step**2 * before["count"] * fraction
        return {
            "count": count,
            "mean": before["mean"] + step * fraction,
            "squares": squares,
            "residual": before["residual"] + parts["residual"],
        }


def resolve(metrics: Sequence[MetricLike]) -> tuple[Metric, ...]:
    """Return the metrics of names ("accuracy", "top_5", …), functions, or mappings of names to functions.

    A function gives one number per batch. Its value for an epoch is the mean over the rows.
    """
    return common.resolve(metrics, _METRICS, _top, _from_function)


def mean(name: str) -> Metric:
    """Return a metric that is the mean of a number per batch. Its parts are a total and a count."""
    return Metric(name, lambda output, target, weights: {}, _mean)


def _from_function(function: common.Function, name: str) -> Metric:
    def parts(output: Tree, target: Tree, weights: Array) -> Parts:
        with common.naming_metric(name):
            value = jnp.asarray(function(output, target))
        if value.size != 1:
            raise common.not_one_number(name, value.shape)
        rows = weights.sum()
        return {"total": value.reshape(()) * rows, "count": rows}

    return Metric(name, parts, _mean, can_mask_rows=False)


def _mean(parts: Parts) -> Array:
    total, count = (parts[name].sum(0) for name in ("total", "count"))
    return total / count


def _weighted(per_row: Array, counts: Array, weights: Array) -> Parts:
    return {"total": jnp.where(weights == 0, 0, weights * per_row).sum(), "count": (weights * counts).sum()}


def _accuracy(output: Array, target: Array, weights: Array) -> Parts:
    shape = shape_of("accuracy", output)
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        right, counted = _binary(output, target)
    else:
        scores, labels = _scores_and_labels("accuracy", output, target)
        right, counted = scores.argmax(-1) == labels, labels != IGNORED
    return _weighted(*_rows(right, counted), weights)


def _binary(output: Array, target: Array) -> tuple[Array, Array]:
    """Return which logits are on the right side of 0, and which labels count."""
    if target.size != output.size:
        raise common.wrong_shapes("accuracy", output.shape, target.shape, "(row, …, class)")
    target = target.reshape(output.shape)
    return (output > 0) == (target > 0.5), target != IGNORED


def _top(k: int) -> Metric:
    name = f"top_{k}"

    def parts(output: Array, target: Array, weights: Array) -> Parts:
        scores, labels = _scores_and_labels(name, output, target)
        if scores.shape[-1] < k:
            raise common.too_few_classes(k, scores.shape[-1])
        label = jnp.maximum(labels, 0)[..., None]
        score = jnp.take_along_axis(scores, label, axis=-1)
        # Compared this way round, a NaN is not among the best. Of equal scores, the first counts as higher.
        below = (scores < score) | ((scores == score) & (jnp.arange(scores.shape[-1]) >= label))
        return _weighted(*_rows((~below).sum(-1) < k, labels != IGNORED), weights)

    return Metric(name, parts, _mean)


def _rows(right: Array, counted: Array) -> tuple[Array, Array]:
    """Return how many labels are right, and how many count, in each row."""
    rows = len(right)
    return (right & counted).reshape(rows, -1).sum(1), counted.reshape(rows, -1).sum(1)


def _scores_and_labels(name: str, output: Array, target: Array) -> tuple[Array, Array]:
    """Return scores `(row, …, class)` and labels `(row, …)`, from either of the usual forms."""
    if len(shape_of(name, output)) >= 2:
        if target.shape == output.shape:  # one-hot, or probabilities
            return output, target.argmax(-1)
        if target.shape == output.shape[:-1]:
            return output, target.astype(jnp.int32)
    raise common.wrong_shapes(name, output.shape, target.shape, "(row, …, class)")


def _from_loss(name: str) -> Metric:
    def parts(output: Array, target: Array, weights: Array) -> Parts:
        sums, counts = LOSSES[name].rows(output, target)
        assert counts is not None  # every named loss is computed by row
        return _weighted(sums, counts, weights)

    return Metric(name, parts, _mean)


def _r2_parts(output: Array, target: Array, weights: Array) -> Parts:
    output, target = matched("r2", output, target)
    rows = len(output)
    predicted, true, weight = output.reshape(rows, -1), target.reshape(rows, -1), weights[:, None]
    count = weights.sum()
    center = (weight * true).sum(0) / jnp.maximum(count, 1)
    return {
        "count": count,
        "mean": center,
        "squares": (weight * (true - center) ** 2).sum(0),
        "residual": (weight * (true - predicted) ** 2).sum(0),
    }


def _r2(parts: Parts) -> Array:
    """Return 1 - residual / variance, averaged over the outputs of a row.

    For a constant target it is 1 if the predictions are exact, and 0 otherwise.
    """
    residual, squares = parts["residual"], parts["squares"]
    constant = squares <= parts["count"] * parts["mean"] ** 2 * 1e-12  # only rounding is left
    exact = jnp.where(residual == 0, 1.0, 0.0)
    value = jnp.where(constant, exact, 1 - residual / jnp.where(constant, 1, squares)).mean()
    return jnp.where(parts["count"] == 0, jnp.nan, value)


_METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy", _accuracy, _mean),
    "mse": _from_loss("mse"),
    "mae": _from_loss("mae"),
    "r2": Metric("r2", _r2_parts, _r2, moments=True),
}
