"""Find out what the nodes of a traced graph write to."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from modelfleet.trees import leaves

aten = torch.ops.aten

# Write the running statistics, arguments 3 and 4, if argument 5 ("training") is True. Their schemas do not say so.
UNDECLARED_WRITERS = (
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
)


def schema_of(node: fx.Node) -> Any:  # a torch.FunctionSchema, which torch does not export as a type
    """Return the schema of a node's operation; None if it is no ATen operation."""
    return getattr(node.target, "_schema", None)


def is_write(node: fx.Node) -> bool:
    """Return True if the schema of a node's operation says that it writes to an argument."""
    schema = schema_of(node)
    return schema is not None and schema.is_mutable


def written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that a node writes to."""
    if node.op == "call_function" and node.target in UNDECLARED_WRITERS and len(node.args) > 5 and node.args[5]:
        yield from (argument for argument in node.args[3:5] if isinstance(argument, fx.Node))
    if is_write(node):
        given = _arguments_by_name(node)
        for argument in schema_of(node).arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (target for target in leaves(given.get(argument.name)) if isinstance(target, fx.Node))


def memory_owners(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose memory a node's result is: the node itself, or those that it is a view of."""
    schema = schema_of(node)
    if node.op == "call_function" and schema is None:  # an item of several views
        sources = list(node.all_input_nodes)
    elif schema is not None and any(result.alias_info is not None for result in schema.returns):
        given = _arguments_by_name(node)
        aliased = [given.get(argument.name) for argument in schema.arguments if argument.alias_info is not None]
        sources = [source for source in leaves(aliased) if isinstance(source, fx.Node)]
    else:
        sources = []
    if not sources:
        yield node
    for source in sources:
        yield from memory_owners(source)


def _arguments_by_name(node: fx.Node) -> dict[str, Any]:
    names = (argument.name for argument in schema_of(node).arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
