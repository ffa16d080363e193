"""Losses of a graph: which nodes have one, their targets, and the values of an epoch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.node_engine import LossParts
from modelfleet.graph.topology import Topology
from modelfleet.graph.units import Unit, Units
from modelfleet.types import LossLike, Tree
from modelfleet.unknown_names import unknown


def loss_nodes(loss: LossLike, topology: Topology, compiled: Collection[str]) -> dict[str, LossLike]:
    """Return the loss of each node that has one.

    Args:
        loss: What `compile` was given.
        topology: The graph.
        compiled: Nodes that are fleets with losses of their own, which are None here.

    Raises:
        InputError: A loss is given for something that is no node, or none for an output.
    """
    own = {name: None for name in topology.outputs if name in compiled}
    if isinstance(loss, Mapping):
        if not loss:
            raise InputError("loss is an empty dict. Give the loss of one node or more, by its name.")
        for name in loss:
            if name not in topology.nodes:
                raise unknown("node", name, topology.nodes)
        return {**own, **{name: one for name, one in loss.items() if name not in compiled}}
    if loss is None and set(own) != set(topology.outputs):
        raise InputError(
            "compile got no loss. A node sees only its own part of the model, so give a loss of the output: "
            '"mse", "cross_entropy", or a function loss(output, target).'
        )
    return {**dict.fromkeys(topology.outputs, loss), **own}


def split_batch(batch: Tree, losses: Sequence[str]) -> tuple[Tree, dict[str, tuple[Tree, ...]]]:
    """Return the x of a batch, and (y,) or (y, sample_weight) for every node that has a loss.

    Raises:
        InputError: The batch is not (x, y), or y does not have the targets of every node.
    """
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise InputError(
            f"the losses need (x, y), but the data hold {_form(batch)}. Give (x, y); y is a dict by node if "
            f"several nodes have a loss."
        )
    x, y, *weights = batch
    if len(losses) == 1 and not (isinstance(y, Mapping) and set(y) == set(losses)):
        return x, {losses[0]: (y, *weights)}
    if not isinstance(y, Mapping):
        raise InputError(
            f"{len(losses)} nodes have a loss ({', '.join(losses)}), but y is {_form(y)}. Give y as a dict by "
            f"node, such as {{{losses[0]!r}: y}}."
        )
    missing = [name for name in losses if name not in y]
    if missing:
        raise InputError(f"y has no targets for {missing[0]!r}: it has {', '.join(map(repr, y))}. Add them.")
    return x, {name: (y[name], *weights) for name in losses}


def _form(tree: Tree) -> str:
    if isinstance(tree, Mapping):
        return f"a dict of {', '.join(map(str, tree))}"
    return f"{len(tree)} arrays" if isinstance(tree, tuple | list) else "one array"


@dataclass(frozen=True)
class EpochValues:
    """Loss and metrics of an epoch, or of an evaluation."""

    whole: dict[str, float]
    """Those of the graph. With several losses, each node's have its name in front."""
    members: dict[str, dict[str, float]] = field(default_factory=dict)
    """Those of the members of fleets, by their names in the history."""

    def named(self, prefix: str) -> "EpochValues":
        """Return them with a prefix before every name."""
        members = {
            name: {f"{prefix}{key}": value for key, value in own.items()} for name, own in self.members.items()
        }
        return EpochValues({f"{prefix}{key}": value for key, value in self.whole.items()}, members)

    def beside(self, other: "EpochValues") -> "EpochValues":
        """Return these and others."""
        members = {
            name: self.members.get(name, {}) | other.members.get(name, {})
            for name in dict.fromkeys([*self.members, *other.members])
        }
        return EpochValues(self.whole | other.whole, members)

    @property
    def flat(self) -> dict[str, float]:
        """Return all in one dict. Those of members have their names in front."""
        return self.whole | {
            f"{name}_{key}": value for name, own in self.members.items() for key, value in own.items()
        }


class EpochSums:
    """Sums of the losses and metrics of an epoch, by unit.

    Args:
        units: The units of the graph.
        losses: The nodes that have a loss.
    """

    def __init__(self, units: Units, losses: Sequence[str]) -> None:
        self._units = {node: units.of(node) for node in losses}
        self.sums: dict[str, dict[str, float]] = {unit.name: {} for own in self._units.values() for unit in own}

    def add(self, parts: Mapping[str, Sequence[LossParts]]) -> None:
        """Add a batch, of which the ranks computed these parts."""
        for node, own in parts.items():
            for unit in self._units[node]:
                name = unit.member
                self._add(unit, own if name is None else [p.members[name] for p in own if name in p.members])

    def _add(self, unit: Unit, own: Sequence[LossParts]) -> None:
        if not own:  # a member that was set aside
            return
        count = sum(part.count for part in own)
        loss = sum(part.total for part in own) / count if count else float("nan")
        sums = self.sums[unit.name]
        rows = sum(part.sums["rows"] for part in own)
        sums["loss"] = sums.get("loss", 0.0) + loss * rows
        for part in own:
            for key, value in part.sums.items():
                sums[key] = sums.get(key, 0.0) + value

    def drop(self, name: str) -> None:
        """Forget what a member has added, because it was set aside."""
        self.sums[name] = {}

    def values(self) -> EpochValues:
        """Return losses and metrics. A graph's loss is the sum of its nodes', a fleet's that of its members'."""
        nodes: dict[str, dict[str, float]] = {}
        members: dict[str, dict[str, float]] = {}
        for node, own in self._units.items():
            found = {unit.name: self._values(unit) for unit in own if self.sums[unit.name]}
            if own[0].member is None:
                nodes[node] = found.get(node, {"loss": float("nan")})
            else:
                nodes[node] = {"loss": sum(value["loss"] for value in found.values())} if found else {}
                members |= found
        if len(nodes) == 1:
            return EpochValues(next(iter(nodes.values())), members)
        together = {"loss": sum(own["loss"] for own in nodes.values() if own)}
        named = {f"{node}_{key}": value for node, own in nodes.items() for key, value in own.items()}
        return EpochValues(together | named, members)

    def _values(self, unit: Unit) -> dict[str, float]:
        columns = {key: np.array([value]) for key, value in self.sums[unit.name].items()}
        return {key: float(value[0]) for key, value in unit.task.values(columns).items()}
