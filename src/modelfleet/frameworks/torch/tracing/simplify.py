"""Remove operations from a traced graph that need not run.

A compiler would do the same; this is for graphs that run uncompiled. Models compute the same small number again
and again (an optimizer does so for each of its parameters), and every operation costs a call of some microseconds,
however small it is.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch.random.operations import is_random
from modelfleet.frameworks.torch.tracing.writes import (
    UNDECLARED_WRITERS,
    is_write,
    memory_owners,
    schema_of,
    written,
)

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def simplify(module: fx.GraphModule) -> None:
    """Remove the operations of a traced graph that change nothing, in place."""
    written_to = {owner for node in module.graph.nodes for one in written(node) for owner in memory_owners(one)}
    for node in list(module.graph.nodes):
        if _is_its_argument(node) and not (node.target is aten.mul.Scalar and node in written_to):
            _replace(node, node.args[0])
        elif node.target is aten.transpose.int and _undoes_transpose(node):
            _replace(node, node.args[0].args[0])
        elif node.target in _VIEWS:
            # The strides of fake tensors are not always those of the real ones (softplus_backward's in torch
            # 2.13), and then torch may refuse a view. reshape is a view wherever one is possible, and it is
            # quicker to call.
            node.target = torch.reshape
    targets = {target for node in module.graph.nodes for target in _first_written(node)}
    undeclared = any(node.target in UNDECLARED_WRITERS for node in module.graph.nodes)
    if not undeclared and all(node.op == "placeholder" or _owns_memory(node) for node in targets):
        _merge_equal_nodes(module, targets)
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in UNDECLARED_WRITERS)
    module.recompile()


def _merge_equal_nodes(module: fx.GraphModule, targets: set[fx.Node]) -> None:
    """Merge nodes that compute the same from the same inputs, except for `targets`, which are written to."""
    known: dict[Hashable, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node in targets:
            continue
        if node.target is aten.lift_fresh_copy.default:  # a copy of a constant, in case it is written to
            _replace(node, node.args[0])
        elif is_write(node):
            known.clear()  # the same read may give another value now
        elif node.op == "get_attr" or (node.op == "call_function" and not is_random(node.target)):
            key = _key(module, node)
            if known.setdefault(key, node) is not node:
                _replace(node, known[key])


def _first_written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the targets that a node writes to. A write to an earlier write's result goes to that one's target."""
    for target in written(node):
        yield from _first_written(target) if is_write(target) else (target,)


def _owns_memory(node: fx.Node) -> bool:
    schema = schema_of(node)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def _is_its_argument(node: fx.Node) -> bool:
    """Return True if a node's result is a copy or a view of its first argument, with the same shape."""
    if node.target in (aten.detach.default, aten.alias.default):  # without autograd they have no effect
        return True
    times_one = node.target is aten.mul.Scalar and type(node.args[1]) is int and node.args[1] == 1
    if not times_one and node.target not in (aten.expand.default, *_VIEWS):
        return False
    argument = node.args[0]
    before = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    after = node.meta["val"]
    return isinstance(before, Tensor) and (before.shape, before.dtype) == (after.shape, after.dtype)


def _undoes_transpose(node: fx.Node) -> bool:
    """Return True for a transpose of a transpose of the same two axes."""
    argument = node.args[0]
    if not isinstance(argument, fx.Node) or argument.target is not aten.transpose.int:
        return False
    axes = node.meta["val"].dim()
    return {axis % axes for axis in node.args[1:]} == {axis % axes for axis in argument.args[1:]}


def _replace(node: fx.Node, other: Any) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _key(module: fx.GraphModule, node: fx.Node) -> Hashable:
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        is_scalar = isinstance(value, Tensor) and value.dim() == 0
        return (value.dtype, value.device, repr(value.item())) if is_scalar else node
    return node.target, _hashable(node.args), _hashable(node.kwargs)


def _hashable(value: object) -> Hashable:
    """Return a key that is different for 1, 1.0 and True."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(part) for part in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(part)) for key, part in value.items())
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
