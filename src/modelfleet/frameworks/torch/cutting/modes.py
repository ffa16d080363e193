"""One graph for training and evaluation, from the graphs that were traced in each mode.

Where they differ in a number, such as the probability of a dropout, the graph reads the `training` flag of the
module that the operation belongs to.
"""

import operator
from typing import Any

from torch import fx

from modelfleet.frameworks.pieces import CannotCutError

_DIFFERENT = "it computes with other operations in training mode than in evaluation mode"


def choose(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """Return the value for a mode."""
    return in_training if training else in_evaluation


def merge_modes(train: fx.Graph, evaluate: fx.Graph) -> fx.Graph:
    """Return the graph of training, which does what the graph of evaluation does if its modules are in that mode.

    An operation that training alone has may only add to a buffer, such as a BatchNorm's count of batches.

    Raises:
        CannotCutError: The graphs differ in more than numbers.
    """
    pairs: dict[fx.Node, fx.Node] = {}
    others = iter([node for node in evaluate.nodes if node.op != "get_attr"])
    other = next(others, None)
    for node in [node for node in train.nodes if node.op != "get_attr"]:
        if other is not None and _kind(node) == _kind(other):
            pairs[node] = other
            other = next(others, None)
        elif _counts(node):
            _only_in_training(train, node)
        else:
            raise CannotCutError(f"{_DIFFERENT}: {_kind(node)[1]}")
    if other is not None:
        raise CannotCutError(f"{_DIFFERENT}: {_kind(other)[1]}")
    for node, other in pairs.items():
        node.args = _merged(train, node, node.args, other.args, pairs)
        node.kwargs = _merged(train, node, node.kwargs, other.kwargs, pairs)
    return train


def _kind(node: fx.Node) -> tuple[str, str]:
    return node.op, "" if node.op in ("placeholder", "output") else str(node.target)


def _counts(node: fx.Node) -> bool:
    """Return True for `buffer += number`."""
    return (
        str(node.target) == "aten.add_.Tensor"
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op == "get_attr"
        and isinstance(node.args[1], int)
        and not node.users
    )


def _only_in_training(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        node.args = (node.args[0], graph.call_function(choose, (_flag(graph, node), node.args[1], 0)))


def _merged(graph: fx.Graph, node: fx.Node, own: Any, other: Any, pairs: dict[fx.Node, fx.Node]) -> Any:
    """Return arguments that are `own` in training and `other` in evaluation."""
    if isinstance(own, fx.Node):
        same = isinstance(other, fx.Node) and (
            own.target == other.target if own.op == "get_attr" else pairs.get(own) is other
        )
        if not same:
            raise CannotCutError(f"{_DIFFERENT}: {node.target}")
        return own
    if isinstance(own, tuple | list) and isinstance(other, tuple | list) and len(own) == len(other):
        return type(own)(_merged(graph, node, *parts, pairs) for parts in zip(own, other, strict=True))
    if isinstance(own, dict) and isinstance(other, dict) and own.keys() == other.keys():
        return {name: _merged(graph, node, value, other[name], pairs) for name, value in own.items()}
    if isinstance(other, fx.Node):
        raise CannotCutError(f"{_DIFFERENT}: {node.target}")
    if own == other and type(own) is type(other):
        return own
    with graph.inserting_before(node):
        flag = _flag(graph, node)
        if own is True and other is False:
            return flag
        if own is False and other is True:
            return graph.call_function(operator.not_, (flag,))
        return graph.call_function(choose, (flag, own, other))


def _flag(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the `training` flag of the module that a node belongs to."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0].removeprefix("L['self']").strip(".").partition("@")[0] if stack else ""
    # Not `graph.get_attr`, which warns of whatever is no tensor.
    return graph.create_node("get_attr", f"{path}.training" if path else "training")
