"""Families: Keras members that may share a lane although their optimizers differ."""

from collections.abc import Hashable

import keras

from modelfleet.frameworks.keras.task import Task
from modelfleet.types import Signature


def family(signature: Signature, task: Task) -> Hashable:
    """Return a key that is equal for members that are tried in one lane.

    On torch, and with an optimizer that scales the loss, members have the same optimizer.
    """
    apart = task.family is None or keras.backend.backend() == "torch"
    return signature, id(task) if apart else task.family
