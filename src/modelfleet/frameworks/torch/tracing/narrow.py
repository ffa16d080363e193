"""Turn the narrow results of a traced graph that runs uncompiled on the CPU, so that vectors run along rows.

A processor computes with vectors of numbers that lie side by side. A classifier's logits `(member, row, class)`
have ten numbers side by side, and thirty or a thousand rows. So their product, and the softmax over them, compute
with parts of vectors: three to fifteen times as long as for `(member, class, row)`. A compiler chooses by itself.
torch's `argmax` takes six times as long over turned results. The indices of its `max` are the same, and quick.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch.tracing.writes import memory_owners, written

aten = torch.ops.aten

LANES = 16  # numbers of a vector: float32 with AVX-512

# Operations over a last axis, with the positions of their tensors and of the axis.
_OVER_AN_AXIS = {
    aten._log_softmax.default: (1, 1),
    aten._softmax.default: (1, 1),
    aten._log_softmax_backward_data.default: (2, 2),
    aten._softmax_backward_data.default: (2, 2),
}
_CHOOSE_STRIDES = {aten.bmm.default, aten.baddbmm.default}


def turn_narrow(graph: fx.Graph) -> None:
    """Have narrow products and softmaxes computed with their last two axes exchanged, in place.

    The places of the largest of few numbers come from `max`.
    """
    kept = {owner for node in graph.nodes for one in written(node) for owner in memory_owners(one)}
    kept |= _read_by_strides(graph)
    for node in list(graph.nodes):
        if node.target is aten.argmax.default:
            _take_from_max(node)
        if node in kept or not _is_narrow(node.meta.get("val")):
            continue
        if node.target is aten.bmm.default:
            first, second = node.args
            _turn(node, (_turned(node, second), _turned(node, first)))
        elif node.target is aten.baddbmm.default and not node.kwargs:
            bias, first, second = node.args
            _turn(node, (_turned(node, bias), _turned(node, second), _turned(node, first)))
        elif node.target in _OVER_AN_AXIS:
            tensors, at = _OVER_AN_AXIS[node.target]
            axes = node.meta["val"].dim()
            if node.args[at] % axes == axes - 1:
                own = tuple(_turned(node, tensor) for tensor in node.args[:tensors])
                _turn(node, (*own, axes - 2, *node.args[at + 1 :]))


def _read_by_strides(graph: fx.Graph) -> set[fx.Node]:
    """Return what operations read that go by the strides with which they were traced, and do not check them.

    These are `as_strided`, the kernels of attention, and operations that are not torch's own.
    """
    found: set[fx.Node] = set()
    waiting = [used for node in graph.nodes if _goes_by_strides(node.target) for used in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node.target not in _CHOOSE_STRIDES:  # its result has the strides of what it reads
                waiting += node.all_input_nodes
    return found


def _goes_by_strides(target: Any) -> bool:
    if target is aten.as_strided.default:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in ("aten", "prims") or "attention" in target.name()


def _take_from_max(node: fx.Node) -> None:
    """Replace an `argmax` over a narrow last axis by the indices of `max`.

    Of equal numbers both find the first, and a NaN is the largest for both.
    """
    source: Any = node.args[0]
    value = source.meta.get("val")
    if len(node.args) < 2 or node.args[1] is None or node.kwargs or not _is_narrow(value):
        return
    if node.args[1] % value.dim() != value.dim() - 1:
        return
    with node.graph.inserting_before(node):
        largest = node.graph.call_function(aten.max.dim, node.args)
        indices = node.graph.call_function(operator.getitem, (largest, 1))
    found = node.meta["val"]
    largest.meta["val"], indices.meta["val"] = (found.to(value.dtype), found), found
    node.replace_all_uses_with(indices)
    node.graph.erase_node(node)


def _is_narrow(value: Any) -> bool:
    """Return True for a tensor with few columns and many rows."""
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.dim() >= 2
        and value.shape[-1] < LANES <= value.shape[-2]
    )


def _turned(node: fx.Node, argument: Any) -> fx.Node:
    """Return an argument of a node with its last two axes exchanged."""
    axes = argument.meta["val"].dim()
    if argument.target is aten.transpose.int and {axis % axes for axis in argument.args[1:]} == {
        axes - 2,
        axes - 1,
    }:
        return argument.args[0]
    with node.graph.inserting_before(node):
        turned = node.graph.call_function(aten.transpose.int, (argument, -2, -1))
    turned.meta["val"] = argument.meta["val"].mT
    return turned


def _turn(node: fx.Node, args: tuple[Any, ...]) -> None:
    """Give a node arguments with which its result has the last two axes exchanged, and exchange them back."""
    value = node.meta["val"]
    with node.graph.inserting_after(node):
        result = node.graph.call_function(aten.transpose.int, (node, -2, -1))
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    node.args = args
    result.meta["val"], node.meta = value, {**node.meta, "val": value.mT}
