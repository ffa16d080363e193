"""Nodes of graphs whose models are TensorFlow's own: modules, functions and SavedModels. They only predict."""

from collections.abc import Mapping, Sequence

import numpy as np

from modelfleet.frameworks.arrays import host as to_host
from modelfleet.frameworks.predicting_node import PredictingNode
from modelfleet.frameworks.stacked import Given
from modelfleet.frameworks.tensorflow.recipe import compile, prepare
from modelfleet.frameworks.tensorflow.replica import replica
from modelfleet.frameworks.tensorflow.task import Task
from modelfleet.members import Member
from modelfleet.types import Model

__all__ = ["add", "compile", "fill", "make_node", "numbers", "prepare", "to_host", "trained"]


def make_node(
    member: Member, task: Task, columns: Mapping[str, np.ndarray], device: str, *, recompute: bool = False
) -> PredictingNode:
    """Return the engine of a node."""
    return PredictingNode(
        member.name,
        replica(member.model, device, "float32"),
        host=device.startswith("CPU"),
        untrained=f"node {member.name!r} is a model of TensorFlow's own, which only predicts. Give a keras.Model.",
    )


def numbers(values: Sequence[float], device: str) -> np.ndarray:
    """Return numbers as an array, for a sum."""
    return np.array(values)


def add(total: np.ndarray, other: np.ndarray) -> None:
    """Add an array to another one in place."""
    total += other


def trained(model: Model) -> bool:
    """Return False: these models do not say what their weights are."""
    return False


def fill(model: Model, state: Given) -> None:
    """Do nothing: nothing is trained."""
