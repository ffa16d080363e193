"""Graphs to build schedules for: chains, and any that hypothesis draws."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from modelfleet.schedules import EdgeSpec, GraphSpec, NodeSpec, Operation, Schedule, ScheduleName, build

TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
ANY_GRAPH: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zero-bubble")


def chain(stages: int, ranks: int | None = None, *, forward: float = 1.0, backward: float = 1.0) -> GraphSpec:
    """A chain whose stage s is on rank s % ranks. Its stages keep one byte for each micro-batch."""
    return GraphSpec(
        tuple(
            NodeSpec(f"s{stage}", (stage % (ranks or stages),), forward=forward, backward=backward, kept_bytes=1)
            for stage in range(stages)
        ),
        tuple(EdgeSpec(f"s{stage}→s{stage + 1}", f"s{stage}", f"s{stage + 1}") for stage in range(stages - 1)),
    )


def grouped(stages: int, ranks: int) -> GraphSpec:
    """The same chain with neighbouring stages on one rank."""
    spec = chain(stages, ranks)
    size = stages // ranks
    return GraphSpec(
        tuple(replace(node, ranks=(stage // size,)) for stage, node in enumerate(spec.nodes)), spec.edges
    )


def devices(ranks: int) -> tuple[str, ...]:
    return tuple(f"cpu:{rank}" for rank in range(ranks))


@dataclass(frozen=True)
class Case:
    """What `build` is called with."""

    spec: GraphSpec
    ranks: int
    micro_batches: int
    schedule: ScheduleName
    train: bool

    def build(self) -> Schedule:
        return build(
            self.spec,
            devices(self.ranks),
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            train=self.train,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any graph, with skips, fans, unequal rows of replicas, frozen nodes and detached edges."""
    ranks = draw(st.integers(1, 4))
    schedule: ScheduleName = draw(st.sampled_from((*ANY_GRAPH, "interleaved")))
    count = draw(st.integers(1, 6))
    nodes, edges = [], []
    for number in range(count):
        rows = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=3, unique=True)
        nodes.append(
            NodeSpec(
                f"n{number}",
                (number % ranks,) if schedule == "interleaved" else tuple(draw(rows)),
                trained=draw(st.integers(0, 3)) > 0,
                forward=draw(TIMES),
                backward=draw(TIMES),
                kept_bytes=draw(st.integers(0, 9)),
                output_bytes=draw(st.integers(0, 9)),
            )
        )
        before = st.sets(st.integers(0, number - 1), max_size=3) if number else st.just(set())
        sources = {number - 1} if schedule == "interleaved" else draw(before)
        for source in sorted(sources) if number else ():
            edges.append(
                EdgeSpec(
                    f"n{source}→n{number}",
                    f"n{source}",
                    f"n{number}",
                    differentiable=draw(st.integers(0, 3)) > 0,
                    bytes=draw(st.integers(0, 9)),
                    seconds=draw(TIMES),
                )
            )
    rows_of_replicas = max(len(node.ranks) for node in nodes)
    micro_batches = draw(st.integers(rows_of_replicas, rows_of_replicas + 5))
    return Case(GraphSpec(tuple(nodes), tuple(edges)), ranks, micro_batches, schedule, draw(st.integers(0, 4)) > 0)


@st.composite
def perturbed(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """Change a schedule at a few places: swap, move, drop or join operations."""
    lists = [list(own) for own in schedule.operations]
    for _ in range(draw(st.integers(1, 3))):
        own = draw(st.sampled_from(lists))
        if not own:
            continue
        first, second = draw(st.integers(0, len(own) - 1)), draw(st.integers(0, len(own) - 1))
        change = draw(st.sampled_from(("swap", "swap", "swap", "move", "drop", "join")))
        if change == "swap":
            own[first], own[second] = own[second], own[first]
        elif change == "move":
            own.insert(second, own.pop(first))
        elif change == "drop":
            own.pop(first)
        else:
            own[first] = replace(own[first], with_previous=True)
    return replace(schedule, operations=tuple(map(_legal, lists)))


@st.composite
def crossings(draw: st.DrawFn) -> Schedule:
    """Draw a few transfers and sums, which each rank has in its own random order. Most of them deadlock."""
    ranks = draw(st.integers(1, 4))
    lists: list[list[Operation]] = [[] for _ in range(ranks)]
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 4)) == 0:
            members = tuple(sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1))))
            for rank in members:
                lists[rank].append(Operation("sum", draw(st.sampled_from("xx")), ranks=members))
            continue
        source, target = draw(st.integers(0, ranks - 1)), draw(st.integers(0, ranks - 1))
        edge, micro, gradient = draw(st.sampled_from("ab")), draw(st.integers(0, 1)), draw(st.booleans())
        lists[source].append(Operation("send", micro=micro, edge=edge, gradient=gradient, peer=target))
        lists[target].append(Operation("receive", micro=micro, edge=edge, gradient=gradient, peer=source))
    lists = [draw(st.permutations(own)) for own in lists]
    joined = [
        _legal([replace(operation, with_previous=draw(st.integers(0, 3)) == 0) for operation in own])
        for own in lists
    ]
    return Schedule("crossing", devices(ranks), 2, tuple(joined))


def _legal(operations: list[Operation]) -> tuple[Operation, ...]:
    """The operations, of which only transfers after transfers run at once with the one before."""
    result: list[Operation] = []
    for operation in operations:
        follows = bool(result) and result[-1].kind in ("send", "receive") and operation.kind in ("send", "receive")
        result.append(replace(operation, with_previous=operation.with_previous and follows))
    return tuple(result)
