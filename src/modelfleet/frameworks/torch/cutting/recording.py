"""Run a traced model once, node by node, to see what each node makes, what it changes, and how long it takes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from modelfleet.formatting import without_period
from modelfleet.frameworks.pieces import CannotCutError
from modelfleet.frameworks.torch.cutting.traced import Traced, attribute
from modelfleet.frameworks.user_code import line_of_error
from modelfleet.trees import leaves
from modelfleet.types import Tree

_REPEATS = 3


@dataclass
class Recording:
    """What happened at each node.

    Attributes:
        values: The result of each node. Nodes that are changed in place later have what they are at the end.
        seconds: Time of the forward pass.
        changes: Nodes that changed a tensor, with the first node that had its memory.
        draws: Nodes that drew random numbers.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    seconds: dict[fx.Node, float] = field(default_factory=dict)
    changes: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    draws: set[fx.Node] = field(default_factory=set)


def run(traced: Traced, example: Tree) -> Recording:
    """Return what happens at each node for an example. Every node runs once.

    Raises:
        CannotCutError: A node can't compute with the example.
    """
    record = Recording()
    owners: dict[int, fx.Node] = {}  # memory, and the node that first had it

    def visit(node: fx.Node, compute: Callable[[], Any]) -> Any:
        if node.op in ("placeholder", "output"):
            value = compute()
        else:
            operands = [record.values[operand] for operand in node.all_input_nodes]
            versions = [(tensor, tensor._version) for tensor in _tensors(operands)]
            generator = torch.get_rng_state()
            value = compute()
            changed = {_memory(tensor) for tensor, version in versions if tensor._version != version}
            record.changes += [(node, owners[memory]) for memory in changed if memory in owners]
            if not torch.equal(generator, torch.get_rng_state()):
                record.draws.add(node)
        record.values[node] = value
        for tensor in _tensors([value]):
            owners.setdefault(_memory(tensor), node)
        return value

    _go(traced, example, visit)
    return record


def time_nodes(traced: Traced, example: Tree) -> dict[fx.Node, float]:
    """Return the shortest of a few times of each node, forward."""
    best: dict[fx.Node, float] = {}

    def visit(node: fx.Node, compute: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        value = compute()
        synchronize(traced.model)
        best[node] = min(best.get(node, float("inf")), time.perf_counter() - start)
        return value

    for _ in range(1 + _REPEATS):
        _go(traced, example, visit)
    return best


def synchronize(model: nn.Module) -> None:
    """Wait for the device of a model."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type != "cpu":
        torch.accelerator.synchronize(parameter.device)


def _go(traced: Traced, example: Tree, visit: Callable[[fx.Node, Callable[[], Any]], Any]) -> None:
    values: dict[fx.Node, Any] = {}
    inputs = iter(leaves(example))
    for node in traced.graph.nodes:
        args, keywords = fx.map_arg((node.args, node.kwargs), values.__getitem__)

        def compute(node: fx.Node = node, args: Any = args, keywords: Any = keywords) -> Any:
            target: Any = node.target
            if node.op == "placeholder":
                return next(inputs)
            if node.op == "get_attr":
                return _attribute(traced, target)
            if node.op == "call_module":
                return attribute(traced.model, target)(*args, **keywords)
            if node.op == "call_method":
                return getattr(args[0], target)(*args[1:], **keywords)
            return args[0] if node.op == "output" else target(*args, **keywords)

        try:
            values[node] = visit(node, compute)
        except Exception as error:  # an operation may raise anything
            where = line_of_error(error)
            raise CannotCutError(
                f"at {node.name}{f' ({where})' if where else ''}: {without_period(error)}"
            ) from error


def _attribute(traced: Traced, path: str) -> Any:
    return traced.constants[path] if path in traced.constants else attribute(traced.model, path)


def _tensors(values: list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        found += [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
