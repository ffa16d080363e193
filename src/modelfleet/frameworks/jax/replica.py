"""JAX models that only predict."""

import jax
import numpy as np

from modelfleet.frameworks import adapter, functional
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.engine import JaxDefinition
from modelfleet.frameworks.jax.models import raw, variables
from modelfleet.frameworks.jax.task import Task
from modelfleet.members import Member
from modelfleet.types import Model, Precision, Tree


def replica(model: Model, device: jax.Device, precision: Precision) -> functional.Replica:
    """Return a replica that answers batches with a model. On the CPU its weights are not copied."""
    definition = JaxDefinition(model, [Task(precision=precision)])
    state = definition.state(Member("model", model, 0, adapter("jax")))
    state["member"]["step"] = np.int32(0)
    return functional.Replica(
        lambda state, x: definition.predict(state, x)[0],
        lent(state, device),
        JaxBackend(device),
        lambda leaf: arrays.place(leaf, device),
    )


def lent(tree: Tree, device: jax.Device) -> Tree:
    """Return NumPy arrays on a device; on the CPU in the same memory, if that is aligned as JAX requires.

    Nothing writes there: a program that donates an array which is in use elsewhere makes a copy (jax 0.10).
    """
    return jax.device_put(tree, device)


def weight_bytes(model: Model) -> int:
    """Return the size of a model's weights in bytes."""
    return sum(raw(leaf).nbytes for leaf in jax.tree.leaves(variables(model)))
