"""The task of a rank, wherever its worker is: opens its nodes, and runs what the owner sends."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from modelfleet import frameworks
from modelfleet.devices import parse_devices
from modelfleet.errors import StrategyError
from modelfleet.frameworks.contexts import computing, using_settings
from modelfleet.frameworks.fleet_models import FleetModels
from modelfleet.frameworks.node_engine import NodeEngine, require_nodes
from modelfleet.graph.orders import NodeOrder, RankOrder, StateOrder, StepOrder, StepReport
from modelfleet.graph.rank import Rank
from modelfleet.graph.topology import INPUT
from modelfleet.graph.transport import Hub, ThreadTransport, Transport
from modelfleet.graph.units import prepare_node
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind, NativeDevice

Orders = StepOrder | StateOrder | None
"""What the owner sends: a step, a question about the state, or None to end."""


def run_rank(order: RankOrder) -> Generator[StepReport, Orders, None]:
    """Run one rank. Yield the reports, and receive the orders. The first report says that the worker is up."""
    yield StepReport()
    with using_settings(order.settings), computing(), _keeping_threads(order):
        rank, transport = _open(order)
        try:
            report = StepReport()
            state = None if isinstance(order.meeting, Hub) else _PythonState(order, rank)
            while (following := (yield report)) is not None:
                report = _answer(rank, following)
                if state is not None and isinstance(following, StepOrder) and following.step.train:
                    state.check()
                    state = None
                del following  # with its rows
        except Exception:
            for engine in rank.engines.values():
                engine.end(skipped=True)
            raise
        finally:
            transport.close()


@contextmanager
def _keeping_threads(order: RankOrder) -> Iterator[None]:
    """Context after which a worker process has as many threads for steps as before: it may be hired again."""
    adapter: Any = frameworks.adapter(order.nodes[0].framework)
    before = adapter.threads() if hasattr(adapter, "use_threads") else None
    try:
        yield
    finally:
        if before is not None:
            adapter.use_threads(before)


class _PythonState:
    """Structure of a rank's models before the first step, to see whether a step changes more than tensors."""

    def __init__(self, order: RankOrder, rank: Rank) -> None:
        engines: dict[str, Any] = dict(rank.engines)
        self._members = [
            Member(one.name, engines[one.name].model, one.seed, frameworks.adapter(one.framework))
            for one in order.nodes
            if hasattr(engines[one.name], "model")
        ]
        self._before = [member.framework.signature(member.model) for member in self._members]

    def check(self) -> None:
        """Raise StrategyError if a step has changed the Python of a model, which its owner would not see."""
        for member, before in zip(self._members, self._before, strict=True):
            change = member.framework.difference(member.framework.signature(member.model), before)
            if change:
                raise StrategyError(
                    f"node {member.name!r} keeps state in Python: after a step, {change}. In a process of its own "
                    f'that change would be lost. Use strategy="threads", or keep the state in a buffer.'
                )


def _answer(rank: Rank, order: StepOrder | StateOrder) -> StepReport:
    if isinstance(order, StepOrder):
        return rank.run(order)
    for name, state in order.write.items():
        rank.engines[name].write(state)
    states = {name: engine.read() for name, engine in rank.engines.items()} if order.read else {}
    peak = rank.peak_bytes.get(order.events)
    return StepReport(states=states, events=rank.recorder.events(order.events), peak_bytes=peak)


def _open(order: RankOrder) -> tuple[Rank, Transport]:
    members = [Member(one.name, one.model, one.seed, frameworks.adapter(one.framework)) for one in order.nodes]
    adapter = members[0].framework
    device = native_device(adapter, order.device, order.threads)
    engines = make_engines(order.nodes, members, order)
    transport = _transport(order, adapter, device)
    clip = None
    if order.kind == "train" and order.clip_norm is not None:
        clip = partial(require_nodes(adapter).clip_factor, most=order.clip_norm)
    rank = Rank(
        order.rank,
        engines,
        order.topology,
        order.spec,
        order.schedules,
        order.losses,
        transport,
        lambda values: require_nodes(adapter).numbers(values, device),
        {member.name: require_nodes(member.framework).to_host for member in members},
        divides=order.divides,
        clip=clip,
        board=order.board,
    )
    return rank, transport


def native_device(adapter: Any, name: str, threads: int) -> NativeDevice:
    """Return a device as the framework names it. On a logical CPU, limit the threads of steps."""
    (device,) = parse_devices(name) or adapter.choose(None)[:1]
    if device.kind == "cpu" and hasattr(adapter, "use_threads"):
        adapter.use_threads(min(threads, adapter.threads()))
    return adapter.native(device)


def make_engines(nodes: tuple[NodeOrder, ...], members: list[Member], order: RankOrder) -> dict[str, NodeEngine]:
    """Return the engines of a rank's nodes, with the state that they had."""
    engines: dict[str, NodeEngine] = {}
    for node, member in zip(nodes, members, strict=True):
        device = native_device(member.framework, order.device, order.threads)
        recompute = node.name in order.recompute
        isolates = _stands_alone(node.name, order)
        engine = make_engine(
            member,
            order.recipe,
            order.kind,
            device,
            recompute=recompute,
            isolates=isolates,
            evaluating=node.name in order.evaluating,
        )
        if node.state:
            engine.write(node.state)
        engines[node.name] = engine
    return engines


def _stands_alone(node: str, order: RankOrder) -> bool:
    """Return True if no other node and no replica depends on what a node computes."""
    topology, trained = order.topology, order.spec.with_backward
    takes = [link for link in topology.into[node] if link.source != INPUT and link.differentiable]
    back = any(link.source in trained for link in takes)
    return not back and not topology.out_of[node] and len(order.spec.node(node).ranks) == 1


def make_engine(
    member: Member,
    recipe: Recipe | None,
    kind: Kind,
    device: NativeDevice,
    *,
    recompute: bool = False,
    isolates: bool = False,
    evaluating: bool = False,
) -> NodeEngine:
    """Return the engine of one node.

    Args:
        member: The node.
        recipe: The recipe of the graph; None for predicting.
        kind: The verb.
        device: The device.
        recompute: True if activations are computed again for the backward pass.
        isolates: True if nothing depends on the members of a fleet, so that each may fail by itself.
        evaluating: True if the node stays in evaluation mode.
    """
    nodes = require_nodes(member.framework)
    prepared = prepare_node(member, recipe, kind)
    columns: Mapping[str, Any] = prepared.columns
    if isinstance(member.model, FleetModels):
        members = member.model.members(member.framework)
        return nodes.make_fleet_node(
            member.name, members, prepared.tasks, columns, device, recompute=recompute, isolates=isolates
        )
    more = {"evaluating": True} if evaluating else {}  # for modules of torch only
    return nodes.make_node(member, prepared.tasks[0], columns, device, recompute=recompute, **more)


def _transport(order: RankOrder, adapter: Any, device: NativeDevice) -> Transport:
    if isinstance(order.meeting, Hub):
        add: Callable[[Any, Any], None] = require_nodes(adapter).add
        return ThreadTransport(order.meeting, order.rank, order.timeout, add)
    address = order.meeting if isinstance(order.meeting, str) else order.meeting.address
    channels, sums = _meetings(order)
    return require_nodes(adapter).GroupTransport.join(
        address, order.rank, order.size, order.timeout, channels=channels, sums=sums, device=device
    )


def _meetings(order: RankOrder) -> tuple[list[tuple[str, bool, int, int]], list[tuple[int, ...]]]:
    """Return every channel and every group of ranks that any schedule uses, in one order for all ranks."""
    channels: set[tuple[str, bool, int, int]] = set()
    sums: set[tuple[int, ...]] = set()
    for schedule in order.schedules.values():
        for rank, operations in enumerate(schedule.operations):
            for one in operations:
                if one.kind == "send":
                    channels.add((one.edge, one.gradient, rank, one.peer))
                elif one.kind == "sum":
                    sums.add(one.ranks)
    return sorted(channels), sorted(sums)
