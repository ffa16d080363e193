"""Variants of a lane's JAX members: which members have the same structure and task."""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.functional import Definition, MergedDefinition, State
from modelfleet.frameworks.jax.definition import JaxDefinition
from modelfleet.frameworks.jax.merging import JaxMerger
from modelfleet.frameworks.jax.structure import difference, family, freeze, is_module, signature
from modelfleet.frameworks.jax.task import Task
from modelfleet.frameworks.structure import Signature, without_numbers
from modelfleet.members import Member
from modelfleet.types import Tensor, Tree


@dataclass(frozen=True)
class Variants:
    """Variants of members, counted from 0, each with its first member."""

    names: tuple[str, ...]
    """Names of all members."""
    numbers: tuple[int, ...]
    """Variant of each member."""
    firsts: tuple[int, ...]
    """Position of the first member of each variant."""
    members: tuple[Member, ...]
    """First member of each variant."""
    tasks: tuple[Task, ...]
    """Task of each variant."""
    signatures: tuple[Signature, ...]
    """Structure of each variant."""

    @classmethod
    def of(cls, members: Sequence[Member], tasks: Sequence[Task], numbers: Sequence[int]) -> "Variants":
        """Return the variants of members whose numbers are known."""
        firsts = [list(numbers).index(number) for number in range(max(numbers) + 1)]
        own = tuple(members[position] for position in firsts)
        return cls(
            tuple(member.name for member in members),
            tuple(numbers),
            tuple(firsts),
            own,
            tuple(tasks[position] for position in firsts),
            tuple(signature(member.model) for member in own),
        )

    @classmethod
    def found(cls, members: Sequence[Member], tasks: Sequence[Task]) -> "Variants":
        """Return the variants of members as their models are now."""
        known: dict[tuple[int, Signature], int] = {}
        numbers = [
            known.setdefault((id(task), signature(member.model)), len(known))
            for member, task in zip(members, tasks, strict=True)
        ]
        return cls.of(members, tasks, numbers)

    @property
    def count(self) -> int:
        """Return the number of variants."""
        return len(self.members)

    def still_hold(self, members: Sequence[Member]) -> bool:
        """Return True if some of the members, the first ones, still have the structures of their variants."""
        # What a pair's function reads is watched. So the structures of pairs change only with these values.
        own = members if is_module(members[0].model) else self.members
        numbers = self.numbers if own is members else range(self.count)
        return all(
            signature(member.model) == self.signatures[number]
            for member, number in zip(own, numbers, strict=False)
        )

    def unlike(self) -> str | None:
        """Return the first difference between the variants that is more than a number; None if there is none."""
        families = [family(*own) for own in zip(self.signatures, self.tasks, strict=True)]
        number = next((number for number, own in enumerate(families) if own != families[0]), None)
        if number is None:
            return None
        name, first = self.members[number].name, self.members[0].name
        return f"{name!r} now differs from {first!r}: {self.difference(number)}"

    def first(self) -> "Variants":
        """Return the first variant as that of all members."""
        return replace(
            self,
            numbers=(0,) * len(self.numbers),
            firsts=self.firsts[:1],
            members=self.members[:1],
            tasks=self.tasks[:1],
            signatures=self.signatures[:1],
        )

    def difference(self, number: int, other: int = 0) -> str:
        """Return what differs between two variants."""
        found = difference(self.signatures[number], self.signatures[other])
        return found or "it was compiled with other settings"

    def definition(self) -> Definition:
        """Return the definition of the steps of all members."""
        own = [JaxDefinition(member.model, task) for member, task in zip(self.members, self.tasks, strict=True)]
        if len(own) == 1:
            return own[0]
        return _Merged(JaxMerger(), own, dict(zip(self.names, self.numbers, strict=True)), self.difference)


class _Merged(MergedDefinition[JaxDefinition]):
    """Definitions of members that differ only in numbers and optimizers. Equal optimizers are traced once."""

    def _kind(self, own: JaxDefinition) -> Hashable:
        optimizer = own.task.optimizer
        if optimizer is None:
            return None
        return without_numbers(freeze((optimizer.name, optimizer.make, optimizer.fixed, optimizer.own)))

    def _forward(self, own: JaxDefinition) -> Hashable:
        return signature(own.model), replace(own.task, optimizer=None)

    def _update(self, own: JaxDefinition) -> Hashable:
        return own.task.optimizer

    def train(
        self, state: State, hyper: Hyper, batch: Tree, weights: Tensor | None
    ) -> tuple[State, Tensor, Tensor]:
        """Return what `apply` returns after a whole step."""
        if len(self._different("apply")) == 1:
            with suppress(_LossNeeded):
                found = self.gradients(state, batch, weights)
                return self.first.apply(state, hyper, found, _refuse)
        return super().train(state, hyper, batch, weights)


class _LossNeeded(Exception):  # noqa: N818  not an error: see `_Merged.train`
    """Raised if an optimizer computes the loss of other params, which depends on the variant."""


def _refuse(params: Tree) -> Tensor:
    raise _LossNeeded


def definitions_of(definition: Definition) -> list[JaxDefinition]:
    """Return the definitions of the variants."""
    found = definition.definitions if isinstance(definition, MergedDefinition) else [definition]
    assert all(isinstance(own, JaxDefinition) for own in found)
    return found  # type: ignore[return-value]
