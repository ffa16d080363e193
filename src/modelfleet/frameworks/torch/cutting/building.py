"""Build a stage from a range of a traced model's nodes."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from modelfleet.frameworks.pieces import CannotCutError
from modelfleet.frameworks.torch.cutting.atoms import Layout
from modelfleet.frameworks.torch.cutting.stage import Stage, make_stage
from modelfleet.frameworks.torch.cutting.traced import Traced


class StageBuilder:
    """Builds stages of one traced model.

    Values that are no tensors do not go from stage to stage. A stage computes such a number from the number of
    rows of its inputs, as `factor × rows + rest`; two runs with different rows show which factor and rest.

    Args:
        traced: The model.
        layout: Its nodes.
        values: The result of each node with some number of rows.
        others: The results with another number of rows.
        rows: The two numbers of rows.
    """

    def __init__(
        self,
        traced: Traced,
        layout: Layout,
        values: Mapping[fx.Node, Any],
        others: Mapping[fx.Node, Any],
        rows: tuple[int, int],
    ) -> None:
        self._traced = traced
        self._layout = layout
        self._values = values
        self._others = others
        self._rows = rows
        self._output: fx.Node = next(iter(reversed(traced.graph.nodes)))
        self._inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]

    def build(
        self, owner: nn.Module, start: int, stop: int, outputs: Sequence[fx.Node] | None
    ) -> tuple[Stage, list[fx.Node]]:
        """Return a stage of the nodes from `start` to before `stop`, and the nodes whose values it is called with.

        Args:
            owner: The module whose parameters the stage gets.
            start: Index of its first node in the layout.
            stop: Index after its last node.
            outputs: Nodes whose values the stage returns; None for the model's output.
        """
        own = self._layout.order[start:stop]
        needed = self.needs(start, stop)
        if self._asks_for_rows(start, stop) and self._rows_axis(needed) is None:
            needed.append(next(node for node in self._inputs if self._rows_axis([node]) is not None))
        graph = fx.Graph()
        known: dict[fx.Node, Any] = {}
        for number, node in enumerate(needed):
            known[node] = graph.placeholder(f"value{number}")
        copier = _Copier(self, graph, known, needed)
        for node in own:
            copier.copy(node)
        if outputs is None:
            graph.output(fx.map_arg(self._output.args[0], copier.find))
            return make_stage(self._traced, owner, graph, self._traced.structure), needed
        found = tuple(copier.find(node) for node in outputs)
        graph.output(found[0] if len(found) == 1 else found)
        return make_stage(self._traced, owner, graph, None), needed

    def needs(self, start: int, stop: int) -> list[fx.Node]:
        """Return the tensors from outside that a range of nodes needs, in the order in which it needs them."""
        own = self._readers(start, stop)
        inside = set(own)
        operands = (operand for node in own for operand in node.all_input_nodes)
        return list(dict.fromkeys(node for node in operands if node not in inside and self._crosses(node)))

    def _readers(self, start: int, stop: int) -> list[fx.Node]:
        """Return a range of nodes; the model's output belongs to the last of them."""
        own = list(self._layout.order[start:stop])
        return [*own, self._output] if stop == len(self._layout.order) else own

    def _crosses(self, node: fx.Node) -> bool:
        return node.op != "get_attr" and node not in self._layout.fixed and node not in self._layout.plain

    def _asks_for_rows(self, start: int, stop: int) -> bool:
        """Return True if a number from outside changes with the rows."""
        own = self._readers(start, stop)
        seen = set(own)

        def asks(node: fx.Node) -> bool:
            if node in seen:
                return False
            seen.add(node)
            if node in self._layout.plain:
                return self._values[node] != self._others[node]
            return node in self._layout.fixed and any(asks(operand) for operand in node.all_input_nodes)

        return any(asks(operand) for node in own for operand in node.all_input_nodes)

    def _rows_axis(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
        """Return a node and the axis of its tensor that has the rows."""
        for node in nodes:
            value, other = self._values[node], self._others[node]
            if isinstance(value, Tensor):
                for axis, sizes in enumerate(zip(value.shape, other.shape, strict=True)):
                    if sizes == self._rows:
                        return node, axis
        return None

    def plain(
        self, graph: fx.Graph, known: Mapping[fx.Node, Any], needed: Sequence[fx.Node], node: fx.Node
    ) -> Any:
        """Return a number or the like for a stage: as it is, or as a node that computes it from the rows."""

        def rows() -> fx.Node:
            found = self._rows_axis(needed)
            assert found is not None
            return graph.call_method("size", (known[found[0]], found[1]))

        def anywhere() -> fx.Node:
            return graph.call_function(getattr, (known[needed[0]], "device"))

        return self._written(graph, self._values[node], self._others[node], rows, anywhere)

    def _written(
        self, graph: fx.Graph, value: Any, other: Any, rows: Callable[[], fx.Node], device: Callable[[], fx.Node]
    ) -> Any:
        if isinstance(value, tuple | list):
            parts = [self._written(graph, *pair, rows, device) for pair in zip(value, other, strict=True)]
            return tuple(parts)
        if isinstance(value, torch.device):
            return device()
        if value == other:
            return value
        if not isinstance(value, int):
            raise CannotCutError(f"it computes {value!r} from the number of rows")
        factor, rest = divmod(value - other, self._rows[0] - self._rows[1])
        first = value - factor * self._rows[0]
        if rest:
            raise CannotCutError(
                f"it computes {value} from {self._rows[0]} rows, and {other} from {self._rows[1]}"
            )
        scaled = rows() if factor == 1 else graph.call_function(operator.mul, (rows(), factor))
        return scaled if first == 0 else graph.call_function(operator.add, (scaled, first))


class _Copier:
    """Copies nodes into the graph of a stage, with what they need from outside."""

    def __init__(
        self, builder: StageBuilder, graph: fx.Graph, known: dict[fx.Node, Any], needed: Sequence[fx.Node]
    ) -> None:
        self._builder = builder
        self._graph = graph
        self._known = known
        self._needed = needed
        self._device: fx.Node | None = None

    def copy(self, node: fx.Node) -> Any:
        self._known[node] = copied = self._graph.node_copy(node, self.find)
        if self._needed:  # a stage computes on the device of its inputs
            copied.args = fx.node.map_aggregate(copied.args, self._on_device)
            copied.kwargs = fx.node.map_aggregate(copied.kwargs, self._on_device)
        return copied

    def _on_device(self, argument: Any) -> Any:
        if not isinstance(argument, torch.device):
            return argument
        if self._device is None:
            with self._graph.inserting_after(self._known[self._needed[0]]):
                self._device = self._graph.call_function(getattr, (self._known[self._needed[0]], "device"))
        return self._device

    def find(self, node: fx.Node) -> Any:
        """Return what stands for a node in the stage."""
        if node in self._known:
            return self._known[node]
        if node in self._builder._layout.plain:
            self._known[node] = self._builder.plain(self._graph, self._known, self._needed, node)
            return self._known[node]
        return self.copy(node)
