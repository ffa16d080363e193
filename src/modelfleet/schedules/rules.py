"""The rules of the list scheduler: which of its ready computations an idle rank begins next."""

from collections import Counter, defaultdict
from itertools import pairwise, zip_longest
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

    With the order comes the proof that no rule gets stuck. Take the first micro-batch that is not done everywhere:
    it is the next one of every node that has not computed it, and that node has no other in flight. So no limit
    holds it up.
    """

    def __init__(self, spec: GraphSpec, micro_batches: int) -> None:
        self.spec = spec
        self.micro_batches = micro_batches
        self.begun: Counter[tuple[str, int]] = Counter()  # forwards by node and rank
        self.levels = _levels(spec)

    def is_next(self, rank: int, operation: Operation) -> bool:
        """Return True if a forward is of the micro-batch that its replica computes next."""
        replicas = self.spec.node(operation.node).ranks
        return operation.micro // len(replicas) == self.begun[operation.node, rank]

    def began(self, rank: int, operation: Operation) -> None:
        """Count it."""
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
        """Prefer the first forward, and after all forwards the last backward."""
        node, micro = operation.node, operation.micro
        if operation.kind == "forward":
            return (micro, -self.levels[node]) if self.is_next(rank, operation) else None
        if self.forwards[rank] or self.left[node, rank][-1] != micro:
            return None
        return (-micro, -self.spec.position[node])

    def began(self, rank: int, operation: Operation) -> None:
        """Count it."""
        super().began(rank, operation)
        if operation.kind == "forward":
            self.forwards[rank] -= 1
        else:
            self.left[operation.node, rank].pop()


class OneForwardOneBackward(_InOrder):
    """Backwards first, and no more micro-batches in flight than the way to the losses and back needs.

    In a chain, the node that is k-th from the end may have k micro-batches between their forward and their
    backward. In any graph, k is the number of replicas on the longest way to an end, where nodes that follow each
    other on the same ranks count once.

    `zero_bubble` defers what nobody waits for (the backwards for the weights, and those that give no gradients to
    other nodes) until a rank would be idle, or until a node keeps as many micro-batches as the first node of 1F1B.
    This is ZB-H1 of https://arxiv.org/abs/2401.10241.
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
        """Prefer backwards, then forwards that the limits allow, then what can wait."""
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
        """Count it."""
        super().began(rank, operation)
        if operation.kind == "forward":
            self.in_flight[operation.node, rank] += 1
            self.kept[operation.node, rank] += 1

    def ended(self, rank: int, operation: Operation) -> None:
        """Count it as no longer in flight."""
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
    """The interleaved 1F1B of Megatron-LM: each rank has every p-th stage of a chain, and one fixed order.

    Micro-batches go in rounds of at least p. In each round a rank computes its first stage for all micro-batches
    of the round, then its second, and so on; backwards run from its last stage to the first. After its first
    forwards a rank does one forward and one backward in turn. See https://arxiv.org/abs/2104.04473.
    """

    def __init__(self, spec: GraphSpec, micro_batches: int, ranks: int) -> None:
        self.orders = [_interleaved_order(spec, micro_batches, rank, ranks) for rank in range(ranks)]
        self.next = [0] * ranks

    def preference(self, rank: int, operation: Operation) -> Preference | None:
        """Allow what the order has next, and nothing else."""
        turn = operation.kind in BACKWARDS, operation.node, operation.micro
        return () if self.orders[rank][self.next[rank]] == turn else None

    def began(self, rank: int, operation: Operation) -> None:
        """Go on in the order."""
        self.next[rank] += 1

    def ended(self, rank: int, operation: Operation) -> None:
        """Take no note: the order is fixed."""


def _interleaved_order(spec: GraphSpec, micro_batches: int, rank: int, ranks: int) -> list[tuple[bool, str, int]]:
    """Return a rank's computations: whether each is a backward, its node and its micro-batch.

    The order is that of a chain in which all ranks have equally many stages. What this chain does not have is left
    out: an order that ends still ends without its last stages, and without the backwards of its first ones.
    """
    stages = range(rank, -(-len(spec.nodes) // ranks) * ranks, ranks)
    count = max(1, micro_batches // ranks)
    bounds = [micro_batches * index // count for index in range(count + 1)]
    rounds = [range(first, end) for first, end in pairwise(bounds)]
    forwards = [(False, stage, micro) for each in rounds for stage in stages for micro in each]
    backwards = [(True, stage, micro) for each in rounds for stage in stages[::-1] for micro in each]
    longest = max(map(len, rounds))
    warm_up = min(len(forwards), (len(stages) - 1) * longest + 2 * (ranks - 1 - rank))
    order = forwards[:warm_up]
    for forward, backward in zip_longest(forwards[warm_up:], backwards):
        order += [forward, backward] if forward else [backward]
    names = [node.name for node in spec.nodes]
    return [
        (backward, names[stage], micro)
        for backward, stage, micro in order
        if stage < len(names) and (not backward or names[stage] in spec.with_backward)
    ]


def check_interleaved(spec: GraphSpec, ranks: int) -> None:
    """Raise InputError if a graph is not a chain whose stages are dealt out to the ranks in turn."""
    names = [node.name for node in spec.nodes]
    links = [(edge.source, edge.target) for edge in spec.edges]
    if sorted(set(links), key=lambda link: spec.position[link[0]]) != list(pairwise(names)):
        raise InputError(
            "pipeline='interleaved' was given for a graph whose nodes do not stand in a row. It is for chains "
            "without skips. Use pipeline='1f1b', which takes any graph."
        )
    for stage, node in enumerate(spec.nodes):
        if node.ranks != (stage % ranks,):
            raise InputError(
                f"pipeline='interleaved' was given, but stage '{node.name}' is on ranks {node.ranks}, where "
                f"({stage % ranks},) was expected. Place stage s on rank s % {ranks}, without replicas, or use "
                "pipeline='1f1b'."
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
