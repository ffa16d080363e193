"""Loss of what a torch member learns from the others (`frameworks/lessons.py`)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.lessons import Lesson

CLASS_AXIS = 1


def lesson_loss(output: Tensor, lesson: Lesson, weights: Tensor | None) -> Tensor:
    """Return the weighted mean over the rows of how far an output is from that of the others.

    Args:
        output: The member's output, `(row, …)`.
        lesson: What the others answer.
        weights: `(row,)`: 1 for a row that counts and 0 for padding; None if every row counts.
    """
    output = output.to(torch.promote_types(output.dtype, torch.float32))  # halves are rough
    rows = lesson.weight.to(output.dtype) * _by_row(output, lesson)
    if weights is None:
        return rows.mean()
    count = torch.where(weights.any(), weights.sum(), 1)
    return (weights * rows).sum() / count


def _by_row(output: Tensor, lesson: Lesson) -> Tensor:
    others = lesson.others.to(output.dtype)
    if lesson.comparison == "outputs":
        return _row_means((others - output) ** 2)
    temperature = lesson.temperature.to(output.dtype).view(-1, *[1] * (output.dim() - 1))
    scores = output / temperature
    if lesson.comparison == "softmax":
        divergence = _cross(others, F.log_softmax(scores, CLASS_AXIS)).sum(CLASS_AXIS, keepdim=True)
    else:
        divergence = _cross(others, F.logsigmoid(scores)) + _cross(1 - others, F.logsigmoid(-scores))
    return _row_means(temperature**2 * divergence)


def _cross(share: Tensor, log_own: Tensor) -> Tensor:
    """Return what each probability adds to a KL divergence. A probability of 0 adds nothing."""
    return torch.xlogy(share, share) - share * log_own


def _row_means(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values
