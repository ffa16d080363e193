"""Lanes of Keras models on JAX."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import keras
import numpy as np

from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.functional import FunctionalEngine, Programs, Replica, State
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.merged_definition import MergedDefinition
from modelfleet.frameworks.jax.replica import lent
from modelfleet.frameworks.keras.definition import KerasDefinition, KerasEngine, Loss
from modelfleet.frameworks.keras.steps import outputs
from modelfleet.frameworks.keras.structure import difference, signature
from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.structure import without_numbers
from modelfleet.types import Kind, Model, Tensor, Tree


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


class _Merged(MergedDefinition[JaxDefinition]):
    """Definitions of members that differ only in numbers and optimizers."""

    def _kind(self, own: JaxDefinition) -> Hashable:
        # A number may decide which variables an optimizer has, such as the momentum of SGD.
        return without_numbers(own.task.optimizer), tuple(own.steps.keys["optimizer"])

    def _forward(self, own: JaxDefinition) -> Hashable:
        task = own.task
        return signature(own.steps.model), task.key if task.forward is None else task.forward

    def _update(self, own: JaxDefinition) -> Hashable:
        # Optimizers also apply the constraints of weights.
        return signature(own.steps.model), own.task.optimizer

    def try_out(self, state: State, batch: Tree) -> None:
        """Create the metrics of every variant, whose variables its steps need."""
        for definition in self.definitions[1:]:
            definition.steps.build(batch)
        super().try_out(state, batch)


class Engine(KerasEngine):
    """Engine of a lane (see `frameworks.engine.Engine`)."""

    def __init__(self, context: LaneContext[Task, Programs]) -> None:
        """Make the engine, or use the programs of another one."""
        backend = JaxBackend(context.device)
        if max(context.variants) == 0:
            super().__init__(context, JaxDefinition, backend)
            return
        numbers = {member.name: number for member, number in zip(context.members, context.variants, strict=True)}
        definition = self._merged(context, numbers)
        self._use(context, definition.definitions)
        FunctionalEngine.__init__(self, context, definition, backend)

    @staticmethod
    def _merged(context: LaneContext[Task, Programs], numbers: Mapping[str, int]) -> _Merged:
        """Return the definition of all variants; that of the programs of another engine, if it still holds."""
        firsts = [context.variants.index(number) for number in range(max(context.variants) + 1)]
        models = [context.members[position].model for position in firsts]

        def different(number: int, other: int) -> str:
            found = difference(signature(models[number]), signature(models[other]))
            return found or "it was compiled with other settings"

        known = None if context.programs is None else context.programs.definition
        if isinstance(known, _Merged) and not any(own.steps.stale for own in known.definitions):
            return _Merged(known.definitions, numbers, different)
        tasks = [context.tasks[position] for position in firsts]
        own = [JaxDefinition(model, task) for model, task in zip(models, tasks, strict=True)]
        found = _Merged(own, numbers, different)
        if context.programs is not None:
            context.programs.renew(found)
        return found

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Prepare the program for batches like this one, if Keras would compute the same."""
        super().ready(kind, hyper, active, batch)
        definition = self.programs.definition
        if kind == "train" and isinstance(definition, _Merged):
            definition.check_all(self.state, batch)


def apart(programs: Programs) -> str | None:
    """Return why a lane of these programs runs plainly, as far as is known."""
    definition = programs.definition
    definitions = definition.definitions if isinstance(definition, _Merged) else [definition]
    steps = [own.steps for own in definitions if isinstance(own, JaxDefinition)]
    return next((own.apart for own in steps if own.apart is not None), None)


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
