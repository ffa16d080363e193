"""Nodes of graphs whose models are Keras models, on the backend of this process. On JAX they train."""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from modelfleet.frameworks.keras.nodes.masks import check_output
from modelfleet.frameworks.keras.nodes.reading import ReadingNode
from modelfleet.frameworks.keras.nodes.task import NodeTask, compile, prepare
from modelfleet.frameworks.keras.steps import by_key
from modelfleet.frameworks.node_engine import NodeEngine
from modelfleet.frameworks.stacked import WEIGHTS, Given
from modelfleet.members import Member
from modelfleet.types import NativeDevice, Tensor

__all__ = [
    "add",
    "check_output",
    "clip_factor",
    "compile",
    "fill",
    "make_node",
    "numbers",
    "prepare",
    "to_host",
    "trained",
]


def make_node(
    member: Member,
    task: NodeTask,
    columns: Mapping[str, np.ndarray],
    device: NativeDevice,
    *,
    recompute: bool = False,
) -> NodeEngine:
    """Return the engine of a node."""
    if keras.backend.backend() != "jax":
        return ReadingNode(member, task, device)
    from modelfleet.frameworks.keras.nodes.jax.engine import JaxNode

    return JaxNode(member, task, device, recompute=recompute)


def to_host(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array."""
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def numbers(values: Sequence[float], device: NativeDevice) -> np.ndarray:
    """Return numbers as an array on the host, for a sum."""
    return np.array(values)


def add(total: np.ndarray, other: np.ndarray) -> None:
    """Add an array to another one in place. The gradients that replicas sum are on the host, too."""
    total += other


def clip_factor(norm: float, most: float) -> float:
    """Return what gradients of a norm are multiplied by, as Keras's `global_clipnorm` does it."""
    return 1.0 if norm <= most else most / norm


def trained(model: keras.Model) -> bool:
    """Return True if any weight takes a gradient."""
    return bool(model.trainable_variables)


def fill(model: keras.Model, state: Given) -> None:
    """Copy a node's weights, as its engine has read them, into a model of the same structure."""
    own = by_key(model.variables)
    for part in WEIGHTS:
        for name, value in state.get(part, {}).items():
            own[name].assign(value[0])
