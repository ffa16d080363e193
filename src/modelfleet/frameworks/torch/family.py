"""Families: torch members that may share a lane although their structures or tasks differ."""

from collections.abc import Hashable

from modelfleet.frameworks.torch.task import Task
from modelfleet.types import Signature


def family(signature: Signature, task: Task) -> Hashable:
    """Return a key that is equal for members that are tried in one lane.

    The optimizer is not part of it: a lane applies one to each slice of its members (`optimizers/slices.py`).
    """
    return signature, _without_optimizer(task)


def _without_optimizer(task: Task) -> Hashable:
    """Return everything of a task that forward and backward depend on."""
    # By identity: a user's loss may be anything, and what was resolved from the same recipe is the same object.
    loss = None if task.loss is None else (task.loss.name, id(task.loss.plain))
    return (
        loss,
        id(task.objective),
        tuple((metric.name, id(metric.sums)) for metric in task.metrics),
        task.precision,
    )
