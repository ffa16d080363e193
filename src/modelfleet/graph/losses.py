"""Losses of a graph: which nodes have one, their targets, and the values of an epoch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.node_engine import LossParts
from modelfleet.graph.topology import Topology
from modelfleet.types import LossLike, Tree
from modelfleet.unknown_names import unknown


def loss_nodes(loss: LossLike, topology: Topology) -> dict[str, LossLike]:
    """Return the loss of each node that has one.

    Raises:
        InputError: A loss is given for something that is no node.
    """
    if isinstance(loss, Mapping):
        if not loss:
            raise InputError("loss is an empty dict. Give the loss of one node or more, by its name.")
        for name in loss:
            if name not in topology.nodes:
                raise unknown("node", name, topology.nodes)
        return dict(loss)
    return dict.fromkeys(topology.outputs, loss)


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


class EpochSums:
    """Sums of the losses and metrics of an epoch, by node."""

    def __init__(self, tasks: Mapping[str, Any]) -> None:
        self._tasks = tasks
        self.sums: dict[str, dict[str, float]] = {name: {} for name in tasks}

    def add(self, parts: Mapping[str, Sequence[LossParts]]) -> float:
        """Add a batch, of which the ranks computed these parts. Return its loss."""
        whole = 0.0
        for name, own in parts.items():
            count = sum(part.count for part in own)
            loss = sum(part.total for part in own) / count if count else float("nan")
            whole += loss
            sums = self.sums[name]
            rows = sum(part.sums["rows"] for part in own)
            sums["loss"] = sums.get("loss", 0.0) + loss * rows
            for part in own:
                for key, value in part.sums.items():
                    sums[key] = sums.get(key, 0.0) + value
        return whole

    def values(self) -> dict[str, float]:
        """Return the loss and the metrics. With several losses, each node's have its name in front."""
        found: dict[str, dict[str, float]] = {}
        for name, sums in self.sums.items():
            columns = {key: np.array([value]) for key, value in sums.items()}
            found[name] = {key: float(value[0]) for key, value in self._tasks[name].values(columns).items()}
        if len(found) == 1:
            return next(iter(found.values()))
        together = {"loss": sum(own["loss"] for own in found.values())}
        return together | {f"{name}_{key}": value for name, own in found.items() for key, value in own.items()}
