"""Planning: tries every node on the rows of a micro-batch, places the nodes, and builds the schedule."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from modelfleet.errors import InputError
from modelfleet.frameworks.node_engine import Draws, DrawShapes, NodeEngine, NodeTrial, TrialInputs
from modelfleet.graph.placement import Rows, by_node, spread
from modelfleet.graph.plan import GraphPlan
from modelfleet.graph.topology import INPUT, Link, Topology, select
from modelfleet.schedules import EdgeSpec, GraphSpec, NodeSpec, ScheduleName, build
from modelfleet.trees import leaves, map_tree, paths
from modelfleet.types import Tree

MICRO_BATCHES_PER_RANK = 4
"""Of a batch, by default: enough that a pipeline is idle for less than a quarter of the time."""
LINK_SECONDS, LINK_BYTES_PER_SECOND = 5e-5, 2e9
"""What a transfer between two ranks of one machine takes: a guess, until a run has measured it."""


@dataclass(frozen=True)
class GraphTrial:
    """What all nodes of a graph did with a few rows."""

    nodes: Mapping[str, NodeTrial]
    outputs: Mapping[Link, Tree]
    """What each edge carried."""
    input_bytes: Mapping[str, int]
    """Size of what each node was given."""
    rows: int

    def draws(self, topology: Topology) -> tuple[dict[str, Draws], list[str]]:
        """Return the random draws of every node within those of the whole graph, and why some can't be divided."""
        shapes: list[tuple[tuple[int, ...], int | None]] = []
        first: dict[str, int] = {}
        alone: dict[str, Draws] = {}
        problems = []
        for name in topology.nodes:
            first[name] = len(shapes)
            own: DrawShapes | str = self.nodes[name].draws
            if isinstance(own, str):
                problems.append(f"node {name!r}: {own}")
                shapes += [((), None)] * self.nodes[name].drawn  # the next node's have other numbers
            elif self.nodes[name].own_streams:
                alone[name] = Draws(own, 0)
            else:
                shapes += own
        whole = tuple(shapes)
        return {name: alone.get(name, Draws(whole, first[name])) for name in topology.nodes}, problems


def no_draws(topology: Topology) -> dict[str, Draws]:
    """Return the draws of a verb that does not train: a node numbers its own."""
    return {name: Draws((), 0) for name in topology.nodes}


def try_graph(topology: Topology, engines: Mapping[str, NodeEngine], x: Tree, *, train: bool) -> GraphTrial:
    """Return what each node does with some rows, three or more, one node after the other.

    Raises:
        InputError: A node can't take what it is given. The message says what that is, and where it comes from.
    """
    rows = len(leaves(x)[0])
    fewer_rows = (rows + 1) // 2
    values: dict[Link, Tree] = {link: select(x, link.output, "x") for link in topology.inputs}
    fewer = {link: map_tree(lambda leaf: leaf[:fewer_rows], value) for link, value in values.items()}
    has_gradient = {name for name in topology.nodes if train and engines[name].trained}
    found: dict[str, NodeTrial] = {}
    given: dict[str, int] = {}
    for name in topology.nodes:
        engine, links = engines[name], topology.into[name]
        own = {link: engine.place(values[link]) for link in links}
        own_fewer = {link: engine.place(fewer[link]) for link in links}
        wanted: list[int] = []
        for link, places in topology.places(name, own).items():
            if link.differentiable and link.source in has_gradient:
                has_gradient.add(name)
                floats = zip(places, leaves(own[link]), strict=True)
                wanted += [place for place, leaf in floats if "float" in str(leaf.dtype)]
        arguments, few = topology.arguments(name, own), topology.arguments(name, own_fewer)
        try:
            found[name] = engine.try_out(TrialInputs(arguments, few, rows, fewer_rows), wanted, train=train)
        except InputError as error:
            raised_by_model = error.__cause__ is not None and not isinstance(error.__cause__, InputError)
            raise InputError(f"{error} {_given(links, own)}" if raised_by_model else str(error)) from error
        given[name] = sum(map(_bytes, own.values()))
        for link in topology.out_of[name]:
            values[link] = select(found[name].outputs, link.output, f"the output of {name!r}")
            fewer[link] = select(found[name].fewer_outputs, link.output, f"the output of {name!r}")
    return GraphTrial(found, {link: values[link] for link in topology.links}, given, rows)


def _given(links: Sequence[Link], values: Mapping[Link, Tree]) -> str:
    """Return in words what came over the edges into a node."""
    parts = []
    for link in links:
        source = "the data" if link.source == INPUT else repr(link.source)
        shapes = ", ".join(f"{path or ''}{tuple(leaf.shape)}" for path, leaf in paths(values[link]))
        parts.append(f"{source} gives {shapes}")
    return f"Here {'; '.join(parts)}. Give models whose shapes fit each other."


def make_spec(
    topology: Topology,
    rows: Rows,
    devices: Sequence[str],
    trial: GraphTrial | None,
    trained: Mapping[str, bool],
    recomputed: Collection[str],
) -> GraphSpec:
    """Return the nodes and edges with what they cost: as measured, or the same for all without a trial.

    A node that is `recomputed` keeps its inputs only, and its backward runs the forward again.
    """
    number = {device: rank for rank, device in enumerate(devices)}
    nodes = []
    for name in topology.nodes:
        ranks = tuple(number[device] for device in rows[name])
        if trial is None:
            nodes.append(NodeSpec(name, ranks, trained[name]))
            continue
        own, again = trial.nodes[name], name in recomputed
        forward, backward = max(own.forward, 1e-6), max(own.backward, 1e-6)
        nodes.append(
            NodeSpec(
                name,
                ranks,
                trained[name],
                forward=forward,
                backward=forward + backward if again else backward,
                backward_input=forward + backward / 2 if again else None,
                kept_bytes=trial.input_bytes[name] if again else own.kept_bytes,
                output_bytes=_bytes(own.outputs),
                recomputed_bytes=own.kept_bytes if again else 0,
            )
        )
    edges = []
    for link in topology.links:
        moved = 0 if trial is None else _bytes(trial.outputs[link])
        seconds = 0.0 if trial is None else LINK_SECONDS + moved / LINK_BYTES_PER_SECOND
        edges.append(EdgeSpec(link.name, link.source, link.target, link.differentiable, moved, seconds))
    return GraphSpec(tuple(nodes), tuple(edges))


def make_plan(
    topology: Topology,
    devices: object,
    available: Sequence[str],
    trial: GraphTrial | None,
    trained: Mapping[str, bool],
    *,
    batch_size: int,
    micro_batches: int | None,
    pipeline: ScheduleName,
    strategy: str,
    train: bool,
    fleets: Mapping[str, int],
    recomputed: Collection[str] = (),
) -> GraphPlan:
    """Return the plan of a verb.

    Args:
        topology: The graph.
        devices: The devices as the user gave them.
        available: The devices to use if they were not given by node.
        trial: What the nodes did with a few rows. None if nothing was tried.
        trained: Which nodes have weights to train.
        batch_size: The number of rows of a batch.
        micro_batches: The number of micro-batches; None for the default.
        pipeline: The rule of the schedule.
        strategy: How the ranks run.
        train: True if there are backward passes.
        fleets: The nodes that are fleets, with their numbers of members.
        recomputed: The nodes whose activations are computed again for the backward pass.
    """
    seconds = {
        name: 1.0 if trial is None else trial.nodes[name].forward + (trial.nodes[name].backward if train else 0.0)
        for name in topology.nodes
    }
    rows = by_node(devices, topology)  # pyrefly: ignore
    if rows is None:
        if len(available) > len(topology.nodes) and not isinstance(devices, str):
            raise InputError(
                f"there are {len(available)} devices for {len(topology.nodes)} nodes. Name fewer devices, or a "
                "row for each node, whose devices share its micro-batches: devices=[['cpu:0', 'cpu:1'], "
                "['cpu:2']]."
            )
        rows = spread(topology, available, seconds, in_turn=pipeline == "interleaved")
    used = tuple(dict.fromkeys(device for name in topology.nodes for device in rows[name]))
    longest = max(len(row) for row in rows.values())
    count = _micro_batches(micro_batches, batch_size, len(used), longest)
    spec = make_spec(topology, rows, used, trial, trained, recomputed if train else ())
    schedule = build(spec, used, micro_batches=count, schedule=pipeline, train=train)
    notes = (*_few_notes(count, len(used)), *_notes(trial, rows, count, train), *_fleet_notes(fleets))
    return GraphPlan(used, rows, spec, schedule, strategy, batch_size, notes, tried=trial is not None)


def _micro_batches(wanted: int | None, rows: int, ranks: int, longest: int) -> int:
    if wanted is None:
        return 1 if ranks == 1 else max(1, longest, min(rows // 2, MICRO_BATCHES_PER_RANK * ranks))
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise InputError(f"micro_batches is {wanted!r}; expected a whole number, 1 or more.")
    if wanted > rows:
        raise InputError(
            f"micro_batches is {wanted}, but a batch has {rows} rows, and each micro-batch needs one. Give at "
            f"most {rows}, or a larger batch_size."
        )
    if wanted < longest:
        raise InputError(
            f"micro_batches is {wanted}, but a node has {longest} devices, which share the micro-batches of a "
            f"batch: some would have none. Give at least {longest}."
        )
    return wanted


def _notes(trial: GraphTrial | None, rows: Rows, micro_batches: int, train: bool) -> tuple[str, ...]:
    notes = []
    if trial is not None and train and micro_batches > 1:
        notes += [
            f"{name!r}: it computes with, or updates its buffers by, all rows that it sees, as BatchNorm does. In "
            f"training these are the rows of one micro-batch, not of the whole batch. Use GroupNorm or LayerNorm, "
            f"freeze the norm (module.eval()), or set micro_batches=1 to train as the undivided model does"
            for name, own in trial.nodes.items()
            if own.mixes_rows
        ]
    several = [name for name, row in rows.items() if len(row) > 1]
    if several and train:
        names = ", ".join(map(repr, several))
        notes.append(
            f"{names}: gradients are summed over the row of devices; buffers are those of the first device"
        )
    return tuple(notes)


def _few_notes(micro_batches: int, ranks: int) -> list[str]:
    """Return what it means that there are fewer micro-batches than devices."""
    if micro_batches >= ranks:
        return []
    few = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return [
        f"{few} on {ranks} devices: of nodes that stand in a row, no more than {micro_batches} can work at once. "
        f"Use {MICRO_BATCHES_PER_RANK * ranks} micro-batches, and a batch_size that has rows for them"
    ]


def _fleet_notes(fleets: Mapping[str, int]) -> list[str]:
    return [
        f"{name!r}: {members:,} members as one stacked program on the same inputs; their losses are summed"
        for name, members in fleets.items()
    ]


def _bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in leaves(map_tree(lambda leaf: leaf, tree)))
