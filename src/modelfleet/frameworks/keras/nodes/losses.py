"""Loss and metrics of a Keras node, as sums that add up over micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree
from keras.src.trainers.compile_utils import get_loss, get_metric

from modelfleet.errors import InputError
from modelfleet.frameworks.keras import losses, metrics
from modelfleet.types import LossLike, MetricLike, Tensor, Tree

_BY_ROWS = ("sum_over_batch_size", "mean")
_REDUCTIONS = (*_BY_ROWS, "sum", "mean_with_sample_weight")
_BY_SHAPE = ("accuracy", "acc")  # names of metrics that Keras chooses by the shapes of targets and outputs


class NodeLoss:
    """Loss and metrics of one node.

    Args:
        loss: The loss, as `compile` got it.
        metrics_given: The metrics, as `compile` got them.
        name: The node, for errors.

    Raises:
        InputError: A metric can't be computed in parts.
    """

    def __init__(self, loss: LossLike, metrics_given: Sequence[MetricLike], name: str) -> None:
        self.name = name
        self.given = loss, tuple(metrics_given)
        self._loss = losses.resolve(loss)
        self._metrics = metrics.resolve(list(metrics_given), loss)
        for metric in self._metrics:
            self._check(_metric(metric, None, None))

    def check(self, target: Tree, output: Tensor) -> None:
        """Raise InputError for labels without an output."""
        check = losses.label_check_of(self._loss, output.shape[-1], f"node {self.name!r}: ")
        if check is not None:
            check(target)

    # --- computing -----------------------------------------------------------------------------------------------

    def parts(
        self, output: Tensor, target: Tree, weights: Tensor | None, fraction: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return what some rows add to the loss: total, count, and the variables of all metrics.

        Args:
            output: The model's output for these rows.
            target: Their targets.
            weights: Their sample weights, or None.
            fraction: What part of the batch these rows are.
        """
        loss = self._loss_for(target, output)
        value = ops.cast(loss(target, output, weights), _wide(loss))
        count = self.count(output.shape[0], loss, weights, fraction)
        total = value if loss.reduction == "sum" else value * count
        return total, count, self._sums(output, target)

    def count(self, rows: int, loss: keras.Loss, weights: Tensor | None, fraction: Tensor) -> Tensor:
        """Return the count of some rows: the loss of a batch is the sum of totals over that of counts."""
        if loss.reduction == "sum":
            return ops.cast(fraction, _wide(loss))
        if loss.reduction == "mean_with_sample_weight" and weights is not None:
            return ops.sum(ops.cast(weights, _wide(loss)))
        return ops.cast(rows, _wide(loss))

    def count_of(self, rows: int, target: Tree, output: Tensor, weights: Tensor | None) -> float:
        """Return the count of a whole batch, of which `output` is a part."""
        return float(self.count(rows, self._loss_for(target, output), weights, ops.ones(())))

    def _loss_for(self, target: Tree, output: Tensor) -> keras.Loss:
        if tree.is_nested(output):
            raise InputError(
                f"node {self.name!r} gives {len(tree.flatten(output))} outputs, and a graph's loss is of one. "
                f"Give each output a node of its own, with an edge that names the part."
            )
        loss: Any = get_loss(self._loss, target, output)
        if loss.reduction not in _REDUCTIONS:
            raise InputError(
                f"the loss of node {self.name!r} has reduction={loss.reduction!r}; expected one of "
                f"{', '.join(map(repr, _REDUCTIONS))}."
            )
        return loss

    def _sums(self, output: Tensor, target: Tree) -> list[Tensor]:
        """Return the variables of all metrics after these rows."""
        found = []
        for given in self._metrics:
            metric = _metric(given, target, output)
            with keras.StatelessScope() as scope:
                metric.reset_state()
                metric.update_state(target, output)
            found += [_value(scope, variable) for variable in metric.variables]
        return found

    # --- sums ----------------------------------------------------------------------------------------------------

    def named(self, sums: Sequence[np.ndarray]) -> dict[str, float]:
        """Return the sums of `parts` as numbers by name."""
        names = [f"{metric.name}/{index}" for metric in self._own() for index in range(len(metric.variables))]
        return {
            f"{name}/{place}": float(number)
            for name, array in zip(names, sums, strict=True)
            for place, number in enumerate(np.asarray(array).reshape(-1))
        }

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics from their sums over an epoch."""
        with np.errstate(divide="ignore", invalid="ignore"):
            values = {"loss": sums["loss"] / sums["rows"]}
        for metric in self._own():
            pairs = []
            for index, variable in enumerate(metric.variables):
                size = int(np.prod(variable.shape))
                flat = np.array([sums[f"{metric.name}/{index}/{place}"][0] for place in range(size)])
                pairs.append((variable, ops.convert_to_tensor(flat.reshape(variable.shape), variable.dtype)))
            with keras.StatelessScope(pairs):
                values[metric.name] = np.asarray(ops.convert_to_numpy(metric.result()))[None]
        return values

    def _own(self) -> list[keras.Metric]:
        return [_metric(metric, None, None) for metric in self._metrics]

    def _check(self, metric: keras.Metric) -> None:
        """Raise InputError for a metric whose variables do not add up."""
        name = f"the metric {metric.name!r} of node {self.name!r}"
        if not type(metric).__module__.startswith("keras."):
            raise InputError(
                f"{name} is a class of your own, and it is not known how its numbers for micro-batches add up. "
                f"Give one of Keras, or a function metric(target, output)."
            )
        with keras.StatelessScope() as scope:
            metric.reset_state()
        first = [ops.convert_to_numpy(_value(scope, variable)) for variable in metric.variables]
        by_shape = not getattr(metric, "_built", True)  # its variables have the shape of the first batch
        if by_shape or not first or any(np.any(value) for value in first):
            raise InputError(
                f"{name} can't be added up over micro-batches. Give one that counts, such as 'accuracy' or 'mae', "
                f"or compute it from what predict returns."
            )
        result = np.shape(ops.convert_to_numpy(metric.result()))
        if result:
            raise InputError(f"{name} gives an array {result}; a history holds single numbers.")


def _wide(loss: keras.Loss) -> str:
    """Return the dtype in which a loss adds up: its own, but no half."""
    return "float64" if loss.dtype == "float64" else "float32"


def _metric(given: MetricLike, target: Tree, output: Tensor | None) -> keras.Metric:
    """Return the object of a metric. Its variables are only read: they hold no state."""
    if target is None and isinstance(given, str) and given.lower() in _BY_SHAPE:
        return keras.metrics.BinaryAccuracy(name=given)  # all kinds of accuracy have the same variables
    return get_metric(given, target, output)


def _value(scope: keras.StatelessScope, variable: keras.Variable) -> Tensor:
    value = scope.get_current_value(variable)
    return variable.value if value is None else value
