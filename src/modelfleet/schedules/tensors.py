"""The tensors that a rank holds while it goes through its list: when each can be freed, and how large they are."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from modelfleet.errors import InputError
from modelfleet.schedules.operations import BACKWARDS, Operation, Schedule
from modelfleet.schedules.spec import EdgeSpec, GraphSpec


class Tensor(NamedTuple):
    """Names what goes along an edge: the values of a micro-batch, or their gradients."""

    edge: str
    gradient: bool
    micro: int


def used(operation: Operation, spec: GraphSpec) -> list[Tensor]:
    """Return the tensors that an operation needs to have on its rank."""
    micro = operation.micro
    if operation.kind == "send":
        return [Tensor(operation.edge, operation.gradient, micro)]
    if operation.kind == "forward":
        return [Tensor(edge.name, False, micro) for edge in spec.inputs[spec.node(operation.node).name]]
    if operation.kind in BACKWARDS:
        return [Tensor(edge.name, True, micro) for edge in spec.gradients_in[spec.node(operation.node).name]]
    return []


def made(operation: Operation, spec: GraphSpec) -> list[Tensor]:
    """Return the tensors that are on a rank after an operation, because it computed or received them."""
    micro = operation.micro
    if operation.kind == "receive":
        return [Tensor(operation.edge, operation.gradient, micro)]
    if operation.kind == "forward":
        return [Tensor(edge.name, False, micro) for edge in spec.outputs[spec.node(operation.node).name]]
    if operation.kind in ("backward", "backward_input"):
        return [Tensor(edge.name, True, micro) for edge in spec.gradients_out[spec.node(operation.node).name]]
    return []


def with_frees(operations: Sequence[Operation], spec: GraphSpec) -> tuple[Operation, ...]:
    """Return a rank's operations with a `free` after the last use of every tensor."""
    owners: dict[Tensor, str] = {}
    last: dict[Tensor, int] = {}
    for index, operation in enumerate(operations):
        for tensor in [*used(operation, spec), *made(operation, spec)]:
            last[tensor] = index
            if operation.node:
                owners[tensor] = operation.node
    ends: dict[int, list[Tensor]] = {}
    for tensor, index in last.items():
        ends.setdefault(index, []).append(tensor)
    result = []
    for index, operation in enumerate(operations):
        result.append(operation)
        for edge, gradient, micro in ends.get(index, ()):
            owner = owners[Tensor(edge, gradient, micro)]
            result.append(Operation("free", owner, micro, edge, gradient))
    return tuple(result)


def peak_bytes(schedule: Schedule, spec: GraphSpec) -> tuple[int, ...]:
    """Return the most that each rank holds at any time, without weights and their gradients.

    Counted are what nodes keep for their backwards, their outputs, and what came along edges. Only the order of a
    rank's list matters, not the time.

    Raises:
        InputError: If a rank uses what it has not computed or received, or has already freed.
    """
    return tuple(
        max((size for _, size in held(schedule, spec, rank)), default=0) for rank in range(len(schedule.devices))
    )


def held(schedule: Schedule, spec: GraphSpec, rank: int) -> Iterator[tuple[Operation, int]]:
    """Yield every operation of a rank with the bytes that the rank holds during it.

    Raises:
        InputError: If the rank uses what it does not have.
    """
    operations = schedule.operations[rank]
    holding = _Holding(schedule, spec, rank)
    for operation in operations:
        yield operation, holding.after(operation)
        holding.release(operation)


class _Holding:
    """What one rank holds."""

    def __init__(self, schedule: Schedule, spec: GraphSpec, rank: int) -> None:
        self.schedule = schedule
        self.spec = spec
        self.device = schedule.devices[rank]
        # A node that has no backward here keeps nothing for it.
        self.learning = {o.node for o in schedule.operations[rank] if o.kind in BACKWARDS}
        self.split = {o.node for o in schedule.operations[rank] if o.kind == "backward_weight"}
        self.here: dict[Tensor, int] = {}
        self.outputs: Counter[tuple[str, int]] = Counter()  # edges that still hold a node's output
        self.kept: set[tuple[str, int]] = set()
        self.halved: set[tuple[str, int]] = set()
        self.bytes = 0

    def after(self, operation: Operation) -> int:
        """Take over what an operation makes, and return the bytes that are held then."""
        spec, key = self.spec, (operation.node, operation.micro)
        for tensor in used(operation, spec):
            if tensor not in self.here:
                self._refuse(operation, f"it has not computed or received {_words(tensor)}, or has freed it")
        if operation.kind == "forward":
            node = spec.node(operation.node)
            self.outputs[key] = len(spec.outputs[node.name])
            self.bytes += node.output_bytes
            if node.name in self.learning:
                self.kept.add(key)
                self.bytes += node.kept_bytes
        elif operation.kind in BACKWARDS and key not in self.kept:
            self._refuse(operation, f"it has not computed forward {operation.node}[{operation.micro}]")
        elif operation.kind == "backward_weight" and key not in self.halved:
            self._refuse(operation, f"it has not computed backward_input {operation.node}[{operation.micro}]")
        elif operation.kind in ("backward", "backward_input"):
            self.bytes += spec.node(operation.node).recomputed_bytes
        for tensor in made(operation, spec):
            # The output of a node is one tensor, however many edges take it. It was counted with the node.
            self.here[tensor] = 0 if operation.kind == "forward" else self._edge(tensor.edge).bytes
            self.bytes += self.here[tensor]
        return self.bytes

    def release(self, operation: Operation) -> None:
        """Let go of what is not needed after an operation."""
        spec, key = self.spec, (operation.node, operation.micro)
        if operation.kind == "forward" and not spec.outputs[operation.node]:
            self.bytes -= spec.node(operation.node).output_bytes
        if operation.kind == "backward_input":
            self.halved.add(key)
        if operation.kind in BACKWARDS and (
            operation.kind != "backward_input" or operation.node not in self.split
        ):
            self.kept.discard(key)
            self.halved.discard(key)
            self.bytes -= spec.node(operation.node).kept_bytes + spec.node(operation.node).recomputed_bytes
        if operation.kind == "free":
            self._free(operation)

    def _free(self, operation: Operation) -> None:
        tensor = Tensor(operation.edge, operation.gradient, operation.micro)
        if tensor not in self.here:
            self._refuse(operation, "it does not hold it")
        self.bytes -= self.here.pop(tensor)
        source = self._edge(tensor.edge).source, tensor.micro
        if not tensor.gradient and self.outputs[source]:
            self.outputs[source] -= 1
            if not self.outputs[source]:
                self.bytes -= self.spec.node(source[0]).output_bytes

    def _edge(self, name: str) -> EdgeSpec:
        if name not in self.spec.edge:
            raise InputError(
                f"The schedule names the edge '{name}', which the graph does not have. Its edges are "
                f"{', '.join(self.spec.edge) or 'none'}."
            )
        return self.spec.edge[name]

    def _refuse(self, operation: Operation, reason: str) -> None:
        raise InputError(
            f"{self.device} can't do '{operation.describe(self.schedule.devices)}', because {reason}. Put what it "
            "needs before it in its list."
        )


def _words(tensor: Tensor) -> str:
    return f"{'the gradient of ' if tensor.gradient else ''}{tensor.edge}[{tensor.micro}]"
