"""Tensors from outside a step: those a traced graph reads that no argument brought, and those it writes to.

Class weights in a loss, a teacher network in an objective's closure, a plain tensor attribute: tracing leaves them
in the graph as constants. Here they become inputs, so that a program sees them as they are at each step, and a
process that compiles it needs no copy of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from modelfleet.frameworks.protocol import CannotFuseError
from modelfleet.trees import leaves

aten = torch.ops.aten

_FRESH = (aten.lift_fresh_copy.default, aten.lift_fresh.default)

# They write the running statistics, arguments 3 and 4, if argument 5 says "training"; their schemas don't say so.
WRITE_UNSAID = (
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
)


def lift_outside_tensors(module: fx.GraphModule) -> list[Tensor]:
    """Turn the outside tensors of a traced graph into inputs after its own, and list them in that order.

    Numbers that the traced Python wrote down itself (`torch.tensor([1.0, 2.0])`) stay constants.
    """
    graph = module.graph
    found: dict[int, tuple[Tensor, fx.Node]] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = getattr(module, str(node.target), None)
        if not isinstance(tensor, Tensor) or all(user.target in _FRESH for user in node.users):
            continue
        if id(tensor) not in found:
            with graph.inserting_after(last):
                last = graph.placeholder(f"outside_{len(found)}")
            last.meta = dict(node.meta)
            found[id(tensor)] = tensor, last
        node.replace_all_uses_with(found[id(tensor)][1])
        graph.erase_node(node)
    return [tensor for tensor, _ in found.values()]


def forbid_outside_writes(module: fx.GraphModule, owners: Sequence[int]) -> None:
    """Make sure that a traced graph writes to nothing but the state it was given.

    `owners` says for each input which argument of the step it came with: 0 is the state, 1 what all members share,
    and the later ones are the batch and what goes with it. A batch that is written to is copied first.
    Raises `CannotFuseError` for writes that would last, and that other members or the user would see.
    """
    places = {node: place for place, node in enumerate(_placeholders(module))}
    roots = {root for node in module.graph.nodes for target in written(node) for root in origins(target)}
    for root in roots:
        if root.op == "get_attr" or (root.op == "placeholder" and places[root] >= len(owners)):
            raise CannotFuseError("it writes to a tensor that is no part of the model", shared=True)
        if root.op == "placeholder" and owners[places[root]] == 1:
            raise CannotFuseError("its forward writes to a tensor that all members share", shared=True)
    for root in roots:
        if root.op == "placeholder" and owners[places[root]] > 1:
            _copy_first(module.graph, root)


def written(node: fx.Node) -> Iterator[fx.Node]:
    """What a node writes to."""
    if node.op == "call_function" and node.target in WRITE_UNSAID and len(node.args) > 5 and node.args[5]:
        yield from (given for given in node.args[3:5] if isinstance(given, fx.Node))
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (target for target in leaves(given.get(argument.name)) if isinstance(target, fx.Node))


def origins(node: fx.Node) -> Iterator[fx.Node]:
    """Whose memory a node's result is: the node itself, or those that it is a view of."""
    schema: Any = getattr(node.target, "_schema", None)
    if node.op == "call_function" and schema is None:  # an item of several views
        sources = list(node.all_input_nodes)
    elif schema is not None and any(result.alias_info is not None for result in schema.returns):
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        named = {**given, **node.kwargs}
        aliased = [named.get(a.name) for a in schema.arguments if a.alias_info is not None]
        sources = [source for source in leaves(aliased) if isinstance(source, fx.Node)]
    else:
        sources = []
    if not sources:
        yield node
    for source in sources:
        yield from origins(source)


def _copy_first(graph: fx.Graph, placeholder: fx.Node) -> None:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        copy = graph.call_function(aten.clone.default, (placeholder,))
    copy.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]
