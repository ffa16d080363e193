"""Lanes of Keras models on JAX."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from modelfleet.frameworks.functional import Programs, State
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.keras.definition import KerasDefinition, KerasEngine, Loss
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
    """The engine of a lane (see `protocol.Engine`)."""

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
        definition = programs.definition if programs else JaxDefinition(members[0].model, task)
        super().__init__(members, definition, JaxBackend(device), fused=fused, programs=programs)
