"""Lanes of Keras models on TensorFlow."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import Programs, Replica, State
from modelfleet.frameworks.keras.definition import KerasDefinition, KerasEngine, Loss
from modelfleet.frameworks.keras.replica import is_double
from modelfleet.frameworks.keras.steps import outputs
from modelfleet.frameworks.tensorflow import arrays
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.replica import dense
from modelfleet.members import Member
from modelfleet.types import Kind


class TensorFlowDefinition(KerasDefinition):
    """The steps of one member, under TensorFlow's gradient tape."""

    def differentiate(self, loss: Loss, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The gradients by `tf.GradientTape`."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            value, rest = loss(params)
        # Those of an embedding stay the rows that were looked up: Keras's optimizers square them one by one.
        found = tape.gradient(value, params)
        if self.steps.clips and any(isinstance(gradient, tf.IndexedSlices) for gradient in found.values()):
            # Keras sums them by row before it takes their norm, and how many rows there are depends on the data.
            self.steps.apart = "its optimizer clips the gradient of an embedding"
        return rest, found

    def gradients(self, state: State, batch: Any, weights: Any) -> dict[str, Any]:
        """Return what a step makes of a batch before its optimizer does, with whole tables for embeddings."""
        found = super().gradients(state, batch, weights)
        return {**found, "gradients": {name: tf.convert_to_tensor(g) for name, g in found["gradients"].items()}}

    def train(self, state: State, hyper: Any, batch: Any, weights: Any) -> tuple[State, Any, Any]:
        """Take a whole step. Here the gradient of an embedding stays the rows that were looked up."""
        return self.apply(state, hyper, super().gradients(state, batch, weights))

    def try_out(self, state: State, batch: Any) -> None:
        """Make the metrics for batches like this one, and see whether the model takes it."""
        super().try_out(state, batch)
        own = {part: state[part] for part in ("params", "buffers")}
        self.evaluate(own, self.fresh_metrics(), batch, None)


class Engine(KerasEngine):
    """The engine of a lane (see `frameworks.engine.Engine`)."""

    def __init__(
        self,
        members: Sequence[Member],
        task: Any,
        columns: Mapping[str, np.ndarray],
        device: str,
        *,
        fused: bool,
        programs: Programs | None = None,
    ) -> None:
        definition = TensorFlowDefinition(members[0].model, task)
        # Of the other engine, too: it knows how its programs run.
        self._tensorflow: Any = programs.backend if programs else TensorFlowBackend(device)
        super().__init__(members, definition, self._tensorflow, fused=fused, programs=programs)

    def ready(self, kind: Kind, hyper: Any, active: Any, data: Any, *, shared: bool) -> None:
        """Have the program for batches like this one; loops over time are slow fused, and are not."""
        if kind == "train" and self._width > 1:
            for layer in self._keras.steps.model._flatten_layers():
                if isinstance(layer, keras.layers.RNN) and not layer.unroll:
                    raise CannotFuseError(
                        f"TensorFlow runs the loop over time steps of {layer.name!r} faster for one member after "
                        f"the other; unroll=True can be fused"
                    )
        super().ready(kind, hyper, active, data, shared=shared)

    @property
    def program(self) -> str:
        """How the train steps run, and what in them runs for one member after the other."""
        looped = sorted({"draws" if "Random" in kind else kind for kind in self._tensorflow.looped})
        return f"{super().program}; {', '.join(looped)} one by one" if looped else super().program

    @property
    def compiling(self) -> bool:
        """Whether XLA is at work beside the training."""
        return any(graph.compiling for graph in self._tensorflow.graphs)

    def stop(self) -> None:
        """XLA can't be interrupted. What it is at takes seconds, and serves the next fit."""

    def train(
        self,
        hyper: Any,
        active: Any,
        data: Any,
        weights: Any,
        *,
        shared: bool,
        pace: Any = None,
        steps: int | None = None,
    ) -> None:
        """One step of the active members, or `steps` of them on data (and weights) with a step axis."""
        self._tensorflow.calls_left = pace[0] / (steps or 1) if pace else 0
        super().train(hyper, active, data, weights, shared=shared, pace=pace, steps=steps)


def replica(model: Any, device: str) -> Replica:
    """Answers batches with a model: its own variables are read where they are."""
    exact = is_double(model.variables)
    place = partial(arrays.place, device=device, exact=exact)
    return Replica(lambda _, x: dense(outputs(model, (), x)), None, TensorFlowBackend(device), place)


def numbers(variable: Any) -> np.ndarray:
    """A variable's numbers in NumPy's terms: of bfloat16 the bits."""
    return arrays.host(variable.value)


def lend(variable: Any, array: np.ndarray) -> None:
    """Give a variable what `numbers` gave, copied: a variable of TensorFlow has memory of its own."""
    variable.assign(arrays.from_host(array, variable.value))
