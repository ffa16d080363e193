"""What a schedule is built from: nodes, edges, where the nodes are, and what they cost."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from modelfleet.errors import InputError
from modelfleet.schedules.operations import Kind


@dataclass(frozen=True)
class NodeSpec:
    """Says where a node is and what it costs.

    Attributes:
        name: The node's name.
        ranks: The ranks of its replicas. Micro-batch m is computed on `ranks[m % len(ranks)]`.
        trained: Whether its weights are trained.
        forward: The time of a forward of one micro-batch, in seconds or any other unit.
        backward: The time of a backward for the inputs and the weights.
        backward_input: The time of a backward for the inputs alone; None is half of `backward`.
        kept_bytes: What is kept from the forward of a micro-batch to its backward.
        recomputed_bytes: What the backward makes again because it was not kept.
        output_bytes: The size of the outputs of one micro-batch.
    """

    name: str
    ranks: tuple[int, ...]
    trained: bool = True
    forward: float = 1.0
    backward: float = 2.0
    backward_input: float | None = None
    kept_bytes: int = 0
    output_bytes: int = 0
    recomputed_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise InputError(
                f"Node '{self.name}' has replicas on ranks {self.ranks}. A node needs at least one rank, and each "
                "only once. Give it a tuple of different ranks."
            )

    def rank(self, micro: int) -> int:
        """Return the rank that computes a micro-batch."""
        return self.ranks[micro % len(self.ranks)]

    def seconds(self, kind: Kind) -> float:
        """Return the time of one computation; 0 for all that is not one."""
        inputs = self.backward / 2 if self.backward_input is None else self.backward_input
        if kind == "forward":
            return self.forward
        if kind == "backward_input" or (kind == "backward" and not self.trained):
            return inputs
        if kind == "backward":
            return self.backward
        return max(0.0, self.backward - inputs) if kind == "backward_weight" else 0.0


@dataclass(frozen=True)
class EdgeSpec:
    """Says what goes from one node to another.

    Attributes:
        name: The edge's name.
        source: The node that the tensors come from.
        target: The node that takes them.
        differentiable: Whether gradients go back along the edge.
        bytes: The size of one micro-batch.
        seconds: The time of one transfer between two ranks.
    """

    name: str
    source: str
    target: str
    differentiable: bool = True
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class GraphSpec:
    """Holds the nodes of a graph in topological order, and the edges between them.

    Raises:
        InputError: If two nodes or two edges have one name, or an edge does not lead to a later node.
    """

    nodes: tuple[NodeSpec, ...]
    edges: tuple[EdgeSpec, ...] = ()

    def __post_init__(self) -> None:
        _refuse_twice("nodes", [node.name for node in self.nodes])
        _refuse_twice("edges", [edge.name for edge in self.edges])
        for edge in self.edges:
            for name in (edge.source, edge.target):
                if name not in self.position:
                    raise InputError(
                        f"Edge '{edge.name}' names the node '{name}', which the graph does not have. "
                        f"Its nodes are {', '.join(self.position)}."
                    )
            if self.position[edge.source] >= self.position[edge.target]:
                raise InputError(
                    f"Edge '{edge.name}' leads from '{edge.source}' to '{edge.target}', which is not after it. "
                    "List the nodes in topological order, and leave out edges that close a circle."
                )

    @cached_property
    def position(self) -> dict[str, int]:
        """The place of every node in topological order."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def edge(self) -> dict[str, EdgeSpec]:
        """Every edge by its name."""
        return {edge.name: edge for edge in self.edges}

    @cached_property
    def inputs(self) -> dict[str, tuple[EdgeSpec, ...]]:
        """The edges that lead to every node."""
        return {node.name: tuple(e for e in self.edges if e.target == node.name) for node in self.nodes}

    @cached_property
    def outputs(self) -> dict[str, tuple[EdgeSpec, ...]]:
        """The edges that come from every node."""
        return {node.name: tuple(e for e in self.edges if e.source == node.name) for node in self.nodes}

    @cached_property
    def with_backward(self) -> frozenset[str]:
        """The nodes that need a backward: those that are trained, or get inputs that depend on trained weights."""
        found: set[str] = set()
        for node in self.nodes:
            if node.trained or any(e.differentiable and e.source in found for e in self.inputs[node.name]):
                found.add(node.name)
        return frozenset(found)

    @cached_property
    def gradients_in(self) -> dict[str, tuple[EdgeSpec, ...]]:
        """The edges along which every node gets gradients: of those that come from it."""
        return {node.name: tuple(filter(self._has_gradient, self.outputs[node.name])) for node in self.nodes}

    @cached_property
    def gradients_out(self) -> dict[str, tuple[EdgeSpec, ...]]:
        """The edges along which every node gives gradients: of those that lead to it."""
        return {node.name: tuple(filter(self._has_gradient, self.inputs[node.name])) for node in self.nodes}

    def _has_gradient(self, edge: EdgeSpec) -> bool:
        return edge.differentiable and edge.source in self.with_backward

    def node(self, name: str) -> NodeSpec:
        """Return the node of a name.

        Raises:
            InputError: If there is none.
        """
        if name not in self.position:
            raise InputError(f"The graph has no node '{name}'. Its nodes are {', '.join(self.position)}.")
        return self.nodes[self.position[name]]

    def untrained(self) -> "GraphSpec":
        """Return the same graph with all weights frozen, so that no node has a backward."""
        return GraphSpec(tuple(replace(node, trained=False) for node in self.nodes), self.edges)


def _refuse_twice(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"Two {what} are named '{name}'. Give each its own name.")
        seen.add(name)
