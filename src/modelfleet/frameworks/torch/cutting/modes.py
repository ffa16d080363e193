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

    An operation that one mode alone has may only make a tensor contiguous, or, in training, add to a buffer, such
    as a BatchNorm's count of batches.

    Raises:
        CannotCutError: The graphs differ in more than numbers.
    """
    pairs: dict[fx.Node, fx.Node] = {}  # for each node of training, the node of evaluation
    same: dict[fx.Node, fx.Node] = {}  # nodes of evaluation that only make another one contiguous
    others = [node for node in evaluate.nodes if node.op != "get_attr"]
    for node in [node for node in train.nodes if node.op != "get_attr"]:
        while others and _kind(node) != _kind(others[0]) and _is_contiguous(others[0]):
            same[others[0]] = _source(others.pop(0), same)
        if others and _kind(node) == _kind(others[0]):
            pairs[node] = others.pop(0)
        elif _is_contiguous(node):
            pairs[node] = pairs[node.all_input_nodes[0]]
        elif _counts(node):
            _only_in_training(train, node)
        else:
            raise CannotCutError(f"{_DIFFERENT}: {_kind(node)[1]}")
    if others:
        raise CannotCutError(f"{_DIFFERENT}: {_kind(others[0])[1]}")
    merger = _Merger(train, pairs, same)
    for node, other in pairs.items():
        if _kind(node) == _kind(other):
            count = max(len(node.args), len(other.args))
            node.args = merger.merged(node, _arguments(node, count), _arguments(other, count))
            node.kwargs = merger.merged(node, node.kwargs, other.kwargs)
    return train


def _is_contiguous(node: fx.Node) -> bool:
    return str(node.target) == "aten.contiguous.default"


def _source(node: fx.Node, same: dict[fx.Node, fx.Node]) -> fx.Node:
    found = node.all_input_nodes[0]
    return same.get(found, found)


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


def _arguments(node: fx.Node, count: int) -> tuple[Any, ...]:
    """Return a number of arguments of an operation, with the defaults of those that are not given."""
    missing = range(len(node.args), count)
    operation: Any = node.target
    return (*node.args, *(operation._schema.arguments[number].default_value for number in missing))


class _Merger:
    """Merges the arguments of paired nodes."""

    def __init__(self, graph: fx.Graph, pairs: dict[fx.Node, fx.Node], same: dict[fx.Node, fx.Node]) -> None:
        self._graph = graph
        self._pairs = pairs
        self._same = same

    def merged(self, node: fx.Node, own: Any, other: Any) -> Any:
        """Return arguments that are `own` in training and `other` in evaluation."""
        if isinstance(own, fx.Node) and isinstance(other, fx.Node) and self._is_same(own, other):
            return own
        if isinstance(own, fx.Node) or isinstance(other, fx.Node):
            raise CannotCutError(f"{_DIFFERENT}: {node.target}")
        if isinstance(own, tuple | list) and isinstance(other, tuple | list) and len(own) == len(other):
            return type(own)(self.merged(node, *parts) for parts in zip(own, other, strict=True))
        if isinstance(own, dict) and isinstance(other, dict) and own.keys() == other.keys():
            return {name: self.merged(node, value, other[name]) for name, value in own.items()}
        if own == other and type(own) is type(other):
            return own
        with self._graph.inserting_before(node):
            flag = _flag(self._graph, node)
            if own is True and other is False:
                return flag
            if own is False and other is True:
                return self._graph.call_function(operator.not_, (flag,))
            return self._graph.call_function(choose, (flag, own, other))

    def _is_same(self, own: fx.Node, other: fx.Node) -> bool:
        if own.op == "get_attr":
            return other.op == "get_attr" and own.target == other.target
        other = self._same.get(other, other)
        return self._pairs.get(own) is other


def _flag(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the `training` flag of the module that a node belongs to."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0].removeprefix("L['self']").strip(".").partition("@")[0] if stack else ""
    # Not `graph.get_attr`, which warns of whatever is no tensor.
    return graph.create_node("get_attr", f"{path}.training" if path else "training")
