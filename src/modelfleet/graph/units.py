"""Units of a graph: whatever has an optimizer of its own. That is every node, and every member of a fleet."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelfleet.frameworks.adapter_protocol import Prepared
from modelfleet.frameworks.fleet_models import FleetModels, prepare_members
from modelfleet.frameworks.node_engine import require_nodes
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind, ScheduleLike


@dataclass(frozen=True)
class Unit:
    """A node, or a member of a fleet that is a node."""

    name: str
    """Its name in the history."""
    node: str
    member: str | None
    """Its name in the fleet; None for a node that is no fleet."""
    task: Any
    schedule: ScheduleLike


@dataclass(frozen=True)
class Units:
    """Units of a graph, those of one node next to each other."""

    all: Sequence[Unit]
    columns: Mapping[str, np.ndarray]
    """Hyperparameters `(unit,)`; NaN if an optimizer has none of that name."""
    own_columns: Mapping[str, tuple[str, ...]]
    """Names of the hyperparameters that each node has."""

    @property
    def names(self) -> list[str]:
        """Return the names of all units."""
        return [unit.name for unit in self.all]

    @property
    def members(self) -> list[str]:
        """Return the names of those that are members of fleets."""
        return [unit.name for unit in self.all if unit.member is not None]

    def of(self, node: str) -> list[Unit]:
        """Return the units of a node."""
        return [unit for unit in self.all if unit.node == node]

    def is_fleet(self, node: str) -> bool:
        """Return True if a node is a fleet."""
        return self.of(node)[0].member is not None

    def name_of(self, node: str, member: str) -> str:
        """Return the name of a fleet's member in the history."""
        return next(unit.name for unit in self.of(node) if unit.member == member)

    def hyper(self, columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | np.ndarray]]:
        """Return hyperparameters `(unit,)` by node: numbers, or `(member,)` for a fleet."""
        found: dict[str, dict[str, float | np.ndarray]] = {}
        for node, keys in self.own_columns.items():
            rows = [row for row, unit in enumerate(self.all) if unit.node == node]
            fleet = self.all[rows[0]].member is not None
            found[node] = {key: columns[key][rows] if fleet else float(columns[key][rows[0]]) for key in keys}
        return found


def prepare_units(members: Sequence[Member], recipe: Recipe | None, kind: Kind, graph: str) -> Units:
    """Return the units of a graph's nodes.

    Args:
        members: The nodes.
        recipe: The recipe of the graph.
        kind: The verb.
        graph: What the graph is called in the history.
    """
    labels = _labels(members, graph)
    found: list[Unit] = []
    columns: list[Mapping[str, np.ndarray]] = []
    for member in members:
        prepared = prepare_node(member, recipe, kind)
        own = member.model
        inside: Sequence[str | None] = own.names if isinstance(own, FleetModels) else (None,)
        for name, task, schedule in zip(inside, prepared.tasks, prepared.schedules, strict=True):
            label = member.name if name is None else labels[member.name, name]
            found.append(Unit(label, member.name, name, task, schedule))
        columns.append(prepared.columns)
    keys = dict.fromkeys(key for own in columns for key in own)
    counts = Counter(unit.node for unit in found)
    joined = {
        key: np.concatenate(
            [
                own.get(key, np.full(counts[member.name], np.nan))
                for member, own in zip(members, columns, strict=True)
            ]
        )
        for key in keys
    }
    return Units(found, joined, {member.name: tuple(own) for member, own in zip(members, columns, strict=True)})


def prepare_node(member: Member, recipe: Recipe | None, kind: Kind) -> Prepared:
    """Return the task, the schedule and the hyperparameters of a node, or of a fleet's members."""
    if isinstance(member.model, FleetModels):
        return prepare_members(member.model, member.name, recipe, member.framework, kind)
    own = None if recipe is None else recipe.only([member.name])
    return require_nodes(member.framework).prepare(own, [member], kind)


def _labels(members: Sequence[Member], graph: str) -> dict[tuple[str, str], str]:
    """Return the name of every fleet's member in the history, with its node's in front if it is not unique."""
    fleets = {member.name: member.model.names for member in members if isinstance(member.model, FleetModels)}
    counts = Counter(name for names in fleets.values() for name in names)
    counts.update([graph, *(member.name for member in members)])
    return {
        (node, name): name if counts[name] == 1 else f"{node}.{name}"
        for node, names in fleets.items()
        for name in names
    }
