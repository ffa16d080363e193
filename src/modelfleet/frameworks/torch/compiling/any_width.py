"""One graph for lanes of any width.

A traced graph has the lane's width written into it, as the numbers in its views and sizes. Traced at two widths,
the two graphs differ in just these numbers, and each is a multiple of the width. So the two are merged into one
that works the numbers out from its first input; compiled once, it serves a lane that shrinks and grows.
"""

import operator
from typing import Any

from torch import fx, ops


class FixedWidthError(Exception):
    """A graph can't be had for any width."""


def merge_widths(graph: fx.GraphModule, width: int, other: fx.GraphModule, other_width: int) -> fx.GraphModule:
    """The graph of a step for any width above 1, from those at two widths. The first input has the member axis."""
    merged = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    multiples: dict[int, fx.Node] = {}
    nodes = list(graph.graph.nodes)
    others = list(other.graph.nodes)
    if len(nodes) != len(others):
        raise FixedWidthError(f"{len(nodes)} operations at width {width}, {len(others)} at {other_width}")
    inputs = sum(node.op == "placeholder" for node in nodes)

    def general(mine: Any, theirs: Any) -> Any:
        if isinstance(mine, fx.Node):
            return values[mine]
        if isinstance(mine, list | tuple):
            if len(mine) != len(theirs):
                raise FixedWidthError(f"{mine} and {theirs} have unlike lengths")
            return type(mine)(general(a, b) for a, b in zip(mine, theirs, strict=True))
        if isinstance(mine, dict):
            return {key: general(value, theirs[key]) for key, value in mine.items()}
        if type(mine) is int and mine != theirs:
            times, rest = divmod(mine, width)
            if rest or times * other_width != theirs:
                raise FixedWidthError(f"{mine} at width {width} and {theirs} at {other_width}")
            if times not in multiples:
                multiples[times] = merged.call_function(operator.mul, (multiples[1], times))
            return multiples[times]
        if not isinstance(mine, slice) and mine != theirs and mine == mine:  # NaN is unlike itself
            raise FixedWidthError(f"{mine} and {theirs}")
        return mine

    for count, (node, twin) in enumerate(zip(nodes, others, strict=True), start=1):
        if node.op != twin.op or (node.op == "call_function" and node.target != twin.target):
            raise FixedWidthError(f"{node.target} and {twin.target}")
        if node.op == "output":
            merged.output(general(node.args[0], twin.args[0]))
            continue
        values[node] = merged.create_node(
            node.op, node.target, general(node.args, twin.args), general(node.kwargs, twin.kwargs), node.name
        )
        if count == inputs:
            multiples[1] = merged.call_function(ops.aten.sym_size.int, (values[nodes[0]], 0))
    return fx.GraphModule(graph, merged)
