"""Families: Keras members that may share a lane although their optimizers or their numbers differ."""

from collections.abc import Hashable

from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.structure import without_numbers
from modelfleet.types import Signature


def family(signature: Signature, task: Task) -> Hashable:
    """Return a key that is equal for members that are tried in one lane, whatever their numbers and optimizers."""
    return without_numbers(signature), without_numbers(task.key if task.forward is None else task.forward)
