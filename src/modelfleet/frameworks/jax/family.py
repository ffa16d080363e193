"""Families: JAX members that may share a lane although their optimizers differ."""

from collections.abc import Hashable
from dataclasses import replace

from modelfleet.frameworks.jax.task import Task
from modelfleet.types import Signature


def family(signature: Signature, task: Task) -> Hashable:
    """Return a key that is equal for members of one structure and one recipe, whatever their optimizers."""
    return signature, replace(task, optimizer=None), id(task.own)
