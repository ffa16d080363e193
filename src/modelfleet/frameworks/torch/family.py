"""Families: which torch members are tried in one lane, although their structures or tasks differ.

Each function below returns a part of a family without what members of one lane may differ in.
"""

from collections.abc import Hashable
from typing import Any

from torch import nn

from modelfleet.frameworks.structure import Signature
from modelfleet.frameworks.torch.losses import Loss
from modelfleet.frameworks.torch.structure import signature, without_numbers
from modelfleet.frameworks.torch.task import Task
from modelfleet.frameworks.torch.values import Freezer
from modelfleet.frameworks.torch.values import without_numbers as without_numbers_of
from modelfleet.frameworks.torch.widths.family import without_sizes


def family(own: Signature, task: Task) -> Hashable:
    """Return a value that is equal for members that are tried in one lane."""
    return without_sizes(without_numbers(own)), task_family(task)


def task_family(task: Task) -> Hashable:
    """Return a task without its optimizer, and without the numbers and class weights of its loss and objective.

    A lane applies an optimizer to each slice of its members (`optimizers/slices.py`).
    """
    kept = vars(task)
    if "_family" not in kept:  # for thousands of members, a task is read once
        kept["_family"] = (
            loss_family(task.loss),
            function_family(task.objective),
            tuple(id(metric) for metric in task.metrics),
            task.precision,
        )
    return kept["_family"]


def loss_family(loss: Loss | None) -> Hashable:
    """Return a loss without its numbers and class weights."""
    if loss is None:
        return None
    return loss.name if loss.rows is not None else function_family(loss.plain)


def function_family(function: Any) -> Hashable:
    """Return a loss or an objective without its numbers, and without what is in its tensors."""
    if isinstance(function, nn.Module):
        return without_numbers(signature(function))
    return without_numbers_of(Freezer(contents=False).freeze(function))
