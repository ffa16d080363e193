"""Steps of a Keras member as pure functions, for the engines of lanes on JAX and on TensorFlow."""

from collections.abc import Callable, Collection, Sequence

import keras
import numpy as np
from keras import ops

from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import Backend, Definition, FunctionalEngine, Programs, State
from modelfleet.frameworks.keras.losses import label_check
from modelfleet.frameworks.keras.optimizers import hyperparameters_in
from modelfleet.frameworks.keras.plain import become_plain
from modelfleet.frameworks.keras.steps import Steps
from modelfleet.frameworks.keras.task import Task, first_models, task_of
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.members import Member
from modelfleet.types import Arrays, Kind, Tensor, Tree

Loss = Callable[[dict[str, Tensor]], tuple[Tensor, Tree]]


class KerasDefinition(Definition):
    """Steps of the members of one lane (see `functional.Definition`); a backend adds `differentiate`."""

    def __init__(self, model: keras.Model, task: Task) -> None:
        self.steps = Steps(model)
        self.task = task
        self.sparse = False  # True once a gradient is that of the rows that were looked up in a table
        self.others: list[KerasDefinition] = []  # those of members with another optimizer

    @classmethod
    def of(cls, context: LaneContext[Task, Programs]) -> "KerasDefinition":
        """Return the definition of a lane, with one for each of its tasks."""
        first, *others = (cls(*own) for own in first_models(context))
        first.others += others
        return first

    @property
    def by_task(self) -> Sequence["KerasDefinition"]:
        """Return the definitions of a lane's tasks, which differ in their optimizers."""
        return [self, *self.others]

    def task_numbers(self, context: LaneContext[Task, Programs]) -> np.ndarray:
        """Return `(member,)`: the number of each member's task."""
        return context.task_numbers

    @property
    def stale(self) -> bool:
        """Return True if a model was changed or compiled again since its definition was made."""
        return any(own.steps.stale for own in self.by_task)

    def differentiate(self, loss: Loss, params: dict[str, Tensor]) -> tuple[Tree, dict[str, Tensor]]:
        """Return what `loss` returns beside the number to differentiate, and the gradients by key."""
        raise NotImplementedError

    @property
    def can_mask_rows(self) -> bool:  # type: ignore[override]
        """Return True if rows of weight 0 have no influence. This is known once the metrics are."""
        return self.steps.can_mask_rows

    def state(self, member: Member) -> State:
        """Return a member's weights, seeds and optimizer's variables."""
        own = self.steps.state(member.model)
        return {
            part: {key: np.asarray(ops.convert_to_numpy(value)) for key, value in own[part].items()}
            for part in ("params", "buffers", "optimizer")
        }

    def try_out(self, state: State, batch: Tree) -> None:
        """Create the metrics for batches like this one."""
        self.steps.build(batch)

    def fresh_metrics(self) -> Arrays:
        """Return a member's metrics before its first batch."""
        return {key: np.asarray(ops.convert_to_numpy(value)) for key, value in self.steps.fresh_metrics().items()}

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        """Return what `apply` needs to finish a step on a batch."""

        def loss(params: dict[str, Tensor]) -> tuple[Tensor, Tree]:
            return self.steps.loss(params, state["buffers"], state["metrics"], state["optimizer"], batch, weights)

        (value, buffers, metrics), found = self.differentiate(loss, state["params"])
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        return {"loss": value, "gradients": gradients, "buffers": buffers, "metrics": metrics}

    def apply(self, state: State, hyper: Hyper, found: dict[str, Tree]) -> tuple[State, Tensor, Tensor]:
        """Return the state after an update by the model's own optimizer."""
        gradients, loss = found["gradients"], found["loss"]
        params, optimizer = self.steps.apply(state["params"], state["optimizer"], gradients)
        # An optimizer that scales the loss skips gradients that are not finite, and tries a smaller scale.
        scales = self.steps.scales_loss
        good_gradient = ops.ones_like(loss, dtype="bool") if scales else _finite(gradients)
        new = {"params": params, "optimizer": optimizer, "buffers": found["buffers"], "metrics": found["metrics"]}
        return new, loss, good_gradient

    def evaluate(
        self, state: State, metrics: dict[str, Tensor], batch: Tree, weights: Tensor | None
    ) -> tuple[dict[str, Tensor], State]:
        """Return the metrics with a batch added, and the seeds and counters that the model has changed."""
        found, changed = self.steps.evaluate(state["params"], state["buffers"], metrics, batch, weights)
        return found, {"buffers": changed}

    def results(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss and the metrics, by the names of Keras's logs."""
        return self.steps.results(metrics)

    def predict(self, state: State, x: Tree) -> tuple[Tree, State]:
        """Return the model's outputs, and the seeds and counters that the model has changed."""
        outputs, changed = self.steps.predict(state["params"], state["buffers"], x)
        return outputs, {"buffers": changed}

    def write_back(self, member: Member, state: State) -> None:
        """Copy a member's weights, seeds and optimizer's variables into its model."""
        # Copies: JAX may keep reading NumPy's memory in place, and this memory belongs to the engine.
        self.steps.write_back(
            member.model, {part: _copied(state[part]) for part in ("params", "buffers", "optimizer")}
        )

    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch: the x of (x,), (x, y) or (x, y, sample_weight), or the batch itself."""
        return batch_parts.weighted_inputs(data)

    def check_targets(self, output_shape: tuple[int, ...], target: Tree, name: str | None) -> None:
        """Raise InputError for labels that the model has no output for."""
        check = label_check(self.steps.model, output_shape, "" if name is None else f"member {name!r}: ")
        if check is not None:
            check(target)

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with such labels."""
        check = label_check(self.steps.model, output_shape)
        if check is None:
            return None
        return lambda batch: check(batch[1]) if isinstance(batch, tuple) and len(batch) > 1 else None


class KerasEngine(FunctionalEngine):
    """A functional engine whose members' models hold the state of their optimizers, too."""

    parts_in_models = ("params", "buffers", "optimizer")

    def __init__(
        self, context: LaneContext[Task, Programs], kind: type[KerasDefinition], backend: Backend
    ) -> None:
        known = None if context.programs is None else context.programs.definition
        if isinstance(known, KerasDefinition) and not known.stale:
            definition = known
        else:
            definition = kind.of(context)
            if context.programs is not None:
                context.programs.renew(definition)
        self._use(context, definition.by_task)
        super().__init__(context, definition, backend)

    def _use(self, context: LaneContext[Task, Programs], definitions: Sequence[KerasDefinition]) -> None:
        """Note the members of the lane, and the definition of each variant."""
        self._members = list(context.members)
        self._tasks = list(context.tasks)
        self._keras = list(definitions)
        self._steps = [definition.steps for definition in definitions]

    def hyperparameters_in(self, tensors: Collection[str]) -> dict[str, str]:
        """Return the hyperparameters that are variables of the optimizer."""
        return hyperparameters_in(tensors)

    def check(self, batch: Batch, name: str) -> None:
        """Try one member on two rows. A single member whose steps are not pure functions then runs plainly."""
        super().check(batch, name)
        if self._width == 1:
            self._run_plainly()

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Prepare the program for batches like this one, if Keras would compute the same."""
        super().ready(kind, hyper, active, batch)
        if self._width == 1:
            self._run_plainly()
        elif (reason := self._apart) is not None:
            raise CannotFuseError(reason)
        elif len(self._keras) > 1 and any(own.sparse for own in self._keras):
            raise CannotFuseError("the gradient of an embedding is not passed on to several optimizers")

    def _run_plainly(self) -> None:
        """Become an engine that calls the model's own functions, if its steps are not pure functions.

        This is known only once a batch has been tried. By then lanes and feeds hold this engine.
        """
        reason = self._apart
        if reason is not None:
            become_plain(self, self._members, reason)

    @property
    def _apart(self) -> str | None:
        """Return why the steps of a variant are not those that Keras would take; None if they are."""
        return next((steps.apart for steps in self._steps if steps.apart is not None), None)

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if all members are compiled as they were when the lane was made."""
        if any(steps.stale for steps in self._steps):
            return False
        return all(task_of(member.model) is task for member, task in zip(members, self._tasks, strict=True))


def apart(programs: Programs) -> str | None:
    """Return why a lane of these programs runs plainly, as far as is known."""
    assert isinstance(programs.definition, KerasDefinition)
    return next((own.steps.apart for own in programs.definition.by_task if own.steps.apart is not None), None)


def _copied(arrays: Arrays) -> Arrays:
    return {key: np.array(array) for key, array in arrays.items()}


def _finite(gradients: dict[str, Tensor]) -> Tensor:
    return ops.all(ops.stack([ops.all(ops.isfinite(gradient)) for gradient in gradients.values()]))
