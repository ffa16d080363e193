"""Merge two graphs of different widths into one graph for lanes of any width.

A traced graph has the lane's width built in, as numbers in its views and sizes. Two graphs of one step, traced at
two widths, differ in these numbers only, and each number is a multiple of the width. So the two can be merged into
a graph that computes the numbers from its first input. Compiled once, it serves a lane that shrinks and grows.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx, ops


class FixedWidthError(Exception):
    """Raised for a graph that works for one width only."""


def merge_widths(graph: fx.GraphModule, width: int, other: fx.GraphModule, other_width: int) -> fx.GraphModule:
    """Return the graph of a step for any width above 1. The first input must have the member axis.

    Raises:
        FixedWidthError: The graphs differ in more than multiples of the width.
    """
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
                raise FixedWidthError(f"{mine} and {theirs} have different lengths")
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
        if not isinstance(mine, slice) and mine != theirs and mine == mine:  # NaN differs from itself
            raise FixedWidthError(f"{mine} and {theirs}")
        return mine

    for count, (node, twin) in enumerate(zip(nodes, others, strict=True), start=1):
        if node.op != twin.op or (node.op == "call_function" and node.target != twin.target):
            raise FixedWidthError(f"{node.target} and {twin.target}")
        if node.op == "get_attr" and not _same(getattr(graph, node.target), getattr(other, twin.target)):
            raise FixedWidthError(f"the constant {node.target} depends on the width")
        if node.op == "output":
            merged.output(general(node.args[0], twin.args[0]))
            continue
        values[node] = merged.create_node(
            node.op, node.target, general(node.args, twin.args), general(node.kwargs, twin.kwargs), node.name
        )
        if count == inputs:
            multiples[1] = merged.call_function(ops.aten.sym_size.int, (values[nodes[0]], 0))
    return fx.GraphModule(graph, merged)


def _same(constant: Tensor, other: Tensor) -> bool:
    return (constant.dtype, constant.device) == (other.dtype, other.device) and torch.equal(constant, other)
