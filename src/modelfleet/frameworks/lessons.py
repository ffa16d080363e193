"""Lessons: what a member is to learn from the others, as a part of the target of its batch.

`runs/teaching.py` writes them, and the task of a framework reads them.
"""

from typing import Literal, NamedTuple

from modelfleet.types import Tensor, Tree

Comparison = Literal["softmax", "sigmoid", "outputs"]
"""What of a member's output is compared with that of the others: its softmax, its sigmoid, or the output."""
COMPARISONS: tuple[Comparison, ...] = ("softmax", "sigmoid", "outputs")

_TARGET, _WEIGHT, _TEMPERATURE = "target of the member", "weight of the lesson", "temperature of the lesson"


class Lesson(NamedTuple):
    """What the others answer on the rows of a batch."""

    comparison: Comparison
    others: Tensor
    """Mean over the others, `(row, …)` as the member's output."""
    weight: Tensor
    """`(row,)`: 0 if there are no others."""
    temperature: Tensor
    """`(row,)`."""


def with_lesson(target: Tree, lesson: Lesson) -> Tree:
    """Return a target that has a lesson. All leaves have the row as an axis, so batches can be cut and padded."""
    parts = {lesson.comparison: lesson.others, _WEIGHT: lesson.weight, _TEMPERATURE: lesson.temperature}
    return {_TARGET: target, **parts}


def split_lesson(target: Tree) -> tuple[Tree, Lesson | None]:
    """Return the member's own target, and the lesson if there is one."""
    if not isinstance(target, dict) or _TARGET not in target:
        return target, None
    (comparison,) = (one for one in COMPARISONS if one in target)
    return target[_TARGET], Lesson(comparison, target[comparison], target[_WEIGHT], target[_TEMPERATURE])
