"""Families: Keras members that may share a lane although their optimizers differ."""

from collections.abc import Hashable

from modelfleet.frameworks.keras.task import Task
from modelfleet.types import Signature


def family(signature: Signature, task: Task) -> Hashable:
    """Return a key that is equal for members that are tried in one lane, whatever their optimizers."""
    return signature, id(task) if task.family is None else task.family
