"""Keras members of one lane that differ in numbers and optimizers, on JAX and on TensorFlow."""

from collections.abc import Hashable, Mapping

from modelfleet.frameworks.functional import MergedDefinition, Programs
from modelfleet.frameworks.functional.merged_definition import Merger
from modelfleet.frameworks.keras.definition import KerasDefinition
from modelfleet.frameworks.keras.structure import difference, signature
from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.structure import without_numbers
from modelfleet.types import State, Tree


class KerasMerged(MergedDefinition[KerasDefinition]):
    """Definitions of members that differ only in numbers and optimizers."""

    def _kind(self, own: KerasDefinition) -> Hashable:
        # A number may decide which variables an optimizer has, such as the momentum of SGD.
        return without_numbers(own.task.optimizer), tuple(own.steps.keys["optimizer"])

    def _forward(self, own: KerasDefinition) -> Hashable:
        task = own.task
        return signature(own.steps.model), task.key if task.forward is None else task.forward

    def _update(self, own: KerasDefinition) -> Hashable:
        # Optimizers also apply the constraints of weights.
        return signature(own.steps.model), own.task.optimizer

    def try_out(self, state: State, batch: Tree) -> None:
        """Create the metrics of every variant, whose variables its steps need."""
        for definition in self.definitions[1:]:
            definition.steps.build(batch)
        super().try_out(state, batch)


def definition_of(
    context: LaneContext[Task, Programs], kind: type[KerasDefinition], merger: Merger
) -> KerasDefinition | KerasMerged:
    """Return the definition of a lane's members; that of the programs of another engine, if it still holds."""
    known = None if context.programs is None else context.programs.definition
    holds = known is not None and not any(own.steps.stale for own in definitions_of(known))
    if max(context.variants) == 0:
        if holds and isinstance(known, KerasDefinition):
            return known
        found: KerasDefinition | KerasMerged = kind(context.members[0].model, context.task)
    else:
        numbers = {m.name: number for m, number in zip(context.members, context.variants, strict=True)}
        own = definitions_of(known) if holds else _new_definitions(context, kind)
        found = _merged(merger, own, numbers)
        if holds:
            return found
    if context.programs is not None:
        context.programs.renew(found)
    return found


def definitions_of(definition: object) -> list[KerasDefinition]:
    """Return the definitions of the variants."""
    if isinstance(definition, KerasMerged):
        return definition.definitions
    assert isinstance(definition, KerasDefinition)
    return [definition]


def apart(programs: Programs) -> str | None:
    """Return why a lane of these programs runs plainly, as far as is known."""
    steps = [own.steps for own in definitions_of(programs.definition)]
    return next((own.apart for own in steps if own.apart is not None), None)


def _new_definitions(context: LaneContext[Task, Programs], kind: type[KerasDefinition]) -> list[KerasDefinition]:
    return [kind(context.members[position].model, context.tasks[position]) for position in context.firsts]


def _merged(merger: Merger, own: list[KerasDefinition], numbers: Mapping[str, int]) -> KerasMerged:
    def different(number: int, other: int) -> str:
        found = difference(*(signature(own[one].steps.model) for one in (number, other)))
        return found or "it was compiled with other settings"

    return KerasMerged(merger, own, numbers, different)
