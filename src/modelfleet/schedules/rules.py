"""The rules of the list scheduler: which of its ready computations an idle rank begins next."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil
from typing import Protocol

from modelfleet.errors import InputError
from modelfleet.schedules.operations import BACKWARDS, Operation
from modelfleet.schedules.spec import GraphSpec

# A place in the order of preference; the smallest comes first.
Preference = tuple[int, ...]


class Rule(Protocol):
    """Chooses among the ready computations of a rank."""

    def preference(self, rank: int, operation: Operation) -> Preference | None:
        """Return how soon a ready computation should begin, or None if it must not begin yet."""
        ...

    def began(self, rank: int, operation: Operation) -> None:
        """Take note that a computation begins."""
        ...

    def ended(self, rank: int, operation: Operation) -> None:
        """Take note that a computation has ended."""
        ...


class _InOrder:
    """Counts what was begun, so that each replica of a node goes through its micro-batches in order.

    With the order comes the proof that no rule gets stuck. Take the first micro-batch that is not done everywhere: it is
    the next one of every node that has not computed it, so no limit on micro-batches in flight holds it up.
    """

    def __init__(self, spec: GraphSpec, micro_batches: int) -> None:
        self.spec = spec
        self.micro_batches = micro_batches
        self.begun: Counter[tuple[str, int]] = Counter()  # forwards by node and rank
        self.levels = _levels(spec)

    def is_next(self, rank: int, operation: Operation) -> bool:
        replicas = self.spec.node(operation.node).ranks
        return operation.micro // len(replicas) == self.begun[operation.node, rank]

    def began(self, rank: int, operation: Operation) -> None:
        if operation.kind == "forward":
            self.begun[operation.node, rank] += 1

    def ended(self, rank: int, operation: Operation) -> None:
        """Take no note: what has begun is enough."""


class GPipe(_InOrder):
    """All forwards, then all backwards, the last micro-batch first."""

    def __init__(self, spec: GraphSpec, micro_batches: int) -> None:
        super().__init__(spec, micro_batches)
        self.forwards = Counter(node.rank(micro) for node in spec.nodes for micro in range(micro_batches))
        self.left = defaultdict(list)  # micro-batches whose backward has not begun, by node and rank
        for node in spec.nodes:
            for micro in range(micro_batches):
                self.left[node.name, node.rank(micro)].append(micro)

    def preference(self, rank: int, operation: Operation) -> Preference | None:
        node, micro = operation.node, operation.micro
        if operation.kind == "forward":
            return (micro, -self.levels[node]) if self.is_next(rank, operation) else None
        if self.forwards[rank] or self.left[node, rank][-1] != micro:
            return None
        return (-micro, -self.spec.position[node])

    def began(self, rank: int, operation: Operation) -> None:
        super().began(rank, operation)
        if operation.kind == "forward":
            self.forwards[rank] -= 1
        else:
            self.left[operation.node, rank].pop()


class OneForwardOneBackward(_InOrder):
    """Backwards first, and no more micro-batches in flight than the way to the losses and back needs.

    In a chain, the node that is k-th from the end may have k micro-batches between their forward and their backward. In
    any graph, k is the number of replicas on the longest way to an end, where nodes that follow each other on the same
    ranks count once.

    `zero_bubble` defers what nobody waits for (the backwards for the weights, and those that give no gradients to other
    nodes) until a rank would be idle, or until a node keeps as many micro-batches as the first node of 1F1B. This is
    ZB-H1 of https://arxiv.org/abs/2401.10241.
    """

    def __init__(self, spec: GraphSpec, micro_batches: int, *, zero_bubble: bool = False) -> None:
        super().__init__(spec, micro_batches)
        depths = _depths(spec)
        deepest = max(depths.values())
        self.zero_bubble = zero_bubble
        self.limits = {node.name: ceil(depths[node.name] / len(node.ranks)) for node in spec.nodes}
        self.kept_limits = {node.name: ceil(deepest / len(node.ranks)) for node in spec.nodes}
        self.in_flight: Counter[tuple[str, int]] = Counter()
        self.kept: Counter[tuple[str, int]] = Counter()
        # A node without a backward has a micro-batch in flight until the nodes behind it have computed theirs.
        self.readers = {
            (node.name, micro): len(spec.outputs[node.name])
            for node in spec.nodes
            if node.name not in spec.with_backward
            for micro in range(micro_batches)
        }

    def preference(self, rank: int, operation: Operation) -> Preference | None:
        key, micro = (operation.node, rank), operation.micro
        if operation.kind == "forward":
            allowed = self.is_next(rank, operation) and self.in_flight[key] < self.limits[operation.node]
            if self.zero_bubble:
                allowed = allowed and self.kept[key] < self.kept_limits[operation.node]
            return (1, micro, -self.levels[operation.node]) if allowed else None
        return (2 if self._can_wait(operation) else 0, micro, -self.spec.position[operation.node])

    def _can_wait(self, operation: Operation) -> bool:
        return self.zero_bubble and (
            operation.kind == "backward_weight" or not self.spec.gradients_out[operation.node]
        )

    def began(self, rank: int, operation: Operation) -> None:
        super().began(rank, operation)
        if operation.kind == "forward":
            self.in_flight[operation.node, rank] += 1
            self.kept[operation.node, rank] += 1

    def ended(self, rank: int, operation: Operation) -> None:
        spec, node, micro = self.spec, operation.node, operation.micro
        if operation.kind == "forward":
            for edge in spec.inputs[node]:
                if edge.source not in spec.with_backward:
                    self.readers[edge.source, micro] -= 1
                    if self.readers[edge.source, micro] == 0:
                        self._release(edge.source, micro)
            if self.readers.get((node, micro)) == 0:
                self._release(node, micro)
        if operation.kind in ("backward", "backward_input"):
            self.in_flight[node, rank] -= 1
        if operation.kind in ("backward", "backward_weight") or (
            operation.kind == "backward_input" and not spec.node(node).trained
        ):
            self.kept[node, rank] -= 1

    def _release(self, node: str, micro: int) -> None:
        rank = self.spec.node(node).rank(micro)
        self.in_flight[node, rank] -= 1
        self.kept[node, rank] -= 1


class Interleaved:
    """The interleaved 1F1B of Megatron-LM: each rank has every p-th stage of a chain.

    Micro-batches go in rounds of p, one per rank. In each round a rank computes its first stage for all micro-batches of
    the round, then its second, and so on; backwards run from the last stage to the first. See
    https://arxiv.org/abs/2104.04473.
    """

    def __init__(self, spec: GraphSpec, micro_batches: int, ranks: int) -> None:
        _check_interleaved(spec, ranks)
        stages = len(spec.nodes)
        self.turns: dict[tuple[bool, str, int], int] = {}  # of each forward and backward in its rank's order
        self.limits: dict[int, int] = {}
        for rank in range(ranks):
            own = [node.name for node in spec.nodes[rank::ranks]]
            learning = [name for name in own if name in spec.with_backward]
            for backward, names in ((False, own), (True, learning[::-1])):
                for turn, (name, micro) in enumerate(_rounds(names, micro_batches, ranks)):
                    self.turns[backward, name, micro] = turn
            warm_up = (len(own) - 1) * ranks + 2 * (ranks - 1 - rank)
            # A stage without a backward has no turn backwards that would end one of the rank's forwards.
            self.limits[rank] = warm_up + 1 if learning == own else stages * micro_batches
        self.next: Counter[tuple[bool, int]] = Counter()
        self.in_flight: Counter[int] = Counter()

    def preference(self, rank: int, operation: Operation) -> Preference | None:
        backward = operation.kind in BACKWARDS
        if self.turns[backward, operation.node, operation.micro] != self.next[backward, rank]:
            return None
        if backward:
            return (0,)
        return (1,) if self.in_flight[rank] < self.limits[rank] else None

    def began(self, rank: int, operation: Operation) -> None:
        self.next[operation.kind in BACKWARDS, rank] += 1
        self.in_flight[rank] += operation.kind == "forward"

    def ended(self, rank: int, operation: Operation) -> None:
        self.in_flight[rank] -= operation.kind in BACKWARDS


def _rounds(nodes: Sequence[str], micro_batches: int, size: int) -> list[tuple[str, int]]:
    return [
        (node, micro)
        for first in range(0, micro_batches, size)
        for node in nodes
        for micro in range(first, min(first + size, micro_batches))
    ]


def _check_interleaved(spec: GraphSpec, ranks: int) -> None:
    names = [node.name for node in spec.nodes]
    links = [(edge.source, edge.target) for edge in spec.edges]
    if sorted(set(links), key=lambda link: spec.position[link[0]]) != list(zip(names, names[1:], strict=False)):
        raise InputError(
            "schedule='interleaved' was given for a graph whose nodes do not stand in a row. It is for chains. "
            "Use schedule='1f1b', which takes any graph."
        )
    for stage, node in enumerate(spec.nodes):
        if node.ranks != (stage % ranks,):
            raise InputError(
                f"schedule='interleaved' was given, but stage '{node.name}' is on ranks {node.ranks}, where "
                f"({stage % ranks},) was expected. Place stage s on rank s % {ranks}, without replicas, or use "
                "schedule='1f1b'."
            )


def _levels(spec: GraphSpec) -> dict[str, int]:
    """Return the number of nodes on the longest way from each node to an end."""
    found: dict[str, int] = {}
    for node in reversed(spec.nodes):
        found[node.name] = 1 + max((found[edge.target] for edge in spec.outputs[node.name]), default=0)
    return found


def _depths(spec: GraphSpec) -> dict[str, int]:
    """Return the number of replicas on the longest way from each node to an end."""
    found: dict[str, int] = {}
    for node in reversed(spec.nodes):
        ways = [
            found[edge.target] + (0 if spec.node(edge.target).ranks == node.ranks else len(node.ranks))
            for edge in spec.outputs[node.name]
        ]
        found[node.name] = max(ways, default=len(node.ranks))
    return found
