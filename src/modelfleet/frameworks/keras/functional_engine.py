"""Engine of lanes of Keras members whose steps are pure functions: on JAX and on TensorFlow."""

from collections.abc import Collection, Sequence

from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import Backend, FunctionalEngine, Programs
from modelfleet.frameworks.functional.merged_definition import Merger
from modelfleet.frameworks.keras.definition import KerasDefinition
from modelfleet.frameworks.keras.merged import KerasMerged, definition_of, definitions_of
from modelfleet.frameworks.keras.optimizers import hyperparameters_in
from modelfleet.frameworks.keras.plain import become_plain
from modelfleet.frameworks.keras.task import Task, task_of
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.members import Member
from modelfleet.types import Kind, Tensor


class KerasEngine(FunctionalEngine):
    """A functional engine whose members' models hold the state of their optimizers, too."""

    parts_in_models = ("params", "buffers", "optimizer")

    def __init__(
        self, context: LaneContext[Task, Programs], kind: type[KerasDefinition], backend: Backend, merger: Merger
    ) -> None:
        """Make the engine, or use the programs of another one.

        Args:
            context: The lane's members.
            kind: Class of the definition of one member's steps.
            backend: The framework on the lane's device.
            merger: Merges the steps of members that differ in numbers.
        """
        definition = definition_of(context, kind, merger)
        self._members = list(context.members)
        self._tasks = list(context.tasks)
        self._keras = definitions_of(definition)
        self._steps = [own.steps for own in self._keras]
        super().__init__(context, definition, backend)

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
        definition = self.programs.definition
        if self._width == 1:
            self._run_plainly()
        elif (reason := self._apart) is not None:
            raise CannotFuseError(reason)
        elif len(definition.by_task) > 1 and any(own.sparse for own in self._keras):
            raise CannotFuseError("the gradient of an embedding is not passed on to several optimizers")
        if kind == "train" and isinstance(definition, KerasMerged):
            definition.check_all(self.state, batch)

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
