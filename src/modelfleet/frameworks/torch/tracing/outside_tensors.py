"""Tensors from outside a step: those that a traced graph reads but no argument brought, and writes to them.

Examples are class weights in a loss, a teacher network in an objective's closure, and a plain tensor attribute.
Tracing leaves them in the graph as constants. Here they become inputs. So a program sees their current values at
each step, and a process that compiles it needs no copy of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.tracing.reasons import WRITES_OUTSIDE
from modelfleet.frameworks.torch.tracing.writes import memory_owners, written

aten = torch.ops.aten

_FRESH = (aten.lift_fresh_copy.default, aten.lift_fresh.default)


def lift_outside_tensors(module: fx.GraphModule) -> list[Tensor]:
    """Turn the outside tensors of a traced graph into inputs after its own, and return them in that order.

    Numbers that the traced Python wrote down itself (`torch.tensor([1.0, 2.0])`) stay constants.
    """
    graph = module.graph
    found: dict[int, tuple[Tensor, fx.Node]] = {}
    last = _inputs(graph)[-1]
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


def forbid_outside_writes(module: fx.GraphModule, arguments: Sequence[int]) -> None:
    """Make sure that a traced graph writes to nothing but the state that it was given.

    A batch that is written to is copied first.

    Args:
        module: The traced graph.
        arguments: For each input, the index of the step's argument that it came with: 0 is the state, 1 holds the
            tensors that all members share, and the later ones are the batch and its companions.

    Raises:
        CannotFuseError: A write would last, and other members or the user would see it.
    """
    inputs = {node: index for index, node in enumerate(_inputs(module.graph))}
    owners = {owner for node in module.graph.nodes for target in written(node) for owner in memory_owners(target)}
    for owner in owners:
        if owner.op == "get_attr" or (owner.op == "placeholder" and inputs[owner] >= len(arguments)):
            raise CannotFuseError(WRITES_OUTSIDE, shared=True)
        if owner.op == "placeholder" and arguments[inputs[owner]] == 1:
            raise CannotFuseError("its forward writes to a tensor that all members share", shared=True)
    for owner in owners:
        if owner.op == "placeholder" and arguments[inputs[owner]] > 1:
            with module.graph.inserting_after(_inputs(module.graph)[-1]):
                copy = module.graph.call_function(aten.clone.default, (owner,))
            copy.meta = dict(owner.meta)
            owner.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]
