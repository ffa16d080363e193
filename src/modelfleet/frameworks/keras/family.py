"""Families: Keras members that may share a lane although their optimizers differ, and on JAX their numbers."""

from collections.abc import Hashable

import keras

from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.structure import without_numbers
from modelfleet.types import Signature


def family(signature: Signature, task: Task) -> Hashable:
    """Return a key that is equal for members that are tried in one lane, whatever their optimizers."""
    if keras.backend.backend() == "jax":  # where steps are merged by what they compute
        return without_numbers(signature), without_numbers(task.key if task.forward is None else task.forward)
    return signature, id(task) if task.forward is None else task.forward
