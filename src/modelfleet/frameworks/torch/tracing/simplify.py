"""Traced graphs without what need not run: what a compiler would leave out, for graphs that run as they are.

Models ask for the same small number again and again (an optimizer does, for each of its parameters), and every
operation costs a call of some microseconds, however small it is.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch.random.operations import is_random
from modelfleet.frameworks.torch.tracing.outside_tensors import WRITE_UNSAID
from modelfleet.trees import leaves

aten = torch.ops.aten


def simplify(module: fx.GraphModule) -> None:
    """Leave out of a traced graph what changes nothing."""
    for node in list(module.graph.nodes):
        # detach is an operation per use without autograd having any use for it here.
        if node.target in (aten.detach.default, aten.alias.default):
            _replace(node, node.args[0])
        elif node.target is aten.view.default:
            # The strides of fake tensors are not always those of the real ones (softplus_backward's in torch
            # 2.13), and then a view may be refused. reshape is that view wherever there can be one, and it is
            # quicker to call.
            node.target = torch.reshape
    written = {target for node in module.graph.nodes for target in _written(node)}
    unsaid = any(node.target in WRITE_UNSAID for node in module.graph.nodes)
    if not unsaid and all(node.op == "placeholder" or _fresh(node) for node in written):
        _once(module, written)
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in WRITE_UNSAID)
    module.recompile()


def _once(module: fx.GraphModule, written: set[fx.Node]) -> None:
    """Keep one of the nodes that do the same to the same. Those that are written to are left alone."""
    known: dict[Hashable, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node in written:
            continue
        if node.target is aten.lift_fresh_copy.default:  # a copy of a constant, for fear that it be written to
            _replace(node, node.args[0])
        elif _writes(node):
            known.clear()  # what is read anew may be another
        elif node.op == "get_attr" or (node.op == "call_function" and not is_random(node.target)):
            key = _key(module, node)
            if known.setdefault(key, node) is not node:
                _replace(node, known[key])


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """What a node writes to; the result of an earlier writing is what that wrote to."""
    if not _writes(node):
        return
    given = {**dict(zip(_arguments(node), node.args, strict=False)), **node.kwargs}
    for name, argument in _arguments(node).items():
        if argument.alias_info is not None and argument.alias_info.is_write:
            for target in leaves(given.get(name)):
                yield from _written(target) if _writes(target) else (target,)


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema: Any = getattr(node.target, "_schema", None)
    return {argument.name: argument for argument in schema.arguments}


def _fresh(node: fx.Node) -> bool:
    """Whether a result has memory of its own."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def _replace(node: fx.Node, other: Any) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _key(module: fx.GraphModule, node: fx.Node) -> Hashable:
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        single = isinstance(value, Tensor) and value.dim() == 0
        return (value.dtype, value.device, repr(value.item())) if single else node
    return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(value: Any) -> Hashable:
    """A value to compare by; 1, 1.0 and True are told apart."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(part) for part in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
