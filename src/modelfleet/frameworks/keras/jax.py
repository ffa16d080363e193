"""Lanes of Keras models on JAX."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from modelfleet.frameworks.functional import Programs, Replica, State
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.replica import lent
from modelfleet.frameworks.keras.definition import KerasDefinition, KerasEngine, Loss
from modelfleet.frameworks.keras.steps import outputs
from modelfleet.members import Member


class JaxDefinition(KerasDefinition):
    """The steps of one member, under JAX's transformations."""

    def differentiate(self, loss: Loss, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The gradients by `jax.grad`."""
        gradients, rest = jax.grad(loss, has_aux=True)(params)
        return rest, gradients

    def try_out(self, state: State, batch: Any) -> None:
        """Make the metrics for batches like this one, and see whether the model takes it."""
        super().try_out(state, batch)
        own = {part: state[part] for part in ("params", "buffers")}
        jax.eval_shape(self.evaluate, own, self.fresh_metrics(), batch, None)


class Engine(KerasEngine):
    """The engine of a lane (see `frameworks.engine.Engine`)."""

    def __init__(
        self,
        members: Sequence[Member],
        task: Any,
        columns: Mapping[str, np.ndarray],
        device: jax.Device,
        *,
        fused: bool,
        programs: Programs | None = None,
    ) -> None:
        definition = JaxDefinition(members[0].model, task)
        super().__init__(members, definition, JaxBackend(device), fused=fused, programs=programs)


def replica(model: Any, device: jax.Device) -> Replica:
    """Answers batches with a model. On the CPU its weights are not copied."""
    variables = list(model.variables)

    def predict(values: Any, x: Any) -> Any:
        return outputs(model, list(zip(variables, values, strict=True)), x)

    # NumPy's views of them: a fit of the model then copies what it would write over.
    values = lent([np.asarray(variable.value) for variable in variables], device)
    return Replica(predict, values, JaxBackend(device), lambda leaf: arrays.place(leaf, device))


def numbers(variable: Any) -> np.ndarray:
    """A variable's numbers in NumPy's terms: of bfloat16 the bits."""
    return arrays.host(variable.value)


def lend(variable: Any, array: np.ndarray) -> None:
    """Give a variable what `numbers` gave; on the CPU it reads that memory."""
    # Of float64 there may be float32 only: what JAX made of it without 64 bits.
    dtype = "bfloat16" if variable.dtype == "bfloat16" else array.dtype.name
    variable._direct_assign(arrays.restored(array, dtype))
