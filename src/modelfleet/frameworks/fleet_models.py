"""Models of a fleet that are one node of a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from modelfleet.frameworks.recipe import Prepared
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind, Model, ScheduleLike

if TYPE_CHECKING:
    from modelfleet.frameworks.adapter_protocol import Adapter
    from modelfleet.frameworks.lane_context import Task


@dataclass(frozen=True, eq=False)
class FleetModels:
    """Models of a fleet's members. They take the place of a node's model, and can be sent to other processes."""

    names: tuple[str, ...]
    models: tuple[Model, ...]
    seeds: tuple[int, ...]
    recipes: tuple[Recipe | None, ...]
    """What each member was compiled with in its fleet; None if it is trained by the graph's recipe."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def compiled(self) -> bool:
        """Return True if every member has a recipe of its own."""
        return all(self.recipes)

    def members(self, framework: "Adapter") -> list[Member]:
        """Return the members of the fleet."""
        return [
            Member(name, model, seed, framework)
            for name, model, seed in zip(self.names, self.models, self.seeds, strict=True)
        ]

    def copy(self, framework: "Adapter") -> "FleetModels":
        """Return a copy with models of its own."""
        return replace(self, models=tuple(map(framework.copy_model, self.models)))


def prepare_members(
    models: FleetModels, node: str, recipe: Recipe | None, framework: "Adapter", kind: Kind
) -> Prepared["Task"]:
    """Return the tasks, schedules and hyperparameters of a fleet's members.

    Args:
        models: The fleet.
        node: The name of its node.
        recipe: The recipe of the graph, for members without one of their own; None for predicting.
        framework: The adapter of the members.
        kind: The verb.
    """
    members = models.members(framework)
    together: dict[int, list[int]] = {}
    by_id: dict[int, Recipe | None] = {}
    graphs = None
    if recipe is not None and not models.compiled:
        graphs = replace(recipe.of(node), clip_norm=None)  # it clips the gradient of all nodes together
    for position, own in enumerate(models.recipes):
        chosen = graphs if own is None else own
        by_id[id(chosen)] = chosen
        together.setdefault(id(chosen), []).append(position)
    tasks: dict[int, Task] = {}
    schedules: dict[int, ScheduleLike] = {}
    columns: dict[str, np.ndarray] = {}
    for key, positions in together.items():
        chosen = by_id[key]
        some = [members[position] for position in positions]
        own = None if chosen is None else chosen.only([member.name for member in some])
        found = framework.prepare(own, some, kind)
        tasks.update(zip(positions, found.tasks, strict=True))
        schedules.update(zip(positions, found.schedules, strict=True))
        for name, column in found.columns.items():
            columns.setdefault(name, np.full(len(members), np.nan))[positions] = column
    order = range(len(members))
    return Prepared([tasks[one] for one in order], [schedules[one] for one in order], columns)


def member_targets(y: object, names: Sequence[str]) -> list[object] | None:
    """Return the targets of every member if y is a dict by member name; None if all members have the same."""
    if isinstance(y, Mapping) and set(y) == set(names):
        return [y[name] for name in names]
    return None
