"""Lanes of Keras models on JAX."""

from collections.abc import Callable, Sequence

import jax
import keras
import numpy as np

from modelfleet.frameworks.functional import Programs, Replica, State
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.merging import JaxMerger
from modelfleet.frameworks.jax.replica import lent
from modelfleet.frameworks.keras.definition import KerasDefinition, Loss
from modelfleet.frameworks.keras.functional_engine import KerasEngine
from modelfleet.frameworks.keras.merged import apart  # noqa: F401
from modelfleet.frameworks.keras.steps import outputs
from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.types import Model, Tensor, Tree


class JaxDefinition(KerasDefinition):
    """Steps of one member, under JAX's transformations."""

    def differentiate(self, loss: Loss, params: dict[str, Tensor]) -> tuple[Tree, dict[str, Tensor]]:
        """Return the gradients by `jax.grad`."""
        gradients, rest = jax.grad(loss, has_aux=True)(params)
        return rest, gradients

    def try_out(self, state: State, batch: Tree) -> None:
        """Create the metrics for batches like this one, and raise if the model does not accept it."""
        super().try_out(state, batch)
        own = {part: state[part] for part in ("params", "buffers")}
        jax.eval_shape(self.evaluate, own, self.fresh_metrics(), batch, None)


class Engine(KerasEngine):
    """Engine of a lane (see `frameworks.engine.Engine`)."""

    def __init__(self, context: LaneContext[Task, Programs]) -> None:
        """Make the engine, or use the programs of another one."""
        super().__init__(context, JaxDefinition, JaxBackend(context.device), JaxMerger())


def replica(model: Model, device: jax.Device) -> Replica:
    """Return a replica of a model. On the CPU its weights are not copied."""
    variables = list(model.variables)

    def predict(values: Tree, x: Tree) -> Tree:
        return outputs(model, list(zip(variables, values, strict=True)), x)

    # NumPy views of the variables: a fit of the model then copies an array before it overwrites it.
    values = lent([np.asarray(variable.value) for variable in variables], device)
    return Replica(predict, values, JaxBackend(device), lambda leaf: arrays.place(leaf, device))


def numbers(variable: keras.Variable) -> np.ndarray:
    """Return a variable as a NumPy array; bfloat16 by its bits."""
    return arrays.host(variable.value)


def lend(variable: keras.Variable, array: np.ndarray) -> None:
    """Set a variable to what `numbers` returned. On the CPU the variable reads that memory."""
    # Without 64 bits, JAX has made float32 of float64.
    dtype = "bfloat16" if variable.dtype == "bfloat16" else array.dtype.name
    variable._direct_assign(arrays.restored(array, dtype))


def timed_programs(
    compute: Callable[[Sequence[Tensor]], Tensor], values: Sequence[Tensor]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one computes a number from values, the other its gradients, too. Both wait for it."""
    forward, both = jax.jit(compute), jax.jit(jax.value_and_grad(compute))
    own = list(values)
    return lambda: _wait(forward(own)), lambda: _wait(both(own))


def _wait(found: Tree) -> None:
    jax.block_until_ready(found)
