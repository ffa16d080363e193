"""Compute the words of several small draws at once, on accelerators.

Threefry takes a hundred operations, however small the draw, and an accelerator takes longer to begin such an
operation than to compute it. A step's draws depend on the members' seeds and steps only, so the first one can be
made the draw of all. On the CPU, a draw is one loop.
"""

from typing import Any

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch.random.threefry import WORDS
from modelfleet.frameworks.torch.tracing.writes import memory_owners, written

aten = torch.ops.aten
MAX_PAIRS = 2**20  # of words at once: they are kept until the last draw has been used


def join_draws(graph: fx.Graph) -> None:
    """Replace the draws of a traced graph that have the same seeds and steps by one draw for all, in place."""
    groups: dict[Any, list[fx.Node]] = {}
    pairs: dict[Any, int] = {}
    changed: set[fx.Node] = set()  # memory that is written to
    writes = 0  # to what the step was given: a draw is not moved to the other side of such a write
    for node in graph.nodes:
        owners = {owner for target in written(node) for owner in memory_owners(target)}
        writes += any(owner.op != "call_function" for owner in owners)
        changed |= {owner for owner in owners if owner.op == "call_function"}
        if _may_be_joined(node):
            group = node.args[0], node.args[3], writes
            together = pairs.get(group, 0) + node.meta["val"].numel() // 2
            if together <= MAX_PAIRS:
                pairs[group] = together
                groups.setdefault(group, []).append(node)
    for nodes in groups.values():
        places = {node: place for place, node in enumerate(graph.nodes)}
        needed = {node: _needed_before(nodes[0], node, places, changed) for node in nodes}
        movable = [node for node in nodes if needed[node] is not None]
        for one in sorted({one for node in movable for one in needed[node] or ()}, key=lambda one: places[one]):
            nodes[0].prepend(one)
        _join(graph, movable)


def _may_be_joined(node: fx.Node) -> bool:
    if node.target is not WORDS or not _takes_long_to_begin(node.meta["val"].device):
        return False
    first, second, left, _ = (_example(argument) for argument in node.args)
    return left.dim() == 1 and first.shape == second.shape


def _takes_long_to_begin(device: torch.device) -> bool:
    """Return True if a draw on a device is many operations."""
    return device.type != "cpu"


def _needed_before(
    first: fx.Node, node: fx.Node, places: dict[fx.Node, int], changed: set[fx.Node]
) -> set[fx.Node] | None:
    """Return what must be moved before the first draw so that another can be; None if that may not be moved."""
    needed: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one is first or one.target is WORDS or not changed.isdisjoint(memory_owners(one)):
            return None
        if places[one] > places[first] and one not in needed:
            needed.add(one)
            waiting += one.all_input_nodes
    return needed


def _join(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    if len(nodes) < 2:
        return
    first, _, _, right = nodes[0].args
    lengths = [_example(node.args[2]).shape[0] for node in nodes]
    with graph.inserting_before(nodes[0]):
        counters = _call(graph, aten.cat.default, [node.args[2] for node in nodes])
        seconds = [
            _call(graph, aten.expand.default, node.args[1], [*_example(node.args[1]).shape[:-1], length])
            for node, length in zip(nodes, lengths, strict=True)
        ]
        second = _call(graph, aten.cat.default, seconds, -1)
        drawn = _call(graph, WORDS, first, second, counters, right)
        begin = 0
        for node, length in zip(nodes, lengths, strict=True):
            part = _call(graph, aten.slice.Tensor, drawn, -2, begin, begin + length)
            own = _call(graph, aten.clone.default, part, memory_format=torch.contiguous_format)
            node.replace_all_uses_with(own)
            begin += length
    for node in nodes:
        graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call to a graph, with an example of its result."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*fx.map_arg(args, _example), **kwargs)
    return node


def _example(node: Any) -> Tensor:
    return node.meta["val"]
