"""Lanes of Keras models on TensorFlow."""

from collections.abc import Callable, Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import NOTHING_LEFT, Hyper, Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import Programs, Replica, State
from modelfleet.frameworks.keras.definition import KerasDefinition, Loss
from modelfleet.frameworks.keras.functional_engine import KerasEngine
from modelfleet.frameworks.keras.merged import apart  # noqa: F401
from modelfleet.frameworks.keras.replica import is_double
from modelfleet.frameworks.keras.steps import outputs
from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.tensorflow import arrays
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.merging import TensorFlowMerger
from modelfleet.frameworks.tensorflow.replica import dense
from modelfleet.types import Kind, Model, Tensor, Tree


class TensorFlowDefinition(KerasDefinition):
    """Steps of one member, under TensorFlow's gradient tape."""

    def differentiate(self, loss: Loss, params: dict[str, Tensor]) -> tuple[Tree, dict[str, Tensor]]:
        """Return the gradients by `tf.GradientTape`."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            value, rest = loss(params)
        # An embedding's gradient stays the rows that were looked up: Keras's optimizers square them one by one.
        found = tape.gradient(value, params)
        self.sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in found.values())
        if self.steps.clips and self.sparse:
            # Keras sums them by row before it takes their norm, and how many rows there are depends on the data.
            self.steps.apart = "its optimizer clips the gradient of an embedding"
        return rest, found

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        """Return what `apply` needs to finish a step, with whole tables for embeddings."""
        found = super().gradients(state, batch, weights)
        return {**found, "gradients": {name: tf.convert_to_tensor(g) for name, g in found["gradients"].items()}}

    def train(
        self, state: State, hyper: Hyper, batch: Tree, weights: Tensor | None
    ) -> tuple[State, Tensor, Tensor]:
        """Take a whole step. Here the gradient of an embedding stays the rows that were looked up."""
        return self.apply(state, hyper, super().gradients(state, batch, weights))

    def try_out(self, state: State, batch: Tree) -> None:
        """Create the metrics for batches like this one, and raise if the model does not accept it."""
        super().try_out(state, batch)
        own = {part: state[part] for part in ("params", "buffers")}
        self.evaluate(own, self.fresh_metrics(), batch, None)


class Engine(KerasEngine):
    """Engine of a lane (see `frameworks.engine.Engine`)."""

    def __init__(self, context: LaneContext[Task, Programs]) -> None:
        """Make the engine, or use the programs of another one."""
        # The backend of the other engine, if there is one: it knows how its programs run.
        known = context.programs.backend if context.programs else TensorFlowBackend(context.device)
        assert isinstance(known, TensorFlowBackend)
        self._tensorflow = known
        super().__init__(context, TensorFlowDefinition, known, TensorFlowMerger())

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Prepare the program for batches like this one. Loops over time are not fused, as this would be slow."""
        if kind == "train" and self._width > 1:
            for layer in self._steps[0].model._flatten_layers():
                if isinstance(layer, keras.layers.RNN) and not layer.unroll:
                    raise CannotFuseError(
                        f"TensorFlow runs the loop over time steps of {layer.name!r} faster for one member after "
                        f"the other; unroll=True can be fused"
                    )
        super().ready(kind, hyper, active, batch)

    @property
    def program(self) -> str:
        """Return how train steps run, and which of their operations run for one member after the other."""
        looped = sorted({"draws" if "Random" in kind else kind for kind in self._tensorflow.looped})
        return f"{super().program}; {', '.join(looped)} one by one" if looped else super().program

    @property
    def compiling(self) -> bool:
        """Return True if XLA is compiling during the training."""
        return any(graph.compiling for graph in self._tensorflow.graphs)

    def stop(self) -> None:
        """Do nothing: XLA can't be interrupted. Its work takes seconds, and serves the next fit."""

    def train(self, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take the steps of a batch for the active members."""
        self._tensorflow.calls_left = pace[0] / (batch.steps or 1)
        super().train(hyper, active, batch, pace)


def replica(model: Model, device: str) -> Replica:
    """Return a replica of a model, which reads the model's own variables."""
    exact = is_double(model.variables)
    place = partial(arrays.place, device=device, exact=exact)
    return Replica(lambda _, x: dense(outputs(model, (), x)), None, TensorFlowBackend(device), place)


def numbers(variable: keras.Variable) -> np.ndarray:
    """Return a variable as a NumPy array; bfloat16 by its bits."""
    return arrays.host(variable.value)


def lend(variable: keras.Variable, array: np.ndarray) -> None:
    """Set a variable to a copy of what `numbers` returned: a variable of TensorFlow owns its memory."""
    variable.assign(arrays.from_host(array, variable.value))


def timed_programs(
    compute: Callable[[Sequence[Tensor]], Tensor], values: Sequence[Tensor]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one computes a number from values, the other its gradients, too. Both wait for it."""
    own = [tf.convert_to_tensor(value) for value in values]

    @tf.function
    def forward() -> tf.Tensor:
        return compute(own)

    @tf.function
    def both() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(own)
            found = compute(own)
        return found, [part for part in tape.gradient(found, own) if part is not None]

    def wait(found: Tree) -> None:
        for part in tf.nest.flatten(found):
            np.asarray(tf.convert_to_tensor(part))

    return lambda: wait(forward()), lambda: wait(both())
