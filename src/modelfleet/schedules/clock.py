"""The list scheduler: plays a step in a simulated clock, and writes down who did what in which order."""

import heapq
from collections import Counter, defaultdict
from itertools import count as counting

from modelfleet.schedules.operations import Operation
from modelfleet.schedules.rules import Rule
from modelfleet.schedules.spec import EdgeSpec, GraphSpec


class Clock:
    """Plays the computations and transfers of one step.

    Every computation is written down when it begins, and every transfer when its tensor exists, for both ranks at
    once. So `lists` are the projections of one order in which everything happens.

    Args:
        spec: The graph.
        ranks: The number of ranks.
        micro_batches: The number of micro-batches.
        rule: Chooses what an idle rank begins.
        halves: Whether backwards are split into those for the inputs and those for the weights.
    """

    def __init__(self, spec: GraphSpec, ranks: int, micro_batches: int, rule: Rule, *, halves: bool) -> None:
        self.spec = spec
        self.rule = rule
        self.halves = halves
        self.micro_batches = micro_batches
        self.lists: list[list[Operation]] = [[] for _ in range(ranks)]
        self.ready: list[list[Operation]] = [[] for _ in range(ranks)]
        self.idle = [True] * ranks
        self.missing: Counter[Operation] = Counter()  # how many inputs a computation waits for
        self.left: Counter[str] = Counter()  # computations that remain before a node's gradients are whole
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.events: list[tuple[float, int, int, Operation, bool]] = []  # time, number, rank, computation, ended
        self.numbers = counting()

    def play(self) -> tuple[tuple[Operation, ...], ...]:
        """Return the operations of every rank."""
        total = self._prepare()
        done = 0
        self._begin(0.0)
        while self.events:
            time = self.events[0][0]
            while self.events and self.events[0][0] == time:
                _, _, rank, operation, ended = heapq.heappop(self.events)
                if ended:
                    done += 1
                    self.idle[rank] = True
                    self.rule.ended(rank, operation)
                    self._end(rank, operation, time)
                else:
                    self._arrive(rank, operation)
            self._begin(time)
        assert done == total, "a rule must always allow a ready computation that the others wait for"
        return tuple(map(tuple, self.lists))

    def _prepare(self) -> int:
        """Count the inputs of every computation, and return the number of computations."""
        spec, total = self.spec, 0
        for node in spec.nodes:
            for micro in range(self.micro_batches):
                rank = node.rank(micro)
                total += 1
                forward = Operation("forward", node.name, micro)
                self.missing[forward] = len(spec.inputs[node.name])
                if not self.missing[forward]:
                    self.ready[rank].append(forward)
                if node.name in spec.with_backward:
                    backward = self._backward(node.name, micro)
                    self.missing[backward] = 1 + len(spec.gradients_in[node.name])
                    own = 2 if backward.kind == "backward_input" and node.trained else 1
                    total += own
                    self.left[node.name] += own
        return total

    def _backward(self, node: str, micro: int) -> Operation:
        """Return the backward that gives gradients to other nodes. One that gives none is never split."""
        halves = self.halves and bool(self.spec.gradients_out[node])
        return Operation("backward_input" if halves else "backward", node, micro)

    def _begin(self, time: float) -> None:
        """Let every idle rank begin what its rule prefers."""
        for rank, idle in enumerate(self.idle):
            if not idle:
                continue
            chosen, best = None, None
            for operation in self.ready[rank]:
                preference = self.rule.preference(rank, operation)
                if preference is not None and (best is None or preference < best):
                    chosen, best = operation, preference
            if chosen is None:
                continue
            self.ready[rank].remove(chosen)
            self.idle[rank] = False
            self.rule.began(rank, chosen)
            self.lists[rank].append(chosen)
            self._at(time + self.spec.node(chosen.node).seconds(chosen.kind), rank, chosen, ended=True)

    def _at(self, time: float, rank: int, operation: Operation, *, ended: bool) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), rank, operation, ended))

    def _end(self, rank: int, operation: Operation, time: float) -> None:
        """Pass on what a computation has computed."""
        spec, node, micro = self.spec, operation.node, operation.micro
        if operation.kind == "forward":
            for edge in spec.outputs[node]:
                target = spec.node(edge.target).rank(micro)
                self._pass_on(edge, micro, rank, target, Operation("forward", edge.target, micro), time)
            if node in spec.with_backward:
                self._arrive(rank, self._backward(node, micro))
            return
        if operation.kind != "backward_weight":
            for edge in spec.gradients_out[node]:
                source = spec.node(edge.source).rank(micro)
                self._pass_on(edge, micro, rank, source, self._backward(edge.source, micro), time)
            if operation.kind == "backward_input" and spec.node(node).trained:
                self._arrive(rank, Operation("backward_weight", node, micro))
        self.left[node] -= 1
        replicas = tuple(sorted(spec.node(node).ranks))
        if not self.left[node] and spec.node(node).trained and len(replicas) > 1:
            # The gradients are whole: sum them now, while other nodes still compute theirs.
            for replica in replicas:
                self.lists[replica].append(Operation("sum", node, ranks=replicas))

    def _pass_on(self, edge: EdgeSpec, micro: int, here: int, there: int, reader: Operation, time: float) -> None:
        """Give a tensor to the computation that reads it, by a transfer if that is on another rank."""
        if here == there:
            self._arrive(there, reader)
            return
        gradient = reader.kind != "forward"
        self.lists[here].append(Operation("send", micro=micro, edge=edge.name, gradient=gradient, peer=there))
        self.lists[there].append(Operation("receive", micro=micro, edge=edge.name, gradient=gradient, peer=here))
        arrival = max(time, self.link_free[here, there]) + edge.seconds
        self.link_free[here, there] = arrival
        self._at(arrival, there, reader, ended=False)

    def _arrive(self, rank: int, operation: Operation) -> None:
        self.missing[operation] -= 1
        if self.missing[operation] <= 0:  # a backward for the weights has no other input
            self.ready[rank].append(operation)
