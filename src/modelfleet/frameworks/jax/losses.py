"""Losses of JAX members, computed per row so that padded rows can be left out. They agree with torch's losses.

Classes are on the last axis of an output, `(row, …, class)`, as usual in JAX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks.jax.target_checks import check_fit, shape_of
from modelfleet.frameworks.losses import find_loss, no_loss_by_row
from modelfleet.frameworks.target_checks import IGNORED, TargetKind
from modelfleet.types import LossLike, Tree

Array = jax.Array | np.ndarray


@dataclass(frozen=True)
class Loss:
    """Loss of an output and a target."""

    name: str
    rows: Callable[[Tree, Tree], tuple[Array, Array | None]]
    """Return the sum of the loss over each row's elements and their number, both `(row,)`.

    A user's function that returns only a mean gives that mean and None.
    """
    kind: TargetKind = "any"
    function: Callable[[Tree, Tree], Any] | None = None
    """User's own function; None for losses with a name."""

    @property
    def summary(self) -> str:
        """Return a short text that is the same in every process, and changes when a user's function is edited."""
        return self.name if self.function is None else fingerprint(self.function)


def resolve(loss: LossLike) -> Loss:
    """Return the loss of a name, or of a function that takes an output and a target."""
    named = find_loss(loss, LOSSES)
    return _of_function(loss) if named is None else named


def weighted(loss: Loss, output: Tree, target: Tree, weights: Array | None, own: Array | None = None) -> Array:
    """Return the mean of the loss over the elements of the rows that count.

    Args:
        loss: The loss.
        output: The model's output.
        target: The target.
        weights: `(row,)`: 1 for a row that counts and 0 for padding; None if every row counts. With all weights 0
            the result is 0.
        own: `(row,)`: the user's sample weights, by which the losses of the rows are multiplied, or None.

    Raises:
        InputError: There are sample weights, and the loss returns one number for a whole batch.
    """
    sums, counts = loss.rows(output, target)
    if own is not None:
        if counts is None and len(own) > 1:
            raise no_loss_by_row(loss.name)
        sums = own.astype(sums.dtype) * sums
    if counts is None:
        return sums
    if weights is None:
        return sums.sum() / counts.sum()
    # If every label is ignored, the loss is 0 / 0, as in torch. A member without rows has a loss of 0.
    size = jnp.where((weights != 0).any(), (weights * counts).sum(), 1)
    return jnp.where(weights == 0, 0, weights * sums).sum() / size


def matched(name: str, output: Tree, target: Tree) -> tuple[Array, Array]:
    """Return an output and a target in one dtype. Raises InputError if their shapes differ."""
    check_fit(name, "values", shape_of(name, output), target)
    dtype = jnp.promote_types(output.dtype, jnp.float32)
    return output.astype(dtype), jnp.asarray(target, dtype)


def is_float(array: Array) -> bool:
    """Return True for an array of floating-point numbers."""
    return jnp.issubdtype(array.dtype, jnp.floating)


def _of_function(function: Callable[[Tree, Tree], Any]) -> Loss:
    """Return the loss of a user's function, which returns one number, or one or more for every row."""
    name = getattr(function, "__name__", type(function).__name__)

    def rows(output: Tree, target: Tree) -> tuple[Array, Array | None]:
        values = jnp.asarray(function(output, target))
        if values.size == 1:
            return values.reshape(()), None
        if values.shape[:1] != jax.tree.leaves(target)[0].shape[:1]:
            raise InputError(
                f"the loss {name!r} gave {values.shape}; expected one number, such as the batch's mean, or one "
                f"for every row."
            )
        return _per_row(values)

    return Loss(name, rows, function=function)


def _per_row(values: Array, counted: Array | None = None) -> tuple[Array, Array]:
    counted = jnp.ones(values.shape, bool) if counted is None else counted
    # At least in float32: sums of halves are rough, and a half can't count beyond 2048.
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    rows = len(values)
    return values.astype(dtype).reshape(rows, -1).sum(1), counted.astype(dtype).reshape(rows, -1).sum(1)


def _of_values(name: str, function: Callable[[Array, Array], Array], kind: TargetKind = "values") -> Loss:
    """Return a loss between the elements of an output and a target of the same shape."""

    def rows(output: Tree, target: Tree) -> tuple[Array, Array]:
        return _per_row(function(*matched(name, output, target)))

    return Loss(name, rows, kind)


def _of_classes(name: str, function: Callable[[Array, Array], Array], kind: TargetKind = "classes") -> Loss:
    """Return a loss of scores `(row, …, class)` with class indices `(row, …)` or probabilities of their shape."""

    def rows(output: Tree, target: Tree) -> tuple[Array, Array]:
        check_fit(name, kind, shape_of(name, output), target)
        output = output.astype(jnp.promote_types(output.dtype, jnp.float32))
        if is_float(target):
            return _per_row(-(target * jax.nn.log_softmax(output)).sum(-1))
        counted = target != IGNORED
        values = function(output, jnp.where(counted, target, 0))
        return _per_row(jnp.where(counted, values, 0), counted)

    return Loss(name, rows, kind)


def _at(scores: Array, label: Array) -> Array:
    return jnp.take_along_axis(scores, label[..., None], axis=-1)[..., 0]


def _cross_entropy(output: Array, label: Array) -> Array:
    return -_at(jax.nn.log_softmax(output), label)


def _multi_margin(output: Array, label: Array) -> Array:
    margins = jnp.maximum(1 - _at(output, label)[..., None] + output, 0)
    others = jnp.arange(output.shape[-1]) != label[..., None]
    return (margins * others).sum(-1) / output.shape[-1]


def _huber(output: Array, target: Array) -> Array:
    error = jnp.abs(output - target)
    return jnp.where(error < 1, 0.5 * error**2, error - 0.5)


@jax.custom_jvp
def _bce(output: Array, target: Array) -> Array:
    # As in torch, logarithms are clamped at -100, and the slope is finite at 0 and 1.
    yes, no = jnp.maximum(jnp.log(output), -100), jnp.maximum(jnp.log1p(-output), -100)
    return -(target * yes + (1 - target) * no)


@_bce.defjvp
def _bce_slope(values: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    output, target = values
    slope = (output - target) / jnp.maximum((1 - output) * output, 1e-12)
    by_target = jnp.maximum(jnp.log1p(-output), -100) - jnp.maximum(jnp.log(output), -100)
    return _bce(output, target), slope * changes[0] + by_target * changes[1]


def _bce_with_logits(output: Array, target: Array) -> Array:
    return jnp.maximum(output, 0) - output * target + jnp.log1p(jnp.exp(-jnp.abs(output)))


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        _of_classes("cross_entropy", _cross_entropy, "classes or probabilities"),
        _of_classes("nll", lambda output, label: -_at(output, label)),
        _of_classes("multi_margin", _multi_margin),
        _of_values("mse", lambda output, target: (output - target) ** 2),
        _of_values("mae", lambda output, target: jnp.abs(output - target)),
        _of_values("huber", _huber),
        _of_values("smooth_l1", _huber),
        _of_values("poisson_nll", lambda output, target: jnp.exp(output) - target * output),
        _of_values("kl_div", lambda output, target: jax.scipy.special.xlogy(target, target) - target * output),
        _of_values("bce", _bce, "fractions"),
        _of_values("bce_with_logits", _bce_with_logits, "fractions"),
        _of_values(
            "hinge_embedding",
            lambda output, target: jnp.where(target == 1, output, jnp.maximum(1 - output, 0)),
            "signs",
        ),
        _of_values("soft_margin", lambda output, target: jax.nn.softplus(-target * output), "signs"),
    )
}
