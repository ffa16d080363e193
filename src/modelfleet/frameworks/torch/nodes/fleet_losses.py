"""Losses of a fleet's members on their outputs, by their own tasks, as vectors `(member,)`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vmap

from modelfleet.errors import InputError
from modelfleet.frameworks.fleet_models import member_targets
from modelfleet.frameworks.node_engine import LossParts
from modelfleet.frameworks.torch.fused.state import exact
from modelfleet.frameworks.torch.task import PRECISIONS, Task, logits
from modelfleet.trees import leaves, map_tree, map_trees
from modelfleet.types import Tree


@dataclass(frozen=True)
class MemberSums:
    """What some rows add to the losses and metrics of all members, `(member,)` each."""

    totals: Tensor
    counts: Tensor
    parts: Sequence[tuple[Sequence[int], Mapping[str, Tensor]]] = field(default_factory=list)
    """Sums of metrics of members with the same metrics: their positions, and the sums `(position,)` by name."""

    def on_host(self, names: Sequence[str], live: Sequence[bool]) -> dict[str, LossParts]:
        """Return them by the names of the members that are live, in one transfer for each set of metrics."""
        found: dict[str, LossParts] = {}
        for positions, sums in self.parts:
            rows = torch.tensor(positions, device=self.totals.device)
            columns = [self.totals.detach()[rows], self.counts[rows], *sums.values()]
            table = torch.stack([column.to(exact(column.device)) for column in columns], 1).tolist()
            for position, (total, count, *values) in zip(positions, table, strict=True):
                if live[position]:
                    found[names[position]] = LossParts(total, count, dict(zip(sums, values, strict=True)))
        return {name: found[name] for name in names if name in found}


class MemberLosses:
    """Losses and metrics of the members of a fleet.

    Args:
        node: The name of the node, for errors.
        names: The names of the members.
        tasks: The task of each. Members with the same loss and metrics are computed at once.
        device: Where the outputs are.
    """

    def __init__(self, node: str, names: Sequence[str], tasks: Sequence[Task], device: torch.device) -> None:
        self._node, self._names, self._device = node, list(names), device
        self._groups: dict[tuple[int, ...], tuple[Task, list[int]]] = {}
        for position, task in enumerate(tasks):
            key = (id(task.loss), *map(id, task.metrics))
            self._groups.setdefault(key, (task, []))[1].append(position)
        self._dtype = PRECISIONS[tasks[0].precision]

    def of(self, outputs: Tree, target: Tree, fraction: float) -> MemberSums:
        """Return what the losses of some rows add to those of the batch.

        Args:
            outputs: The outputs `(member, row, …)`.
            target: (y,) or (y, sample_weight). y is for all members, or a dict by the members' names.
            fraction: The part of the batch that the rows are.
        """
        y, weights = (*target, None)[:2]
        own = member_targets(y, self._names)
        if own is None and isinstance(y, Mapping) and set(map(str, y)) & set(self._names):
            raise InputError(
                f"the targets of {self._node!r} are a dict of {len(y)} members, but the fleet has "
                f"{len(self._names)}: {', '.join(self._names[:3])}, … Give one array for all members, or a dict "
                f"with a target for each of them and for nobody else."
            )
        part = torch.tensor(fraction, device=self._device)
        totals: list[Tensor] = []
        counts: list[Tensor] = []
        order: list[int] = []
        parts: list[tuple[Sequence[int], Mapping[str, Tensor]]] = []
        for task, positions in self._groups.values():
            whole = len(positions) == len(self._names)
            some = outputs if whole else map_tree(lambda leaf, rows=positions: leaf[rows], outputs)
            targets = y if own is None else map_trees(torch.stack, [own[position] for position in positions])
            total, count, sums = _mapped(task, some, targets, own is not None, weights, part, self._dtype)
            totals.append(total)
            counts.append(count)
            order += positions
            parts.append((positions, sums))
        if len(parts) == 1:
            return MemberSums(totals[0], counts[0], parts)
        back = torch.tensor(order, device=self._device).argsort()
        return MemberSums(torch.cat(totals)[back], torch.cat(counts)[back], parts)


def _mapped(
    task: Task,
    outputs: Tree,
    targets: Tree,
    own: bool,
    weights: Tensor | None,
    fraction: Tensor,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the totals, the counts and the sums of the metrics, `(member,)` each."""

    def one(output: Tree, target: Tree) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count, sums = task.partial_loss_of(logits(output), target, weights, None, fraction)
        return total, torch.as_tensor(count), {name: torch.as_tensor(value) for name, value in sums.items()}

    device = leaves(outputs)[0].device.type
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
        return vmap(one, in_dims=(0, 0 if own else None), randomness="different")(outputs, targets)
