"""A JAX model as it is, to be asked only."""

from typing import Any

import jax
import numpy as np

from modelfleet.frameworks import adapter, functional
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.engine import JaxDefinition
from modelfleet.frameworks.jax.models import is_module, raw
from modelfleet.frameworks.jax.task import Task
from modelfleet.members import Member


def replica(model: Any, device: jax.Device, precision: str) -> functional.Replica:
    """Answers batches with a model. On the CPU its weights are not copied."""
    definition = JaxDefinition(model, Task(precision=precision))
    state = definition.state(Member("model", model, 0, adapter("jax")))
    state["member"]["step"] = np.int32(0)
    return functional.Replica(
        lambda state, x: definition.predict(state, x)[0],
        lent(state, device),
        JaxBackend(device),
        lambda leaf: arrays.place(leaf, device),
    )


def lent(tree: Any, device: jax.Device) -> Any:
    """NumPy's arrays on a device; on the CPU in the same memory, if that is aligned as JAX has its own.

    Nobody writes there: a program that is to write over an array that somebody else has makes a copy (jax 0.10).
    """
    return jax.device_put(tree, device)


def weight_bytes(model: Any) -> int:
    """What a model's weights take."""
    if is_module(model):
        from flax import nnx

        return sum(raw(leaf).nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    return sum(raw(leaf).nbytes for leaf in jax.tree.leaves(model[0]))
