"""Metrics of torch members, summed on the device batch by batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
import torch
from torch import Tensor

from modelfleet.frameworks import metrics as common
from modelfleet.frameworks.target_checks import IGNORED
from modelfleet.frameworks.torch.losses import LOSSES, matched
from modelfleet.frameworks.torch.target_checks import shape_of
from modelfleet.types import MetricLike, Tree

Sums = Callable[[Tree, Tree, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Metric:
    """Number per member and epoch.

    `sums` returns scalar sums for one member's batch, from its output, target and row weights `(row,)`. `value`
    computes the number from the sums over an epoch. Padded rows have weight 0 and do not count. A metric that is
    not `can_mask_rows` must only see real rows.
    """

    name: str
    sums: Sums
    value: Callable[[Mapping[str, SupportsFloat]], float]
    can_mask_rows: bool = True
    of_labels: Callable[[Tensor, Tensor], float] | None = None
    """Return the value for scores `(row, class)` and labels `(row,)` that all count: a shortcut for one batch."""


def resolve(metrics: Sequence[MetricLike]) -> tuple[Metric, ...]:
    """Return the metrics of names ("accuracy", "top_5", …), functions, or mappings of names to functions.

    A function gives one number per batch. Its value for an epoch is the mean over the rows.
    """
    return common.resolve(metrics, _METRICS, _top, _from_function)


def _from_function(function: common.Function, name: str) -> Metric:
    def sums(output: Tree, target: Tree, weights: Tensor) -> dict[str, Tensor]:
        with common.naming_metric(name):
            value = torch.as_tensor(function(output, target), device=weights.device)
        if value.numel() != 1:
            raise common.not_one_number(name, value.shape)
        rows = _wide(weights).sum()
        return {"total": _wide(value.detach()).reshape(()) * rows, "count": rows}

    return Metric(name, sums, _mean, can_mask_rows=False)


def _mean(sums: Mapping[str, SupportsFloat]) -> float:
    count = float(sums["count"])
    return float(sums["total"]) / count if count else math.nan


def _wide(values: Tensor) -> Tensor:
    """Return values in float64, since float32 can't count the rows of an epoch. Apple's GPUs have no float64."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def _weighted(per_row: Tensor, counts: Tensor, weights: Tensor) -> dict[str, Tensor]:
    wide = _wide(weights)
    return {"total": (wide * per_row).sum(), "count": (wide * counts).sum()}


def _accuracy_sums(output: Tensor, target: Tensor, weights: Tensor) -> dict[str, Tensor]:
    if shape_of("accuracy", output)[1:2] in ((), (1,)):
        right, counted = _binary(output, target)
    else:
        scores, labels = _scores_and_labels("accuracy", output, target)
        right, counted = scores.argmax(1) == labels, labels != IGNORED
    return _weighted(*_rows(right, counted), weights)


def _accuracy_of_labels(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(1) == labels).sum().item() / labels.shape[0]


def _binary(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return which logits are on the right side of 0, and which labels count."""
    logits = output if output.ndim == 1 or target.shape == output.shape else output.squeeze(1)
    if output.ndim == 1 and target.shape == (*output.shape, 1):
        target = target.squeeze(1)
    if target.shape != logits.shape:
        raise common.wrong_shapes("accuracy", output.shape, target.shape, "(row, class, …)")
    return (logits > 0) == (target > 0.5), target != IGNORED


def _top(k: int) -> Metric:
    name = f"top_{k}"

    def sums(output: Tensor, target: Tensor, weights: Tensor) -> dict[str, Tensor]:
        scores, labels = _scores_and_labels(name, output, target)
        if scores.shape[1] < k:
            raise common.too_few_classes(k, scores.shape[1])
        label = labels.clamp(min=0).unsqueeze(1)
        score = scores.gather(1, label)
        classes = torch.arange(scores.shape[1], device=scores.device).view(-1, *[1] * (scores.ndim - 2))
        # Compared this way round, a NaN is not among the best. Of equal scores, the first counts as higher.
        below = (scores < score) | ((scores == score) & (classes >= label))
        return _weighted(*_rows((~below).sum(1) < k, labels != IGNORED), weights)

    return Metric(name, sums, _mean)


def _rows(right: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many labels are right, and how many count, in each row."""
    return (right & counted).unsqueeze(-1).flatten(1).sum(1), counted.unsqueeze(-1).flatten(1).sum(1)


def _scores_and_labels(name: str, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores `(row, class, …)` and labels `(row, …)`, from any of the usual forms."""
    if len(shape_of(name, output)) >= 2:
        if target.shape == output.shape:  # one-hot, or probabilities
            return output, target.argmax(1)
        if target.shape == output.shape[:1] + output.shape[2:]:
            return output, target.long()
        if target.shape == output.shape[:-1]:  # classes last, as Hugging Face has them
            return output.movedim(-1, 1), target.long()
    raise common.wrong_shapes(name, output.shape, target.shape, "(row, class, …)")


def _from_loss(name: str) -> Metric:
    rows = LOSSES[name].rows
    assert rows is not None

    def sums(output: Tensor, target: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return _weighted(*rows(output, target), weights)

    return Metric(name, sums, _mean)


def _r2_sums(output: Tensor, target: Tensor, weights: Tensor) -> dict[str, Tensor]:
    output, target = matched("r2", output, target)
    weight = _wide(weights).unsqueeze(1)
    predicted, true = (_wide(tensor).unsqueeze(-1).flatten(1) for tensor in (output, target))
    moments = {"residual": (true - predicted) ** 2, "true": true, "square": true**2}
    columns = {name: (weight * moment).sum(0).unbind() for name, moment in moments.items()}
    sums = {f"{name}_{index}": value for name, values in columns.items() for index, value in enumerate(values)}
    return {**sums, "count": weight.sum()}


def _r2(sums: Mapping[str, SupportsFloat]) -> float:
    """Return 1 - residual / variance, averaged over the outputs of a row.

    For a constant target it is 1 if the predictions are exact, and 0 otherwise.
    """
    count = float(sums["count"])
    if not count:
        return math.nan
    values = []
    for name in sums:
        if name.startswith("residual_"):
            index = name.removeprefix("residual_")
            residual, total, square = (float(sums[f"{key}_{index}"]) for key in ("residual", "true", "square"))
            variance = square - total**2 / count
            if variance <= square * 1e-14:  # only rounding is left
                values.append(1.0 if residual == 0 else 0.0)
            else:
                values.append(1 - residual / variance)
    return float(np.mean(values))


_METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy", _accuracy_sums, _mean, of_labels=_accuracy_of_labels),
    "mse": _from_loss("mse"),
    "mae": _from_loss("mae"),
    "r2": Metric("r2", _r2_sums, _r2),
}
