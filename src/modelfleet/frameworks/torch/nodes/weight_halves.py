"""A backward pass in two halves: the gradients of the inputs at once, those of the weights later.

The first half stops where a path leads to parameters only, and remembers the gradient that arrived there. The
second half starts at these places. So nothing is computed twice. If a layer is used twice, its parameters are
reached both from such a place and from others on the way to the inputs: then all is computed in the first half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


@dataclass(frozen=True)
class WeightHalf:
    """The second half of a backward pass: its starts, their gradients, and the parameters that they reach."""

    starts: Sequence[tuple[Sequence[GradientEdge | Tensor], Sequence[Tensor], Sequence[Tensor]]] = ()
    computed: Sequence[tuple[Tensor, Tensor]] = ()
    """Parameters with gradients that are there already."""

    def run(self) -> None:
        """Add to the gradients of the parameters."""
        for parameter, gradient in self.computed:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for edges, gradients, parameters in self.starts:
            # Starts may share what lies below them.
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=parameters)  # pyrefly: ignore


def input_gradients(
    outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]
) -> tuple[WeightHalf, list[Tensor]]:
    """Return the gradients of the inputs, and what is left to do for the parameters.

    Args:
        outputs: The outputs, each with its gradient.
        inputs: The leaves of autograd that the outputs were computed from, apart from parameters.
    """
    graph = _Graph([output for output, _ in outputs], inputs)
    if graph.entangled:
        return _all_at_once(outputs, inputs, graph)
    starts: list[tuple[Sequence[GradientEdge | Tensor], Sequence[Tensor], Sequence[Tensor]]] = []
    for output, gradient in outputs:
        node = _node_of(output)
        if node not in graph.to_inputs and graph.parameters_below(node):
            starts.append(([output], [gradient], graph.parameters_below(node)))
    reaching = [(output, gradient) for output, gradient in outputs if _node_of(output) in graph.to_inputs]
    arrived: dict[Node, Sequence[Tensor | None]] = {}

    def remember(node: Node) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(gradients: tuple[Tensor, ...]) -> None:
            arrived[node] = gradients

        return hook

    hooks = [node.register_prehook(remember(node)) for node in graph.borders]
    try:
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if reaching and inputs:
            found = torch.autograd.grad(
                [output for output, _ in reaching],
                inputs,
                [gradient for _, gradient in reaching],
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        for hook in hooks:
            hook.remove()
    for node, gradients in arrived.items():
        given = [(GradientEdge(node, index), g) for index, g in enumerate(gradients) if g is not None]
        starts.append(([edge for edge, _ in given], [g for _, g in given], graph.borders[node]))
    pairs = zip(found, inputs, strict=True)
    return WeightHalf(starts), [torch.zeros_like(leaf) if g is None else g for g, leaf in pairs]


def _all_at_once(
    outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor], graph: "_Graph"
) -> tuple[WeightHalf, list[Tensor]]:
    below = {id(p): p for output, _ in outputs for p in graph.parameters_below(_node_of(output))}
    leads = [*inputs, *below.values()]
    tensors, gradients = zip(*outputs, strict=True)
    found = torch.autograd.grad(tensors, leads, gradients, allow_unused=True)
    count = len(inputs)
    pairs = zip(leads[count:], found[count:], strict=True)
    own = zip(found[:count], inputs, strict=True)
    return (
        WeightHalf(computed=[(parameter, g) for parameter, g in pairs if g is not None]),
        [torch.zeros_like(leaf) if g is None else g for g, leaf in own],
    )


class _Graph:
    """The graph of autograd below some outputs: which nodes lead to inputs, and which parameters lie below."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._inputs = {id(leaf) for leaf in inputs}
        self._below: dict[Node, dict[int, Tensor]] = {}
        self.to_inputs: set[Node] = set()
        order = self._order([_node_of(output) for output in outputs])
        for node in order:  # children first
            own: dict[int, Tensor] = {}
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self._inputs:
                self.to_inputs.add(node)
            elif variable is not None:
                own[id(variable)] = variable
            for child in _children(node):
                own.update(self._below[child])
                if child in self.to_inputs:
                    self.to_inputs.add(node)
            self._below[node] = own
        self.borders: dict[Node, list[Tensor]] = {}
        """Nodes on a way to an input, with the parameters that other ways from there lead to."""
        self.entangled = False
        """True if ways to an input lead to some of these parameters, too."""
        for node in self.to_inputs:
            aside: dict[int, Tensor] = {}
            ahead: set[int] = set()
            for child in _children(node):
                if child in self.to_inputs:
                    ahead.update(self._below[child])
                else:
                    aside.update(self._below[child])
            if aside:
                self.borders[node] = list(aside.values())
                self.entangled |= not ahead.isdisjoint(aside)

    def parameters_below(self, node: Node) -> list[Tensor]:
        """Return the parameters that a node leads to."""
        return list(self._below[node].values())

    @staticmethod
    def _order(roots: Sequence[Node]) -> list[Node]:
        """Return all nodes below the roots, each after its children."""
        done: dict[Node, None] = {}
        waiting = [(root, False) for root in roots]
        seen: set[Node] = set()
        while waiting:
            node, expanded = waiting.pop()
            if expanded:
                done[node] = None
            elif node not in seen:
                seen.add(node)
                waiting.append((node, True))
                waiting += [(child, False) for child in _children(node) if child not in seen]
        return list(done)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _node_of(output: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(output).node
