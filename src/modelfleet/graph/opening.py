"""Opening a graph for one verb: places, plan, and the orders of all ranks."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelfleet.devices import cores, parse_devices, threads_of
from modelfleet.errors import InputError
from modelfleet.feeds import Feed, is_loader, make_feed
from modelfleet.frameworks.batch_parts import inputs as inputs_of
from modelfleet.frameworks.contexts import current_settings
from modelfleet.frameworks.fleet_models import FleetModels
from modelfleet.frameworks.node_engine import Draws, NodeEngine, NodeHyper, Step, require_nodes
from modelfleet.graph.board import Board
from modelfleet.graph.losses import split_batch
from modelfleet.graph.node_frameworks import refuse_processes
from modelfleet.graph.node_models import copied, evaluating_nodes, is_trained, models_of
from modelfleet.graph.orders import NodeOrder, RankOrder, StepOrder
from modelfleet.graph.placement import DevicesLike, by_node
from modelfleet.graph.plan import GraphPlan
from modelfleet.graph.planning import GraphTrial, make_plan, no_draws, try_graph
from modelfleet.graph.running import Ranks
from modelfleet.graph.topology import Topology, select
from modelfleet.graph.transport import Hub
from modelfleet.graph.units import Units, prepare_units
from modelfleet.graph.working import make_engine, native_device
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.schedules import ScheduleName
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Data, Kind, State, Tree
from modelfleet.unknown_names import unknown
from modelfleet.workers import Place
from modelfleet.workers.inline import InlinePlace
from modelfleet.workers.places import machine_places, means_ray, ray_places

PIPELINES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
STRATEGIES = ("auto", "threads", "processes")
ROWS_PER_MICRO_BATCH = 32  # in evaluate and predict, by default


@dataclass(frozen=True)
class Settings:
    """Arguments of a verb that say how a graph runs."""

    micro_batches: int | None = None
    pipeline: ScheduleName = "1f1b"
    strategy: str = "auto"
    recompute: bool | Sequence[str] = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.pipeline not in PIPELINES:
            raise unknown("pipeline", self.pipeline, PIPELINES)
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)
        if isinstance(self.recompute, str):
            raise InputError(f"recompute is {self.recompute!r}; expected True, False, or a list of nodes.")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise InputError(f"timeout is {self.timeout!r}; expected a number of seconds above 0.")


class Opener:
    """Opens a graph for one verb.

    Args:
        topology: The graph.
        members: Its nodes, in topological order.
        recipe: What `compile` was given; None for predicting.
        losses: The nodes that have a loss.
        devices: The devices as the user gave them.
        settings: The arguments of the verb.
        states: The training state of the nodes, on the host.
        name: What the graph is called in the history.
    """

    def __init__(
        self,
        topology: Topology,
        members: Sequence[Member],
        recipe: Recipe | None,
        losses: tuple[str, ...],
        devices: DevicesLike,
        settings: Settings,
        states: Mapping[str, State],
        name: str,
    ) -> None:
        self.name = name
        self.topology, self.members, self.recipe, self.losses = topology, list(members), recipe, losses
        self.settings, self.states = settings, states
        self._devices = devices
        self.adapter: Any = self.members[0].framework
        self._recompute = self._recomputed()
        self._evaluating = evaluating_nodes(self.members)
        self.places = self._find_places()
        refuse_processes(self.members, self.strategy)
        self.trained = {member.name: is_trained(member) for member in self.members}
        self.fleets = {
            member.name: member.model for member in self.members if isinstance(member.model, FleetModels)
        }

    def units(self, kind: Kind) -> Units:
        """Return everything that has an optimizer of its own."""
        return prepare_units(self.members, self.recipe, kind, self.name)

    # --- devices -------------------------------------------------------------------------------------------------

    def _find_places(self) -> dict[str, Place]:
        """Return a place for each device, by its name."""
        rows = by_node(self._devices, self.topology)
        if rows is not None:
            wanted = parse_devices(list(dict.fromkeys(device for row in rows.values() for device in row)))
        else:
            wanted = parse_devices(self._devices)  # pyrefly: ignore
        self.threads = cores()
        if means_ray(wanted):
            return {place.name: place for place in ray_places(wanted)}
        chosen = self.adapter.choose(wanted)
        if wanted is None:
            chosen = chosen[: len(self.members)]
        self.threads = threads_of(chosen)
        if self.settings.strategy == "processes":
            return {place.name: place for place in machine_places(chosen)}
        return {str(device): InlinePlace(str(device), str(device)) for device in chosen}

    @property
    def strategy(self) -> str:
        """Return how the ranks run."""
        first = next(iter(self.places.values()))
        if first.on_cluster:
            return "ray"
        return "threads" if isinstance(first, InlinePlace) else "processes"

    def _recomputed(self) -> frozenset[str]:
        asked = self.settings.recompute
        if isinstance(asked, bool):
            return frozenset(self.topology.nodes) if asked else frozenset()
        for name in asked:
            if name not in self.topology.nodes:
                raise unknown("node", name, self.topology.nodes)
        return frozenset(asked)

    # --- data ----------------------------------------------------------------------------------------------------

    def feed(
        self, data: Data, batch_size: int | None, *, what: str, shuffle: bool = False, epochs: int = 0
    ) -> Feed:
        """Return the feed of some data, in this process's memory."""
        (host,) = parse_devices("cpu") or ()
        if what == "validation" and is_loader(data, self.adapter.arrays, what):
            batch_size = None  # a loader has batches of its own size, whatever the size of the training batches
        if hasattr(self.adapter, "as_loader"):
            data = self.adapter.as_loader(data, again=what != "data")
        return make_feed(
            data,
            names=["0"],
            seeds=[self.members[0].seed],
            batch_size=batch_size,
            shuffle=shuffle,
            device=self.adapter.native(host),
            arrays=self.adapter.arrays,
            epochs_done=np.array([epochs], dtype=np.int64),
            what=what,
        )

    # --- plans ---------------------------------------------------------------------------------------------------

    def plan(self, data: Data, batch_size: int | None) -> GraphPlan:
        """Return the plan for training on data; without data, for nodes that all take as long."""
        if data is None:
            return self._plan(None, batch_size or 1_000_000, train=True)
        batch = self.feed(data, batch_size, what="data").first().member(0)
        x, targets = split_batch(batch, self.losses) if self.losses else (inputs_of(batch), {})
        return self.prepare(x, targets, train=True)[0]

    def prepare(
        self, x: Tree, targets: Mapping[str, tuple[Tree, ...]], *, train: bool
    ) -> tuple[GraphPlan, GraphTrial, dict[str, Draws]]:
        """Try all nodes on the rows of a micro-batch; return the plan, the trial, and what the nodes draw.

        Raises:
            InputError: A node can't take what it is given, or its draws or its loss can't be divided by rows.
        """
        rows = len(leaves(x)[0])
        count = self._plan(None, rows, train=train).schedule.micro_batches
        # A third of three rows or more is left out, to see what each draws, and BatchNorm needs two.
        wanted = [row % rows for row in range(max(3, -(-rows // count)))]
        few = map_tree(lambda leaf: leaf[wanted], x)
        engines = {member.name: self._engine(member, "train" if train else "predict") for member in self.members}
        trial = try_graph(self.topology, engines, few, train=train)
        plan = self._plan(trial, rows, train=train)
        draws, problems = trial.draws(self.topology)
        if problems and count > 1:
            raise InputError(f"{problems[0]} Or set micro_batches=1.")
        if train:
            self._refuse_shared_buffers(trial)
        if train and count > 1:
            for name, own in targets.items():
                rows_of = map_tree(lambda leaf: leaf[wanted], own)
                self._refuse_loss(name, engines[name], trial, engines[name].place(rows_of))
        return plan, trial, draws

    def _refuse_shared_buffers(self, trial: GraphTrial) -> None:
        """Raise InputError for a buffer of two nodes that one of them changes: each rank would have its own."""
        owners: dict[tuple[str, Hashable], list[tuple[str, str]]] = {}
        for member in self.members:
            addresses = getattr(require_nodes(member.framework), "buffer_addresses", None)
            for model in models_of(member).values():
                found = {} if addresses is None else addresses(model)
                for name, address in found.items():
                    owners.setdefault((member.framework.NAME, address), []).append((member.name, name))
        for own in owners.values():
            if len({node for node, _ in own}) > 1 and any(name in trial.nodes[node].changed for node, name in own):
                (one, buffer), (other, _) = own[0], next(pair for pair in own if pair[0] != own[0][0])
                raise InputError(
                    f"nodes {one!r} and {other!r} share the buffer {buffer!r}, which the training changes, and "
                    f"each device has a copy of its own. Keep what shares it in one node, or give each a copy."
                )

    @staticmethod
    def _refuse_loss(name: str, engine: NodeEngine, trial: GraphTrial, target: Tree) -> None:
        """Raise InputError for a loss that is not a mean over rows, as far as the framework can tell."""
        adds_up = getattr(engine, "loss_adds_up", None)
        if adds_up is not None and not adds_up(trial.nodes[name].outputs, target):
            raise InputError(
                f"the loss of node {name!r} is not the mean of its rows' losses: on some rows it differs from "
                "the mean of its values on parts of them, or it draws random numbers, and a micro-batch is a "
                "part. Return the mean over rows, give one of torch's modules, which know how they add up "
                "(nn.CrossEntropyLoss(ignore_index=...) in place of functools.partial(F.cross_entropy, ...)), "
                "or set micro_batches=1."
            )

    def plan_untried(self, rows: int, *, placed: GraphPlan | None = None) -> GraphPlan:
        """Return the plan of a verb that does not train, without trying anything.

        `placed` is a plan whose nodes are where these have to be.
        """
        return self._plan(None, rows, train=False, placed=placed)

    def _plan(
        self, trial: GraphTrial | None, rows: int, *, train: bool, placed: GraphPlan | None = None
    ) -> GraphPlan:
        return make_plan(
            self.topology,
            self._devices if placed is None else placed.rows,
            list(self.places),
            trial,
            self.trained,
            batch_size=rows,
            micro_batches=self.settings.micro_batches,
            pipeline=self.settings.pipeline if train else "1f1b",
            strategy=self.strategy,
            train=train,
            fleets={name: len(models) for name, models in self.fleets.items()},
            recomputed=self._recompute,
        )

    def _engine(self, member: Member, kind: Kind) -> NodeEngine:
        device = native_device(member.framework, "cpu", self.threads) if self.strategy == "ray" else None
        if device is None:
            rows = by_node(self._devices, self.topology)
            name = rows[member.name][0] if rows is not None else next(iter(self.places))
            device = native_device(member.framework, name, self.threads)
        recipe = self.recipe if kind == "train" else None
        return make_engine(member, recipe, kind, device, evaluating=member.name in self._evaluating)

    # --- ranks ---------------------------------------------------------------------------------------------------

    def open(self, plans: Mapping[str, GraphPlan], kind: Kind) -> Ranks:
        """Return the ranks for one or several plans of equal placement, by the names that steps use."""
        plan = next(iter(plans.values()))
        places = [self.places[device] for device in plan.devices]
        hub = Hub() if isinstance(places[0], InlinePlace) else None
        board = None if places[0].on_cluster else Board(len(places))
        clip = None if self.recipe is None else self.recipe.clip_norm
        orders = [
            RankOrder(
                rank=rank,
                device=place.device,
                nodes=self._nodes(plan, rank),
                topology=self.topology,
                spec=plan.spec,
                recipe=self.recipe,
                losses=self.losses,
                schedules={name: one.schedule for name, one in plans.items()},
                meeting="" if hub is None else hub,
                size=len(places),
                timeout=self.settings.timeout,
                kind=kind,
                threads=self.threads,
                divides=len(self.losses) > 1 or any(name in self.fleets for name in self.losses),
                recompute=self._recompute,
                evaluating=self._evaluating,
                clip_norm=clip,  # pyrefly: ignore
                board=board,
                settings=current_settings(self.adapter),
            )
            for rank, place in enumerate(places)
        ]
        return Ranks(places, orders)

    def _nodes(self, plan: GraphPlan, rank: int) -> tuple[NodeOrder, ...]:
        found = []
        for member in self.members:
            ranks = plan.spec.node(member.name).ranks
            if rank not in ranks:
                continue
            model = member.model
            if self.strategy == "threads" and rank != ranks[0]:
                model = copied(member)  # replicas in one process would step one object
            state = self.states.get(member.name, {})
            found.append(NodeOrder(member.name, model, member.framework.NAME, member.seed, state))
        return tuple(found)

    def step_orders(
        self,
        plan: GraphPlan,
        name: str,
        x: Tree,
        targets: Mapping[str, tuple[Tree, ...]],
        *,
        train: bool,
        draws: Mapping[str, Draws] | None = None,
        hyper: Mapping[str, NodeHyper] | None = None,
        outputs: Sequence[str] = (),
    ) -> list[StepOrder]:
        """Return the orders of all ranks for one batch."""
        rows = len(leaves(x)[0])
        step = Step(cut_rows(rows, plan), train)
        draws = no_draws(self.topology) if draws is None else draws
        given = {link: select(x, link.output, "x") for link in self.topology.inputs}
        found = []
        for rank in range(len(plan.devices)):
            here = {node.name for node in plan.spec.nodes if rank in node.ranks}
            found.append(
                StepOrder(
                    name,
                    step,
                    {link.name: value for link, value in given.items() if link.target in here},
                    {node: own for node, own in targets.items() if node in here},
                    {node: own for node, own in (hyper or {}).items() if node in here},
                    {node: own for node, own in draws.items() if node in here},
                    tuple(node for node in outputs if node in here),
                )
            )
        return found


def cut_rows(rows: int, plan: GraphPlan) -> tuple[tuple[int, int], ...]:
    """Return start and end of each micro-batch: as even as possible, and never without a row.

    A short batch has fewer of them, so that none has a single row if others have more: BatchNorm needs two.
    """
    micro_batches = plan.schedule.micro_batches
    least = 2 if plan.batch_size >= 2 * micro_batches else 1
    count = min(micro_batches, max(1, rows // least))
    return tuple((rows * index // count, rows * (index + 1) // count) for index in range(count))
