"""A graph whose nodes compute names instead of numbers: run by a schedule, and undivided."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from modelfleet.schedules import GraphSpec, Operation

Value = Hashable
Key = tuple[str, bool, int]


def forward_value(spec: GraphSpec, node: str, micro: int) -> Value:
    """What a node's forward is called: by its node, its micro-batch and its inputs."""
    inputs = tuple(forward_value(spec, edge.source, micro) for edge in spec.inputs[node])
    return hash((node, micro, inputs))


def backward_value(spec: GraphSpec, node: str, micro: int) -> Value:
    """What a node's backward is called: by its forward and the gradients of its outputs."""
    gradients = tuple(backward_value(spec, edge.target, micro) for edge in spec.gradients_in[node])
    return hash(("backward", forward_value(spec, node, micro), gradients))


@dataclass
class NamedGraph:
    """Runs a graph on several ranks, each with its own tensors, and refuses what is not there."""

    spec: GraphSpec
    micro_batches: int
    tensors: dict[int, dict[Key, Value]] = field(default_factory=lambda: defaultdict(dict))
    kept: dict[tuple[str, int], Value] = field(default_factory=dict)
    halves: dict[tuple[str, int], Value] = field(default_factory=dict)
    gradients: dict[tuple[int, str], set[tuple[int, Value]]] = field(default_factory=lambda: defaultdict(set))
    applied: set[tuple[int, str]] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)

    def compute(self, rank: int, operation: Operation) -> None:
        here, node, micro = self.tensors[rank], operation.node, operation.micro
        if operation.kind == "free":
            del here[operation.edge, operation.gradient, micro]
        elif operation.kind == "apply":
            expected = {(m, backward_value(self.spec, node, m)) for m in range(self.micro_batches)}
            assert self.gradients[rank, node] == expected
            assert rank in self.steps
            self.applied.add((rank, node))
        else:
            assert rank == self.spec.node(node).rank(micro)
            if operation.kind == "forward":
                self._forward(rank, node, micro)
            elif operation.kind == "backward_weight":
                self._learn(rank, node, micro, self.halves.pop((node, micro)))
            else:
                self._backward(rank, node, micro, whole=operation.kind == "backward")

    def _forward(self, rank: int, node: str, micro: int) -> None:
        here = self.tensors[rank]
        inputs = tuple(here[edge.name, False, micro] for edge in self.spec.inputs[node])
        assert (node, micro) not in self.kept
        self.kept[node, micro] = hash((node, micro, inputs))
        for edge in self.spec.outputs[node]:
            here[edge.name, False, micro] = self.kept[node, micro]

    def _backward(self, rank: int, node: str, micro: int, *, whole: bool) -> None:
        here = self.tensors[rank]
        gradients = tuple(here[edge.name, True, micro] for edge in self.spec.gradients_in[node])
        value = hash(("backward", self.kept[node, micro], gradients))
        for edge in self.spec.gradients_out[node]:
            here[edge.name, True, micro] = value
        if whole or not self.spec.node(node).trained:
            self._learn(rank, node, micro, value)
        else:
            self.halves[node, micro] = value

    def _learn(self, rank: int, node: str, micro: int, value: Value) -> None:
        assert (micro, value) not in self.gradients[rank, node]
        self.gradients[rank, node].add((micro, value))

    def give(self, rank: int, operation: Operation) -> Value:
        if operation.kind == "sum":
            return frozenset(self.gradients[rank, operation.node])
        return self.tensors[rank][operation.edge, operation.gradient, operation.micro]

    def take(self, rank: int, operation: Operation, values: Sequence[Value]) -> None:
        if operation.node == "step":
            self.steps.add(rank)
        elif operation.kind == "sum":
            for value in values:
                assert isinstance(value, frozenset)
                self.gradients[rank, operation.node] |= value
        elif operation.kind == "receive":
            (self.tensors[rank][operation.edge, operation.gradient, operation.micro],) = values
