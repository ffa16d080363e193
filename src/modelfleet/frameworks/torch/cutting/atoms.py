"""Which nodes of a traced model must stay together, and which values can cross a cut."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from modelfleet.frameworks.torch.cutting.recording import Recording
from modelfleet.frameworks.torch.cutting.traced import Traced, attribute


@dataclass(frozen=True)
class Layout:
    """The nodes of a traced model by what a cut means to them.

    Attributes:
        order: Nodes to distribute over stages, in topological order.
        fixed: Nodes that depend on no input and no weight. Each stage that needs one computes it itself.
        plain: Nodes whose results are no tensors but numbers and the like. They do not cross a cut: a stage finds
            them from the number of rows.
        boundaries: Indices in `order` at which a cut is possible.
        ties: Sentences about what keeps nodes together that a user can change.
    """

    order: tuple[fx.Node, ...]
    fixed: frozenset[fx.Node]
    plain: frozenset[fx.Node]
    boundaries: tuple[int, ...]
    ties: tuple[str, ...]


def lay_out(traced: Traced, record: Recording) -> Layout:
    """Return the layout of a traced model that has run."""
    nodes = list(traced.graph.nodes)
    plain = frozenset(node for node in nodes if _is_number(node, record.values[node]))
    fixed = _fixed(nodes, record, plain)
    order = [node for node in nodes if node.op not in _AROUND and node not in fixed]
    position = {node: number for number, node in enumerate(order)}
    spans = [*_of_containers(order, record, plain), *_of_changes(record)]
    together = [_span([position[node] for node in span if node in position]) for span in spans]
    ties = []
    for name, users in _of_weights(traced, record):
        span = _span([position[node] for node in users if node in position])
        together.append(span)
        if span[1] > span[0]:
            share = (span[1] - span[0] + 1) / len(order)
            ties.append(
                f"{name!r} is used in several places, which stay in one stage together with all between them: "
                f"{share:.0%} of the model's operations. Give each place a weight of its own to part them "
                f"(Hugging Face: tie_word_embeddings=False)"
            )
    inside = {cut for first, last in together for cut in range(first + 1, last + 1)}
    boundaries = tuple(cut for cut in range(1, len(order)) if cut not in inside)
    return Layout(tuple(order), fixed, plain, boundaries, tuple(dict.fromkeys(ties)))


def is_plain(value: Any) -> bool:
    """Return True for a number, a size, a dtype or a device, or a tuple of such."""
    if isinstance(value, tuple | list):
        return all(is_plain(part) for part in value)
    if isinstance(value, slice):
        return is_plain((value.start, value.stop, value.step))
    return value is None or isinstance(value, int | float | str | torch.dtype | torch.device | torch.layout)


_AROUND = ("placeholder", "get_attr", "output")


def _is_number(node: fx.Node, value: Any) -> bool:
    # What depends on a module's mode is computed anew in each stage.
    modal = any(operand.op == "get_attr" for operand in node.all_input_nodes)
    return node.op not in _AROUND and not modal and is_plain(value)


def _fixed(nodes: list[fx.Node], record: Recording, plain: frozenset[fx.Node]) -> frozenset[fx.Node]:
    changed = {own for change in record.changes for own in change}
    fixed: set[fx.Node] = set()
    for node in nodes:
        if node.op not in ("call_function", "call_method") or node in changed or node in record.draws:
            continue
        if node not in plain and all(
            operand in fixed or operand in plain or _is_constant(operand, record, changed)
            for operand in node.all_input_nodes
        ):
            fixed.add(node)
    return frozenset(fixed)


def _is_constant(node: fx.Node, record: Recording, changed: set[fx.Node]) -> bool:
    value = record.values[node]
    return node.op == "get_attr" and not isinstance(value, nn.Parameter) and node not in changed


def _of_containers(order: list[fx.Node], record: Recording, plain: frozenset[fx.Node]) -> Iterable[list[fx.Node]]:
    """Yield nodes with tuples and other containers of tensors, each with those that take them apart."""
    for node in order:
        if node not in plain and not isinstance(record.values[node], Tensor):
            yield [node, *node.users]


def _of_changes(record: Recording) -> Iterable[list[fx.Node]]:
    """Yield each node that changes a tensor in place, with the node that made it."""
    for node, owner in record.changes:
        yield [owner, node]


def _of_weights(traced: Traced, record: Recording) -> Iterable[tuple[str, list[fx.Node]]]:
    """Yield the users of each parameter, and of each buffer that changes, in the order of the graph."""
    changed = {owner for _, owner in record.changes}
    users: dict[int, tuple[str, list[fx.Node]]] = {}
    for node in traced.graph.nodes:
        if node.op == "call_module":
            module = attribute(traced.model, node.target)
            own = [*module.named_parameters(node.target), *module.named_buffers(node.target)]
            for name, tensor in own:
                users.setdefault(id(tensor), (name, []))[1].append(node)
        elif node.op == "get_attr":
            tensor = record.values[node]
            if isinstance(tensor, nn.Parameter) or (isinstance(tensor, Tensor) and node in changed):
                readers = [user for user in node.users if user.op != "output"]
                users.setdefault(id(tensor), (node.target, []))[1].extend(readers)
    yield from users.values()


def _span(positions: list[int]) -> tuple[int, int]:
    return (min(positions), max(positions)) if positions else (0, 0)
