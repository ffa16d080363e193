"""Graphs of models: any models that work together without a cycle, trained and run as one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from modelfleet import frameworks
from modelfleet.devices import cores, parse_devices
from modelfleet.each import Each
from modelfleet.errors import InputError, StoreError
from modelfleet.fleet import Fleet
from modelfleet.frameworks.fleet_models import prepare_members
from modelfleet.frameworks.node_engine import nodes_of
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.gate import Gate
from modelfleet.graph import reading, saving
from modelfleet.graph.checkpoints import Paths
from modelfleet.graph.fitting import GraphFit
from modelfleet.graph.losses import loss_nodes
from modelfleet.graph.node_frameworks import check_edges, compile_nodes
from modelfleet.graph.node_models import fill, fleet_member, models_of
from modelfleet.graph.opening import Opener, Settings
from modelfleet.graph.placement import DevicesLike
from modelfleet.graph.plan import GraphPlan
from modelfleet.graph.saved_fleets import FleetEntry, entry_of
from modelfleet.graph.saving import ModelsLike, SavedGraph
from modelfleet.graph.topology import EdgeLike, Topology, make_topology
from modelfleet.graph.working import make_engine, native_device
from modelfleet.history import History
from modelfleet.members import Member, check_name, member_seed
from modelfleet.progress import reporter
from modelfleet.recipe import Recipe
from modelfleet.schedules import ScheduleName
from modelfleet.types import (
    Data,
    Json,
    Kind,
    LossLike,
    MetricLike,
    Model,
    OptimizerLike,
    Precision,
    ScheduleLike,
    State,
    Tree,
)
from modelfleet.unknown_names import explain_arguments, unknown

GraphStrategy = Literal["auto", "threads", "processes"]


class Graph:
    """Models whose outputs are other models' inputs, trained and run as one, on one device or several.

    Args:
        nodes: The models by name. A `Fleet` is a node, too: its members run as one program on the same inputs, and
            give {member: output}.
        edges: Pairs `(source, target)`, or `Edge`s. A node that no edge leads to takes the data.
        outputs: The nodes whose outputs the graph returns, and that have the loss.
        devices: "auto"; devices, over which the nodes are spread; or for each node a device, or a row of devices
            that share its micro-batches: `{"encoder": "cuda:0", "head": ["cuda:1", "cuda:2"]}`.
        seed: The seed of shuffles and dropout. The graph has the numbers of the undivided model as the only
            member of `Fleet([model], seed=seed)`.

    Raises:
        InputError: There is a cycle, an edge names no node, or a device does not exist.

    Example:
        >>> graph = mf.Graph({"a": a, "b": b, "sum": add}, [("a", "sum"), ("b", "sum")], outputs="sum")
        >>> graph.compile("adam", "mse", lr=1e-3)
        >>> history = graph.fit((x, y), epochs=10)
    """

    kind = "graph"

    def __init__(
        self,
        nodes: Mapping[str, "Model | Fleet"],
        edges: Sequence[EdgeLike],
        *,
        outputs: str | Sequence[str] | None = None,
        devices: DevicesLike = "auto",
        seed: int = 0,
    ) -> None:
        if not nodes:
            raise InputError(f"a {self.kind} needs at least one model; got none.")
        self.seed = int(seed)
        self.devices = devices
        self._members: dict[str, Member] = {}
        self._fleets: dict[str, Fleet] = {}
        for name, model in nodes.items():
            self._enlist(name, model)
        self._topology: Topology = make_topology(list(self._members), edges, outputs)
        self._refuse_shared_weights()
        check_edges(self._topology, list(self._members.values()))
        self._losses: dict[str, LossLike] = {}
        self._recipe: Recipe | None = None
        self._states: dict[str, State] = {}  # of the optimizers, and the numbers of steps
        self._epochs = 0
        self._plan: GraphPlan | None = None  # of the last fit, with what it measured
        self._paths: Mapping[str, Mapping[str, str]] = {}  # of parameters in an undivided model, by node
        self._gate = Gate()
        if isinstance(devices, str):
            self._check_devices(devices)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        models: ModelsLike,
        *,
        devices: DevicesLike = "auto",
        allow_import: bool = False,
        verify: bool = True,
    ) -> Self:
        """Load what `save` has saved, so that `fit` continues.

        Args:
            folder: The folder.
            models: The models to fill, by node or in their order; or a function that returns them. For a fleet,
                its models, by name or in their order, or a `Fleet`. For a chain of a split model, what `split`
                returns; it may be cut otherwise.
            devices: As for a new one.
            allow_import: Import the functions of the recipe by the names in the folder. This runs code that the
                folder chooses: use it only with folders you trust.
            verify: Compare the checksums of what is read.

        Raises:
            StoreError: The folder is damaged, holds something else, or its tensors do not fit the models.
        """
        graphs: list[tuple[Self, Recipe | None]] = []
        losses: list[str] = []

        def states_of(
            manifest: Mapping[str, Json], recipe: Recipe | None, fleets: Mapping[str, FleetEntry]
        ) -> tuple[Mapping[str, State], Paths]:
            if manifest["graph"] != cls.kind:
                name = manifest["graph"].capitalize()
                raise StoreError(f"{folder} holds a {manifest['graph']}. Load it with mf.{name}.load.")
            graph = cls._rebuilt(models, manifest, devices, fleets)
            if recipe is not None and set(graph.names) != set(manifest["nodes"]):
                recipe = saving.recut(recipe, manifest["losses"], graph.names)
                losses[:] = graph.names[-1:]
            else:
                losses[:] = manifest["losses"]
            graphs.append((graph, recipe))
            usable = recipe is not None and not recipe.missing
            return graph._read_states("train" if usable else "predict", recipe if usable else None), graph._paths

        found = saving.read(Path(folder), states_of, allow_import=allow_import, verify=verify)
        ((graph, recipe),) = graphs
        graph._take_saved(replace(found, recipe=recipe, losses=tuple(losses)))
        return graph

    @classmethod
    def _rebuilt(
        cls,
        models: ModelsLike,
        manifest: Mapping[str, Json],
        devices: DevicesLike,
        fleets: Mapping[str, FleetEntry],
    ) -> Self:
        """Return the graph of a manifest, with these models."""
        made, edges = saving.made_models(models, manifest["nodes"], fleets), saving.edges_of(manifest)
        return cls(made, edges, outputs=manifest["outputs"], devices=devices, seed=manifest["seed"])

    @property
    def names(self) -> list[str]:
        """Return the names of the nodes, in topological order."""
        return list(self._topology.nodes)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, name: str) -> Model:
        """Return a node's model, or its fleet, with the current weights."""
        if name not in self._members:
            raise unknown("node", name, self._members)
        return self._fleets[name] if name in self._fleets else self._members[name].model

    def __repr__(self) -> str:
        edges = ", ".join(link.name for link in self._topology.links)
        return f"<{type(self).__name__} of {len(self)}: {edges or ', '.join(self.names)}>"

    @property
    def last_plan(self) -> GraphPlan | None:
        """Return the plan of the last fit with the times that it measured. None before the first."""
        return self._plan

    # --- verbs ---------------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: OptimizerLike,
        loss: LossLike = None,
        *,
        metrics: Sequence[MetricLike] = (),
        clip_norm: float | None = None,
        precision: Precision = "float32",
        schedule: ScheduleLike = None,
        **hyperparameters: Any,
    ) -> None:
        """Set how the nodes are trained. Optimizer and numbers are one for all nodes, or `each(...)` by node.

        A fleet that is compiled keeps its own recipe, with its own loss, and has no value in `each(...)`. The
        members of one that is not are all trained by this recipe.

        To freeze a node, set `requires_grad_(False)` on its model. Calling `compile` again starts the optimizers
        over.

        Args:
            optimizer: As for `Fleet.compile`.
            loss: A name or a function `loss(output, target)`. A dict gives nodes losses of their own: the
                graph's loss is their sum.
            metrics: As for `Fleet.compile`.
            clip_norm: The largest norm of the gradient of all nodes together. That of a fleet's own recipe is for
                each of its members.
            precision: "float32" or "bf16".
            schedule: As for `Fleet.compile`.
            **hyperparameters: Those of the optimizer, such as `lr=mf.each([1e-4, 1e-3])`.

        Raises:
            InputError: A name is unknown, or an argument does not fit a node.
        """
        if "objective" in hyperparameters:
            raise InputError(
                f"compile got an objective, which computes a loss from a whole model, but a {self.kind} has its "
                f"model in parts. Give a loss of the output instead: loss(output, target)."
            )
        if isinstance(clip_norm, Each):
            raise InputError("clip_norm is each(...), but a graph has one gradient. Give one number.")
        if precision == "fp16":
            raise InputError(
                'precision="fp16" needs one loss scale for all nodes, which graphs do not have. Use "bf16".'
            )
        self._refresh()
        compiled = self._compiled_fleets()
        losses = loss_nodes(loss, self._topology, compiled)
        names = [name for name in self.names if name not in compiled]
        several = len(losses) > 1 or len(names) != 1
        by_node = Each([losses.get(name) for name in names]) if several else loss
        recipe = Recipe(optimizer, by_node, None, metrics, clip_norm, precision, schedule, hyperparameters)
        recipe = recipe.by_name(names)
        with self._gate.changing("compile"):
            self._check_recipe(recipe, names)
            self._recipe, self._losses, self._states = recipe, losses, {}

    @explain_arguments
    def plan(
        self,
        data: Data = None,
        *,
        batch_size: int | None = None,
        micro_batches: int | None = None,
        pipeline: ScheduleName = "1f1b",
        strategy: GraphStrategy = "auto",
        recompute: bool | Sequence[str] = False,
    ) -> GraphPlan:
        """Return what will run where, in which order, and what a step will take.

        Args:
            data: As for `fit`. With data, every node is tried on the rows of one micro-batch and timed. Without,
                all nodes count as equal.
            batch_size: As for `fit`.
            micro_batches: As for `fit`.
            pipeline: As for `fit`.
            strategy: As for `fit`.
            recompute: As for `fit`.

        Returns:
            The plan. It can be printed, compared, drawn with `plot`, and turned into a dict.
        """
        settings = Settings(micro_batches, pipeline, strategy, recompute)
        with self._gate.reading("plan"), self._keeping_threads():
            return self._opener(settings).plan(data, batch_size)

    @explain_arguments
    def fit(
        self,
        data: Data,
        *,
        validation: Data = None,
        epochs: int = 1,
        batch_size: int | None = None,
        shuffle: bool = True,
        callbacks: Sequence[object] = (),
        micro_batches: int | None = None,
        pipeline: ScheduleName = "1f1b",
        strategy: GraphStrategy = "auto",
        recompute: bool | Sequence[str] = False,
        progress: str | bool = "auto",
        timeout: float = 300.0,
    ) -> History:
        """Train all nodes as one model.

        Args:
            data: `(x, y)`, or whatever `Fleet.fit` takes. x is a dict if edges name parts of it. y is a dict by
                node if several nodes have a loss. The y of a fleet is for all of its members, or a dict by member.
            validation: Data to evaluate after every epoch.
            epochs: How many epochs to train.
            batch_size: Rows per step.
            shuffle: Shuffle the rows, in a new order every epoch.
            callbacks: `Checkpoint`, `EarlyStopping`, and callbacks of your own.
            micro_batches: How many parts a batch is cut into, so that several devices work at once. By default
                four for every device.
            pipeline: The order of the work: "1f1b", "gpipe", "interleaved" (nodes given to devices in turn) or
                "zero-bubble".
            strategy: "threads" of this process, a "processes" for each device, or "auto".
            recompute: True keeps no activations for the backward pass and computes them again; names do so for
                some nodes.
            progress: As for `Fleet.fit`.
            timeout: Seconds after which a device that does not move is lost, at the latest. After the first step
                it is lost after 30 s, or twenty times the longest step so far, if that is longer.

        Returns:
            The history of "graph" or "chain", and of every member of a fleet, by its name:
            `history["m07"]["loss"]`. If two fleets have members of one name, it is "heads.m07".

        Raises:
            InputError: The data do not fit the nodes, or an argument is out of range.
            RankLostError: A device's worker died, hangs or was too late. The message says who waited for what.
            AllFailedError: The loss or a gradient was not finite. A member of a fleet is set aside instead if no
                other node depends on it, as behind a frozen encoder.
        """
        settings = Settings(micro_batches, pipeline, strategy, recompute, timeout)
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise InputError(f"epochs is {epochs!r}; expected a whole number, 1 or more.")
        shown = reporter(progress)
        with self._gate.changing("fit"), self._keeping_threads():
            try:
                fit = GraphFit(
                    self, self._opener(settings, "fit"), data, validation, epochs, batch_size, callbacks, shown
                )
                history = fit.run(shuffle)
            finally:
                shown.close()
        return history

    @explain_arguments
    def evaluate(
        self,
        data: Data,
        *,
        batch_size: int | None = None,
        strategy: GraphStrategy = "auto",
        timeout: float = 300.0,
    ) -> dict[str, float]:
        """Return the loss and the metrics on data: {metric: value}; those of a fleet's members as "m07_loss"."""
        with self._gate.reading("evaluate"), self._keeping_threads():
            opener = self._opener(Settings(strategy=strategy, timeout=timeout), "evaluate")
            return reading.evaluate(opener, data, batch_size)

    @explain_arguments
    def predict(
        self,
        data: Data,
        *,
        batch_size: int | None = None,
        micro_batches: int | None = None,
        strategy: GraphStrategy = "auto",
        timeout: float = 300.0,
    ) -> Tree:
        """Return the outputs on data: an array, or a dict by node if the graph has several outputs.

        Those of a fleet are a dict by member, as from `Fleet.predict`.
        """
        with self._gate.reading("predict"), self._keeping_threads():
            opener = self._opener(Settings(micro_batches, strategy=strategy, timeout=timeout))
            return reading.predict(opener, data, batch_size)

    def save(self, folder: str | Path, *, optimizer: bool = True) -> None:
        """Save all nodes in a folder: a safetensors file and a JSON manifest.

        `load` returns the graph, whose `fit` continues as this one's would.

        Args:
            folder: The folder. It is created if it does not exist.
            optimizer: False leaves out the optimizer's state.
        """
        with self._gate.reading("save"), self._keeping_threads():
            states = self._read_states("predict", None)
            if optimizer:
                for name, state in self._states.items():
                    states[name] |= state
            recipe, losses = self._recipe, tuple(self._losses)
            fleets = {name: entry_of(fleet) for name, fleet in self._fleets.items()}
            saved = SavedGraph(self.kind, self.seed, self._epochs, self._topology, losses, recipe, states, fleets)
            saving.save(Path(folder), saved, self._paths)

    # --- small parts ---------------------------------------------------------------------------------------------

    def _read_states(self, kind: Kind, recipe: Recipe | None) -> dict[str, State]:
        """Return the weights of all nodes; with "train", also a training state of their form."""
        self._refresh()
        parts = None if kind == "train" else WEIGHTS
        found = {}
        for name, member in self._members.items():
            device = native_device(member.framework, "cpu", cores())
            found[name] = make_engine(member, recipe, kind, device).read(parts)
        return found

    def _take_saved(self, found: SavedGraph) -> None:
        """Take over the weights, the recipe and the training state of a saved graph."""
        for name, state in found.states.items():
            fill(self._members[name], state)
            self._states[name] = {part: own for part, own in state.items() if part in ("optimizer", "member")}
        self._epochs, self._recipe = found.epochs, found.recipe
        if found.recipe is not None:
            loss = found.recipe.loss
            by_node = loss.values if isinstance(loss, Each) and isinstance(loss.values, dict) else None
            self._losses = {name: loss if by_node is None else by_node.get(name) for name in found.losses}
            if not found.recipe.missing:
                compiled = self._compiled_fleets()
                self._check_recipe(found.recipe, [name for name in self.names if name not in compiled])

    @contextmanager
    def _keeping_threads(self) -> Iterator[None]:
        """Context after which steps on the CPU have as many threads as before."""
        adjustable: dict[int, Any] = {id(member.framework): member.framework for member in self._members.values()}
        before = [(one, one.threads()) for one in adjustable.values() if hasattr(one, "use_threads")]
        try:
            yield
        finally:
            for framework, count in before:
                framework.use_threads(count)

    def _opener(self, settings: Settings, verb: str = "") -> Opener:
        if verb and self._recipe is None:
            compiled = any(getattr(member.model, "compiled", False) is True for member in self._members.values())
            own = " How its models themselves are compiled does not count." if compiled else ""
            raise InputError(f"call compile before {verb}: the {self.kind} needs a loss and an optimizer.{own}")
        self._refresh()
        members = [self._members[name] for name in self._topology.nodes]
        return Opener(
            self._topology,
            members,
            self._recipe,
            tuple(self._losses),
            self.devices,
            settings,
            self._states,
            self.kind,
        )

    def _refresh(self) -> None:
        """Take the fleets as they are now: members may have joined, or been compiled."""
        for name, fleet in self._fleets.items():
            before = self._members[name].model.names
            self._members[name] = fleet_member(name, fleet, self.kind)
            fleet._exposed.update(fleet.names)  # their models are trained here
            if before != tuple(fleet.names):
                self._states.pop(name, None)

    def _compiled_fleets(self) -> list[str]:
        """Return the fleets that have recipes of their own.

        Raises:
            InputError: One has no loss.
        """
        found = [name for name in self._fleets if self._members[name].model.compiled]
        for name in found:
            for member, recipe in self._fleets[name]._recipes.items():
                if name in self._topology.outputs and recipe is not None and recipe.loss is None:
                    raise InputError(
                        f"member {member!r} of the fleet {name!r} was compiled without a loss of its output, and "
                        f"the graph needs one. Compile the fleet with a loss, or do not compile it: then the "
                        f"graph's recipe trains it."
                    )
        return found

    def _check_recipe(self, recipe: Recipe, names: Sequence[str]) -> None:
        """Raise InputError if a recipe does not fit one of these nodes."""
        own = [self._members[name] for name in names if name not in self._fleets]
        if own:
            compile_nodes(recipe, own)
        for name in names:
            if name in self._fleets:
                prepare_members(self._members[name].model, name, recipe, self._members[name].framework, "evaluate")

    def _enlist(self, name: object, model: "Model | Fleet") -> None:
        text = check_name(name, self._members)
        if isinstance(model, Fleet):
            self._fleets[text] = model
            self._members[text] = fleet_member(text, model, self.kind)
            self._refresh()
            return
        framework = frameworks.adapter_of(model, text)
        framework.check_model(model, text)
        if nodes_of(framework) is None:
            raise InputError(
                f"node {text!r} is a {framework.NAME} model, which a {self.kind} can't run yet. Give torch, Keras "
                f"or TensorFlow models."
            )
        for other in self._members.values():
            if other.model is model:
                raise InputError(
                    f"nodes {other.name!r} and {text!r} are one model object. Give a copy (copy.deepcopy), or "
                    "lead both edges to one node."
                )
        self._members[text] = Member(text, model, member_seed(self.seed, "0"), framework)

    def _refuse_shared_weights(self) -> None:
        """Raise InputError if two nodes train one weight: each would undo the other's steps."""
        by_framework: dict[int, list[Member]] = {}
        for member in self._members.values():
            by_framework.setdefault(id(member.framework), []).append(member)
        for alike in by_framework.values():
            models = {name: model for member in alike for name, model in models_of(member).items()}
            found = alike[0].framework.trained_twice(list(models.values()))
            if found is not None:
                one, other, weight = found
                names = list(models)
                raise InputError(
                    f"nodes {names[one]!r} and {names[other]!r} share the weight {weight!r}, which one optimizer "
                    f"would have to update for both. Keep the parts that share it in one node, or untie it."
                )

    def _check_devices(self, devices: str) -> None:
        wanted = parse_devices(devices)
        if wanted is not None and all(device.kind != "ray" for device in wanted):
            framework = next(iter(self._members.values())).framework
            framework.choose(wanted)
