"""Have a traced graph that runs uncompiled write its results into memory that is there already.

A compiler plans memory by itself. Without one, every operation of a graph allocates its result, and a step of many
small models spends much of its time on memory that the caches do not hold yet. So an elementwise operation writes
into its first argument if that is not needed afterwards, and `where` writes into the state that it is to replace.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch.tracing.narrow import turn_narrow
from modelfleet.frameworks.torch.tracing.writes import UNDECLARED_WRITERS, memory_owners

aten = torch.ops.aten

# Elementwise operations, with the same operations in place. All round the same way.
IN_PLACE = {
    aten.abs.default: aten.abs_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.addcdiv.default: aten.addcdiv_.default,
    aten.addcmul.default: aten.addcmul_.default,
    aten.div.Tensor: aten.div_.Tensor,
    aten.exp.default: aten.exp_.default,
    aten.lerp.Tensor: aten.lerp_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.neg.default: aten.neg_.default,
    aten.reciprocal.default: aten.reciprocal_.default,
    aten.relu.default: aten.relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.tanh.default: aten.tanh_.default,
}

# Operations whose result is always memory of its own. Schemas do not say this: `conj_physical`, for one, returns
# real numbers as they are.
NEW = {
    *IN_PLACE,
    *IN_PLACE.values(),
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._to_copy.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.clone.default,
    aten.gather.default,
    aten.mm.default,
    aten.scatter.value,
    aten.sum.dim_IntList,
    aten.threshold_backward.default,
    aten.where.self,
}


def in_place(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a traced graph that reuses memory.

    It computes the same numbers, bit for bit, except that a batched product rounds once with its bias, and that
    narrow products and softmaxes may add up in another order.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            _write_where(node)
    _use_baddbmm(graph)
    turn_narrow(graph)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in UNDECLARED_WRITERS)
    _reuse_arguments(graph)
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            _write_at_once(node)
    return fx.GraphModule(module, graph)


def _write_where(node: fx.Node) -> None:
    """Replace `old.copy_(where(chosen, new, old))` by a `where` that writes into `old`."""
    old, new = node.args[:2]
    if not isinstance(old, fx.Node) or not isinstance(new, fx.Node) or new.target is not aten.where.self:
        return
    chosen, value, kept = new.args
    if kept is not old or list(new.users) != [node] or not _alike(new, old):
        return
    with node.graph.inserting_before(node):
        written = node.graph.call_function(aten.where.self_out, (chosen, value, old), {"out": old})
    written.meta = dict(node.meta)
    node.replace_all_uses_with(written)
    node.graph.erase_node(node)
    new.graph.erase_node(new)


def _write_at_once(node: fx.Node) -> None:
    """Replace `old.copy_(new)` by operations that write into `old`, if `new` is computed from `old` by such."""
    old, new = node.args[:2]
    if not isinstance(old, fx.Node) or old.op != "placeholder" or not isinstance(new, fx.Node):
        return
    chain = [new]
    while chain[-1].target in IN_PLACE.values() and isinstance(chain[-1].args[0], fx.Node):
        chain.append(chain[-1].args[0])
    first = chain[-1]
    if first.target not in IN_PLACE or first.args[0] is not old or not _alike(first, old):
        return
    nodes = list(node.graph.nodes)
    views = [one for one in nodes if one is not node and old in memory_owners(one)]
    later = set(nodes[nodes.index(first) + 1 :]) - {node}
    if any(view in first.args[1:] or not later.isdisjoint(view.users) for view in views):
        return  # somebody needs the old values
    first.target = IN_PLACE[first.target]
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _use_baddbmm(graph: fx.Graph) -> None:
    """Have a batched product add the bias itself, as `addmm` does for a single model."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        for bias, product in (node.args, node.args[::-1]):
            if (
                isinstance(bias, fx.Node)
                and isinstance(product, fx.Node)
                and bias is not product  # a product that is added to itself
                and product.target is aten.bmm.default
                and list(product.users) == [node]
                and _alike(node, product)
                and isinstance(bias.meta.get("val"), Tensor)
                and bias.meta["val"].dim() == 3
                and bias.meta["val"].dtype == product.meta["val"].dtype
            ):
                node.target, node.args = aten.baddbmm.default, (bias, *product.args)
                graph.erase_node(product)
                break


def _reuse_arguments(graph: fx.Graph) -> None:
    """Have elementwise operations write into a first argument that nothing needs afterwards."""
    nodes = list(graph.nodes)
    owners = {node: set(memory_owners(node)) for node in nodes}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for owner in _owners_of(node.all_input_nodes, owners):
            last_use[owner] = node
    for node in nodes:
        if node.target not in IN_PLACE:
            continue
        first, *others = node.all_input_nodes
        if (
            node.args[0] is first
            and last_use.get(first) is node
            and first.target in NEW
            and first not in set(_owners_of(others, owners))
            and _alike(node, first)
        ):
            node.target = IN_PLACE[node.target]


def _owners_of(nodes: list[fx.Node], owners: dict[fx.Node, set[fx.Node]]) -> Iterator[fx.Node]:
    return (owner for node in nodes for owner in owners[node])


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Return True if two results have the same shape and dtype, and the other has no overlapping elements."""
    mine, theirs = node.meta.get("val"), other.meta.get("val")
    return (
        isinstance(mine, Tensor)
        and isinstance(theirs, Tensor)
        and (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
        and all(stride or length <= 1 for length, stride in zip(theirs.shape, theirs.stride(), strict=True))
    )
