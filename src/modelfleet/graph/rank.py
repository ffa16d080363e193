"""One rank: goes through its list of operations, step by step, with the engines of its nodes."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from modelfleet.frameworks.held_bytes import HeldBytes
from modelfleet.frameworks.node_engine import LossParts, NodeEngine
from modelfleet.graph.board import Board, Position
from modelfleet.graph.orders import StepOrder, StepReport
from modelfleet.graph.recording import Recorder
from modelfleet.graph.topology import INPUT, Link, Topology, place_of, select
from modelfleet.graph.transport import Message, Transport
from modelfleet.schedules import GraphSpec, Operation, Schedule
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tensor, Tree

Numbers = Callable[[Sequence[float]], Tensor]
"""Makes a tensor of float64 numbers, for a sum."""


class Rank:
    """Runs the steps of one rank.

    Args:
        number: The rank.
        engines: The engines of its nodes.
        topology: The graph.
        spec: Where its nodes are, and which of them have a backward pass.
        schedules: The schedules that steps follow, by name.
        losses: The nodes that have a loss.
        transport: Moves tensors to and from the other ranks.
        numbers: Makes the tensors of small sums.
        host: For each node, copies a tensor to the host, for outputs.
        divides: True if each loss is divided by a count of its own.
        clip: Returns what gradients are multiplied by, from the norm of the whole graph's.
        board: Where the rank marks its operations.
    """

    def __init__(
        self,
        number: int,
        engines: Mapping[str, NodeEngine],
        topology: Topology,
        spec: GraphSpec,
        schedules: Mapping[str, Schedule],
        losses: Sequence[str],
        transport: Transport,
        numbers: Numbers,
        host: Mapping[str, Callable[[Tensor], object]],
        *,
        divides: bool = False,
        clip: Callable[[float], float] | None = None,
        board: Board | None = None,
    ) -> None:
        self.number = number
        self.engines = dict(engines)
        self.recorder = Recorder(number)
        self._topology, self._spec, self._schedules = topology, spec, schedules
        self._links = {link.name: link for link in topology.links}
        self._losses, self._divides = tuple(losses), divides
        self._transport, self._numbers, self._host = transport, numbers, host
        self._clip, self._board = clip, board
        self._steps = 0
        self._taken = dict.fromkeys(schedules, 0)  # steps that followed each schedule
        self.peak_bytes: dict[str, int] = {}
        """The most that it has held in a step, by schedule, from the second whole step on."""
        self._held: HeldBytes | None = None  # in the step that counts it
        self._failed = False  # after a step whose numbers were not finite, no other is taken
        self._does: dict[str, Callable[[Operation], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "backward_input": self._backward,
            "backward_weight": self._backward_weight,
            "send": self._send,
            "receive": self._receive,
            "sum": self._sum,
            "apply": self._apply,
            "free": self._free,
        }

    def run(self, order: StepOrder) -> StepReport:
        """Take one step, or compute one batch."""
        if order.step.train and self._failed:
            return StepReport(skipped=True)
        schedule = self._schedules[order.schedule]
        number = list(self._schedules).index(order.schedule)
        self._order = order
        self._trains = self._spec.with_backward if order.step.train else frozenset()
        self._tensors: dict[tuple[Link, int], Tree] = {}
        self._gradients: dict[tuple[Link, int], list[Tensor | None]] = {}
        self._found: dict[str, dict[int, LossParts]] = {name: {} for name in self._losses if name in self.engines}
        self._wanted_outputs: dict[str, dict[int, Tree]] = {name: {} for name in order.outputs}
        self._shapes: dict[tuple[str, int], tuple[int, dict[Link, list[int]]]] = {}
        self._asked: dict[tuple[str, int], list[tuple[Link, int]]] = {}
        self._float_leaves: dict[tuple[Link, int], list[bool]] = {}  # of an output, until its gradient is there
        self._counts: dict[str, float] = {}
        self._receives: dict[Message, int] = {}  # by the number of the operation
        self._scale, self._skipped = 1.0, False
        self._transport.begin(self._steps, [stop - start for start, stop in order.step.rows])
        for name, engine in self.engines.items():
            engine.begin(order.step, order.hyper.get(name, {}), order.draws[name])
        self._inputs = {
            link: self.engines[link.target].place(order.inputs[link.name])
            for link in self._topology.inputs
            if link.target in self.engines
        }
        self._targets = {
            name: self.engines[name].place(own) for name, own in order.targets.items() if name in self.engines
        }
        micro_batches = len(order.step.rows)  # fewer than planned in a short batch, which is not recorded
        whole = micro_batches == schedule.micro_batches
        if whole:
            self.recorder.begin(order.schedule)
        # A model with an error in its backward pass has raised in the first step, where nothing is counted.
        self._count_into(
            HeldBytes() if whole and order.step.train and self.recorder.second(order.schedule) else None
        )
        for index, operation in enumerate(schedule.operations[self.number]):
            if operation.micro >= micro_batches:
                continue
            if self._board is not None:
                self._board.mark(self.number, Position(number, self._taken[order.schedule], index))
            begun, self._waited, self._index = time.perf_counter(), 0.0, index
            self._does[operation.kind](operation)
            if whole:
                self.recorder.add(order.schedule, index, operation, begun, time.perf_counter(), self._waited)
            if self._held is not None:
                self._held.move(self._moving())
        if self._held is not None:
            self.peak_bytes[order.schedule] = self._held.most
            self._count_into(None)
        self._steps += 1
        self._taken[order.schedule] += 1
        self._failed |= self._skipped
        for engine in self.engines.values():
            engine.end(skipped=self._skipped)
        failed = {name: dict(engine.failed) for name, engine in self.engines.items() if engine.failed}
        report = StepReport(self._found, self._wanted_outputs, self._skipped, failed)
        self._inputs, self._targets, self._tensors, self._gradients = {}, {}, {}, {}
        return report

    def _count_into(self, held: HeldBytes | None) -> None:
        """Let this rank and its engines count what they hold; None ends it."""
        self._held = held
        for name, engine in self.engines.items():
            count_into = getattr(engine, "count_into", None)
            # A node that kept nothing in its trial has nothing to count, or is one whose tensors can't be counted.
            node = self._spec.node(name)
            if count_into is not None and (held is None or node.kept_bytes + node.recomputed_bytes):
                count_into(held)

    def _moving(self) -> int:
        """Return the size of the tensors and gradients of all edges that are here, or on their way to here."""
        trees = [*self._tensors.values(), *self._gradients.values()]
        here = {id(leaf): leaf for tree in trees for leaf in leaves(tree) if leaf is not None}
        coming = sum(self._spec.edge[message.edge].bytes for message in self._receives)
        return coming + sum(getattr(leaf, "nbytes", 0) for leaf in here.values())

    # --- computing -----------------------------------------------------------------------------------------------

    def _forward(self, operation: Operation) -> None:
        node, micro, engine = operation.node, operation.micro, self.engines[operation.node]
        start, stop = self._order.step.rows[micro]
        values: dict[Link, Tree] = {}
        for link in self._topology.into[node]:
            if link.source == INPUT:
                whole = self._inputs[link]
                values[link] = map_tree(lambda leaf: leaf[start:stop], whole)
            else:
                values[link] = engine.place(self._value(link, micro))
        wanted, asked = [], []
        if self._order.step.train:
            for link, places in self._topology.places(node, values).items():
                if self._carries_gradient(link):
                    floats = [p for p, leaf in zip(places, leaves(values[link]), strict=True) if _floats(leaf)]
                    wanted += floats
                    asked += [(link, place) for place in floats]
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        self._asked[node, micro] = [asked[index] for index in order]
        outputs = engine.forward(micro, self._topology.arguments(node, values), sorted(wanted))
        places_out = {}
        for link in self._topology.out_of[node]:
            part = select(outputs, link.output, f"the output of {node!r}")
            self._tensors[link, micro] = part
            self._float_leaves[link, micro] = [_floats(leaf) for leaf in leaves(part)]
            places_out[link] = place_of(outputs, link.output, f"the output of {node!r}")
        self._shapes[node, micro] = len(leaves(outputs)), places_out
        if node in self._wanted_outputs:
            self._wanted_outputs[node][micro] = map_tree(self._host[node], outputs)
        if node in self._targets:
            self._loss(node, micro)

    def _loss(self, node: str, micro: int) -> None:
        engine, target = self.engines[node], self._targets[node]
        start, stop = self._order.step.rows[micro]
        divisor = float(self._order.step.count)  # for most losses the count: then nothing is left to divide
        if self._order.step.train and self._divides:
            # The gradients of several losses meet, so each is divided by its own count before.
            if node not in self._counts:
                self._counts[node] = engine.count(micro, target)
            divisor = self._counts[node]
        rows = map_tree(lambda leaf: leaf[start:stop], target)
        self._found[node][micro] = engine.loss(micro, rows, divisor)

    def _backward(self, operation: Operation) -> None:
        node, micro, engine = operation.node, operation.micro, self.engines[operation.node]
        count, places = self._shapes.pop((node, micro))
        gradients: list[Tensor | None] = [None] * count
        for link, own in places.items():
            if self._carries_gradient(link):
                for place, gradient in zip(own, self._gradient(link, micro), strict=True):
                    if gradient is not None:
                        gradient = engine.place(gradient)
                        before = gradients[place]
                        gradients[place] = gradient if before is None else before + gradient
        found = engine.backward(micro, gradients, inputs_only=operation.kind == "backward_input")
        asked = self._asked.pop((node, micro))
        for link in self._topology.into[node]:
            if link.source != INPUT and self._carries_gradient(link):
                by_place = {place: g for (own, place), g in zip(asked, found, strict=True) if own == link}
                places_in = sorted(by_place)
                self._gradients[link, micro] = [by_place[place] for place in places_in]

    def _backward_weight(self, operation: Operation) -> None:
        self.engines[operation.node].backward_weights(operation.micro)

    def _carries_gradient(self, link: Link) -> bool:
        return link.differentiable and link.source in self._trains and link.target in self._trains

    def _value(self, link: Link, micro: int) -> Tree:
        """Return the tensors of an edge, waiting for them if they come from another rank."""
        if (link, micro) not in self._tensors:
            self._tensors[link, micro] = self._take(self._message(link, micro, gradient=False))
        return self._tensors[link, micro]

    def _gradient(self, link: Link, micro: int) -> list[Tensor | None]:
        """Return the gradients of an edge's tensors, by leaf."""
        if (link, micro) not in self._gradients:
            self._gradients[link, micro] = self._take(self._message(link, micro, gradient=True))
        found = iter(self._gradients[link, micro])
        return [next(found) if floats else None for floats in self._float_leaves.pop((link, micro))]

    def _take(self, message: Message) -> Tree:
        with self._waiting():
            found = self._transport.take(message)
        if len(self._order.step.rows) == self._schedules[self._order.schedule].micro_batches:
            # TensorFlow's tensors on a GPU do not say how large they are.
            moved = sum(getattr(leaf, "nbytes", 0) for leaf in leaves(found) if leaf is not None)
            self.recorder.received(self._order.schedule, self._receives.pop(message), moved)
        return found

    def _message(self, link: Link, micro: int, *, gradient: bool) -> Message:
        source, target = (self._rank_of(node, micro) for node in (link.source, link.target))
        return Message(link.name, gradient, micro, *((target, source) if gradient else (source, target)))

    def _rank_of(self, node: str, micro: int) -> int:
        return self._spec.node(node).rank(micro)

    # --- moving --------------------------------------------------------------------------------------------------

    def _send(self, operation: Operation) -> None:
        link = self._links[operation.edge]
        tree = (self._gradients if operation.gradient else self._tensors)[link, operation.micro]
        self._transport.send(self._message(link, operation.micro, gradient=operation.gradient), tree)

    def _receive(self, operation: Operation) -> None:
        link = self._links[operation.edge]
        message = self._message(link, operation.micro, gradient=operation.gradient)
        self._receives[message] = self._index
        self._transport.expect(message)

    def _free(self, operation: Operation) -> None:
        kept = self._gradients if operation.gradient else self._tensors
        kept.pop((self._links[operation.edge], operation.micro), None)

    # --- the update ----------------------------------------------------------------------------------------------

    def _sum(self, operation: Operation) -> None:
        if operation.node in self.engines:
            tensors = self.engines[operation.node].gradients()
            with self._waiting():
                self._transport.sum(operation.node, operation.ranks, tensors)
        else:
            tensors = [self._step_numbers()]
            with self._waiting():
                self._transport.sum("the step", operation.ranks, tensors)
            self._decide(tensors[0].tolist())

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context in which this rank waits for others."""
        begun = time.perf_counter()
        if self._board is not None:
            self._board.mark_waiting(self.number, True)
        try:
            yield
        finally:
            self._waited += time.perf_counter() - begun
        if self._board is not None:
            self._board.mark_waiting(self.number, False)

    def _step_numbers(self) -> Tensor:
        """Return what this rank adds to the numbers of the step: loss, count, squared norm, and trouble."""
        parts = [part for own in self._found.values() for part in own.values()]
        total, count = sum(part.total for part in parts), sum(part.count for part in parts)
        squares, fine = 0.0, math.isfinite(total)
        for name, engine in self.engines.items():
            if name in self._trains and self._spec.node(name).ranks[0] == self.number:
                own, finite = engine.norm()
                squares, fine = squares + own, fine and finite
        # Infinity minus infinity would be NaN on the way: trouble is a number of its own.
        return self._numbers([total if fine else 0.0, count, squares if fine else 0.0, 0.0 if fine else 1.0])

    def _decide(self, numbers: Sequence[float]) -> None:
        """Set the factor of the gradients, or skip the step, from the numbers of all ranks."""
        _, count, squares, trouble = numbers
        left = 1.0 if self._divides else count / self._order.step.count
        self._skipped = trouble > 0 or not left or not math.isfinite(squares)
        if self._skipped:
            return
        self._scale = 1.0 / left
        norm = math.sqrt(squares) / left
        if self._clip is not None:
            self._scale *= self._clip(norm)

    def _apply(self, operation: Operation) -> None:
        if not self._skipped:
            self.engines[operation.node].apply(self._scale)


def _floats(leaf: Tensor) -> bool:
    """Return True if a tensor of any framework can take a gradient."""
    return "float" in str(leaf.dtype) or "complex" in str(leaf.dtype)
