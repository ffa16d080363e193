"""From members and a recipe to lanes: who is fused with whom, and who can't be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelfleet.errors import InputError, StrategyError
from modelfleet.feeds import Feed
from modelfleet.lanes import Lane
from modelfleet.members import Member
from modelfleet.planning.groups import group
from modelfleet.recipe import Recipe


@dataclass
class Assembly:
    """The lanes of a fleet, as one recipe and one strategy make them.

    `programs` remembers the programs of every structure and task met so far, so that another set of lanes of the
    same structure traces and compiles nothing anew.
    """

    framework: Any
    device: Any
    programs: list[tuple[Any, Any, bool, Any]] = field(default_factory=list)

    def lanes(self, members: Sequence[Member], recipe: Recipe, *, fused: bool) -> list[Lane]:
        """A lane for every group, or for every member where they are not to be fused."""
        names = [member.name for member in members]
        prepared = self.framework.prepare(recipe, names)
        twice = self.framework.trained_twice([member.model for member in members])
        if twice is not None:
            first, second, parameter = twice
            raise InputError(
                f"members {names[first]!r} and {names[second]!r} share the trained parameter {parameter!r}: "
                f"one would undo the other's steps. Freeze it (requires_grad=False), or give each its own copy."
            )
        signatures = [self.framework.signature(member.model) for member in members]
        lanes = []
        for found in group(names, signatures, prepared.tasks, self.framework.difference):
            signature, task = signatures[found.positions[0]], prepared.tasks[found.positions[0]]
            parts = [found.positions] if fused else [(position,) for position in found.positions]
            for positions in parts:
                reason = found.reason or (None if fused else 'strategy="interleaved"')
                lanes.append(self._lane(members, positions, signature, task, prepared, fused, reason))
        return lanes

    def singles(self, lane: Lane, reason: str) -> list[Lane]:
        """The members of a lane that can't be fused, a lane each."""
        singles = [self._again(lane, position, reason) for position in range(len(lane.members))]
        for single in singles:
            single.engine.open_sums(lane.engine.sums)
        return singles

    def _lane(
        self,
        members: Sequence[Member],
        positions: Sequence[int],
        signature: Any,
        task: Any,
        prepared: Any,
        fused: bool,
        reason: str | None,
    ) -> Lane:
        rows = np.array(positions)
        columns = {name: column[rows] for name, column in prepared.columns.items()}
        schedules = [prepared.schedules[position] for position in positions]
        own = [members[position] for position in positions]
        return self._make(own, signature, task, columns, schedules, fused, reason)

    def _again(self, lane: Lane, position: int, reason: str) -> Lane:
        columns = {name: column[[position]] for name, column in lane.columns.items()}
        own, schedules = [lane.members[position]], [lane.schedules[position]]
        return self._make(own, lane.signature, lane.engine.task, columns, schedules, False, reason)

    def _make(
        self,
        members: Sequence[Member],
        signature: Any,
        task: Any,
        columns: Mapping[str, np.ndarray],
        schedules: Sequence[Any],
        fused: bool,
        reason: str | None,
    ) -> Lane:
        device = self.framework.torch_device(self.device)
        programs = next((p for s, t, f, p in self.programs if f == fused and s == signature and t == task), None)
        engine = self.framework.Engine(members, task, columns, device, fused=fused, programs=programs)
        if programs is None:
            self.programs.append((signature, task, fused, engine.programs))
        return Lane(members, engine, signature, columns, schedules, reason)


def settle(
    assembly: Assembly, lanes: Sequence[tuple[Lane, Feed]], kind: str, strategy: str
) -> list[tuple[Lane, Feed]]:
    """Make sure that every lane can take its steps: trace them, and part members that can't be fused."""
    if strategy == "fused":
        for lane, _ in lanes:
            if lane.reason is not None:
                raise StrategyError(
                    f"not all members can be fused: {lane.reason}. "
                    f'Make them alike, or drop strategy="fused" and let them take turns.'
                )
    settled: list[tuple[Lane, Feed]] = []
    for lane, feed in lanes:
        try:
            lane.ready(feed.first(), kind)
            settled.append((lane, feed))
        except assembly.framework.CannotTraceError as error:
            if strategy == "fused":
                raise StrategyError(
                    f"member {lane.names[0]!r} and those like it can't be fused: {error}. "
                    f'Drop strategy="fused" and let them take turns.'
                ) from error
            for position, single in enumerate(assembly.singles(lane, f"not fused: {error}")):
                settled.append((single, feed.select([position])))
    for lane, feed in settled:
        lane.ready(feed.first(), kind)
    return settled
