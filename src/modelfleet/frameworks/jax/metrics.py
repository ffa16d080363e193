"""Metrics of an epoch, summed up on the device batch by batch.

JAX has no float64 unless it is told so, and an epoch has more rows than float32 can count. So every sum is kept as
two numbers, `(2, …)`: the sum, and what was lost of it by rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks import metrics as common
from modelfleet.frameworks.jax.losses import LOSSES, matched, shape_of
from modelfleet.frameworks.losses import IGNORED
from modelfleet.types import MetricLike

Array = jax.Array | np.ndarray
Parts = dict[str, Array]


def added(sums: Array, value: Array) -> Array:
    """A sum `(2, …)` with a value added: the error of the addition goes to its second number."""
    total, rest = sums
    new = total + value
    part = new - total
    return jnp.stack([new, rest + ((total - (new - part)) + (value - part))])


@dataclass(frozen=True)
class Metric:
    """A number per member and epoch.

    `parts` gives numbers of one member's batch from its output, target and row weights `(row,)`; `joined` adds
    them to those of the batches before, beginning with what `begun` gives; and `value` makes the metric of them.
    Padded rows weigh 0 and leave no trace, unless the metric is not `maskable`.
    """

    name: str
    parts: Callable[[Any, Any, Array], Parts]
    value: Callable[[Parts], Array]
    maskable: bool = True
    moments: bool = False
    """Whether the parts are a count, a mean and a sum of squares around it, rather than sums."""

    def begun(self, parts: Parts) -> Parts:
        """What `joined` begins with."""
        if self.moments:
            return {name: jnp.zeros_like(value) for name, value in parts.items()}
        return {name: jnp.zeros((2, *jnp.shape(value)), jnp.float32) for name, value in parts.items()}

    def joined(self, before: Parts, parts: Parts) -> Parts:
        """The parts of some batches and of one more."""
        if not self.moments:
            return {name: added(before[name], value.astype(jnp.float32)) for name, value in parts.items()}
        # The variance of two sets from those of each (Chan et al. 1979): nothing large is subtracted.
        count = before["count"] + parts["count"]
        share = parts["count"] / jnp.maximum(count, 1)
        step = parts["mean"] - before["mean"]
        squares = before["squares"] + parts["squares"] + step**2 * before["count"] * share
        return {
            "count": count,
            "mean": before["mean"] + step * share,
            "squares": squares,
            "residual": before["residual"] + parts["residual"],
        }


def resolve(metrics: Sequence[MetricLike]) -> tuple[Metric, ...]:
    """Return the metrics of names ("accuracy", "top_5", …), functions, or mappings of names to functions.

    A function gives one number per batch. Its value for an epoch is the mean over the rows.
    """
    return common.resolve(metrics, _METRICS, _top, _from_function)


def mean(name: str) -> Metric:
    """The mean of a number that is known for every batch: its parts are a total and a count."""
    return Metric(name, lambda output, target, weights: {}, _mean)


def _from_function(function: common.Function, name: str) -> Metric:
    def parts(output: Any, target: Any, weights: Array) -> Parts:
        value = jnp.asarray(function(output, target))
        if value.size != 1:
            raise common.not_one_number(name, value.shape)
        rows = weights.sum()
        return {"total": value.reshape(()) * rows, "count": rows}

    return Metric(name, parts, _mean, maskable=False)


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
    """One logit per label: which are on the right side of 0."""
    if target.size != output.size:
        raise _unfit("accuracy", output, target)
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
        # Asked this way round, a NaN is not among the best; of equal scores, the first counts as the higher.
        below = (scores < score) | ((scores == score) & (jnp.arange(scores.shape[-1]) >= label))
        return _weighted(*_rows((~below).sum(-1) < k, labels != IGNORED), weights)

    return Metric(name, parts, _mean)


def _rows(right: Array, counted: Array) -> tuple[Array, Array]:
    """How many are right, and how many count, in each row."""
    rows = len(right)
    return (right & counted).reshape(rows, -1).sum(1), counted.reshape(rows, -1).sum(1)


def _scores_and_labels(name: str, output: Array, target: Array) -> tuple[Array, Array]:
    """Scores `(row, …, class)` and labels `(row, …)`, from either of the forms in which people have them."""
    if len(shape_of(name, output)) >= 2:
        if target.shape == output.shape:  # one-hot, or probabilities
            return output, target.argmax(-1)
        if target.shape == output.shape[:-1]:
            return output, target.astype(jnp.int32)
    raise _unfit(name, output, target)


def _unfit(name: str, output: Array, target: Array) -> InputError:
    return InputError(
        f"{name} can't compare an output {tuple(output.shape)} with a target {tuple(target.shape)}. It takes "
        f"scores (row, …, class) with class indices (row, …) or one-hot targets, or one logit with 0 and 1."
    )


def _from_loss(name: str) -> Metric:
    def parts(output: Array, target: Array, weights: Array) -> Parts:
        sums, counts = LOSSES[name].rows(output, target)
        assert counts is not None  # every loss with a name tells its rows apart
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
    """1 - residual / variance, averaged over the outputs of a row; of a constant target 1 if met, else 0."""
    residual, squares = parts["residual"], parts["squares"]
    constant = squares <= parts["count"] * parts["mean"] ** 2 * 1e-12  # nothing but rounding is left
    met = jnp.where(residual == 0, 1.0, 0.0)
    value = jnp.where(constant, met, 1 - residual / jnp.where(constant, 1, squares)).mean()
    return jnp.where(parts["count"] == 0, jnp.nan, value)


_METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy", _accuracy, _mean),
    "mse": _from_loss("mse"),
    "mae": _from_loss("mae"),
    "r2": Metric("r2", _r2_parts, _r2, moments=True),
}
