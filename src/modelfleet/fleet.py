"""A fleet: a named set of members, and the verbs people use on it."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

from modelfleet import checkpoints, frameworks, saving
from modelfleet.answering import Answering
from modelfleet.callbacks import refuse_missing_validation, wrap_callbacks
from modelfleet.devices import parse_devices
from modelfleet.each import Each, per_member
from modelfleet.errors import InputError, StrategyError
from modelfleet.exchange import Distill, Exchange
from modelfleet.exchange.checking import list_exchanges, refuse_exchange
from modelfleet.fitting import Fit
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.contexts import computing
from modelfleet.frameworks.model_building import build_model, check_factory, list_models
from modelfleet.frameworks.recipe import compile_all
from modelfleet.garbage import without_full_collections
from modelfleet.gate import Gate
from modelfleet.history import History
from modelfleet.interrupts import noticing
from modelfleet.lanes import DevicePool, Lane, LaneBuilder
from modelfleet.live_lanes import LiveLanes
from modelfleet.members import Member, check_name, member_seed, parse_names
from modelfleet.planning.fusability import check_strategy
from modelfleet.planning.lane_facts import describe
from modelfleet.planning.plan import Plan
from modelfleet.planning.planner import Planner
from modelfleet.progress import reporter
from modelfleet.reading import Reading
from modelfleet.recipe import Recipe, plain_values
from modelfleet.remote.copies import copy_loaders
from modelfleet.remote.messages import OrderWriter
from modelfleet.repeating import Repeating
from modelfleet.runs.job import Job
from modelfleet.runs.sample_weight import add_sample_weight
from modelfleet.runs.starting import make_runs
from modelfleet.runs.validation_split import split_validation
from modelfleet.saving import SavedFleet
from modelfleet.sharing import Sharings, sharings
from modelfleet.store.recipe_json import completes, import_path
from modelfleet.types import (
    Data,
    LossLike,
    MetricLike,
    Model,
    OptimizerLike,
    Precision,
    ScheduleLike,
    Strategy,
    Tree,
)
from modelfleet.unknown_names import explain_arguments, unknown
from modelfleet.workers import CannotSendError


class Fleet:
    """Many models that are trained, evaluated and saved together, each with the numbers it would have had alone.

    Args:
        models: A mapping from name to model, or a sequence of models, whose names are then "0", "1", …
        seed: The fleet's seed. Each member's own seed, for its shuffles and its dropout, is made from it and the
            member's name.
        devices: "auto", or devices by name: "cpu", "cuda:0", "cpu:0,cpu:1"; "ray" for those of a Ray cluster.

    Raises:
        InputError: There are no models, a model is given twice, or a device does not exist.

    Example:
        >>> fleet = mf.Fleet({"narrow": net(64), "wide": net(256)})
        >>> fleet.compile("adam", "cross_entropy", lr=1e-3)
        >>> history = fleet.fit((x, y), epochs=10)
    """

    def __init__(
        self,
        models: Mapping[str, Model] | Sequence[Model],
        *,
        seed: int = 0,
        devices: str | Sequence[str] = "auto",
    ) -> None:
        pairs = list(models.items()) if isinstance(models, Mapping) else list(enumerate(list_models(models)))
        if not pairs:
            raise InputError("a fleet needs at least one member; got none.")
        self.seed = int(seed)
        self._members: dict[str, Member] = {}
        self._by_model: dict[int, str] = {}  # member by id of its model: one object must not be two members
        self._recipes: dict[str, Recipe | None] = {}
        self._recipe: Recipe | None = None  # for members that join later
        self._origins: dict[str, dict[str, Any]] = {}  # how members were built, for `save`
        self._exposed: set[str] = set()  # members whose models the user may hold, and change
        self._pool = DevicePool(parse_devices(devices))
        self._planner = Planner()
        self._live_lanes = LiveLanes(self._members, self._recipes, self._pool, LaneBuilder(), self._planner)
        self._gate = Gate()
        self._reading = Reading(self._live_lanes, self._members, self._exposed, self._gate, self._sharings)
        self._epoch_seconds: float | None = None  # of the last fit
        self._token = secrets.token_hex(8)  # identifies the fleet to worker processes
        repeating = Repeating(self._live_lanes, self._members, self._exposed, self._gate)
        self._answering = Answering(self._reading, repeating, self._recipes, self._pool, self._token)
        for name, model in pairs:
            self._exposed.add(self._enlist(name, model))

    @classmethod
    @without_full_collections()
    def build(
        cls,
        factory: Callable[..., Model],
        members: int | Iterable[str],
        *,
        seed: int = 0,
        devices: str | Sequence[str] = "auto",
        **kwargs: Any,
    ) -> Self:
        """Build a fleet of models that a factory makes, each from its own seed.

        Args:
            factory: A function that returns a new model.
            members: The number of members, or their names.
            seed: See `Fleet`.
            devices: See `Fleet`.
            **kwargs: Arguments of the factory. Each may be `each(...)`: one value per member.

        Returns:
            The fleet.

        Example:
            >>> fleet = mf.Fleet.build(make_net, 50, seed=0, width=mf.each(widths))
        """
        check_factory(factory)
        names = parse_names(members)
        by_argument = {key: per_member(value, names, key) for key, value in kwargs.items()}
        arguments = [{key: values[row] for key, values in by_argument.items()} for row in range(len(names))]
        models = {
            name: build_model(factory, own, member_seed(seed, name), name)
            for name, own in zip(names, arguments, strict=True)
        }
        fleet = cls(models, seed=seed, devices=devices)
        fleet._exposed.clear()
        fleet._origins = {
            name: {"factory": import_path(factory), "arguments": own}
            for name, own in zip(names, arguments, strict=True)
        }
        return fleet

    # --- members -------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Return the members' names, in their order."""
        return list(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    @overload
    def __getitem__(self, name: str) -> Model: ...

    @overload
    def __getitem__(self, name: list[str]) -> "Fleet": ...

    def __getitem__(self, name: str | list[str]) -> "Model | Fleet":
        """Return a member's model, or a fleet of some members.

        A model is the same object that was given or built, with its current weights. This works in a callback,
        too. If you change the model there, call `run.take(name)` to continue the training with the change.

        A list of names gives a fleet of these members, with the same models, seeds, recipes and optimizer state.
        Both fleets share the models, so training one shows in the other. From then on each has its own optimizer
        state.
        """
        if isinstance(name, list):
            return self._subset(name)
        member = self._member(name)
        with self._gate.reading(f"[{name!r}]"):
            if self._reading.fit is not None:
                self._reading.fit.sync(name)
            self._exposed.add(name)
            return member.model

    def _subset(self, names: Sequence[str]) -> "Fleet":
        with self._gate.changing("[[...]]"):
            models = {member.name: member.model for member in map(self._member, names)}
            if len(models) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise InputError(f"fleet[[...]] has {twice!r} twice. Give every name once, or use clone.")
            devices = self._pool.devices
            subset = Fleet(
                models,
                seed=self.seed,
                devices="auto" if devices is None else [str(device) for device in devices],
            )
            subset._recipe = self._recipe
            subset._recipes.update({name: self._recipes[name] for name in names})
            subset._origins = {name: self._origins[name] for name in names if name in self._origins}
            subset._live_lanes.take_state(self._live_lanes, names)
            self._exposed.update(names)
            return subset

    def __repr__(self) -> str:
        kinds = {type(member.model).__name__ for member in self._members.values()}
        devices = self._pool.names(list(self._members.values()))
        return f"<Fleet of {len(self)}: {', '.join(sorted(kinds))} on {', '.join(devices)}>"

    def add(self, name: str, model: Model) -> None:
        """Add a member, which is trained as the others are.

        If hyperparameters were given by `each`, the new member has none yet: `compile(..., members=[name])` before
        the next `fit` or `evaluate` gives it its own. The others keep their optimizer state.

        Args:
            name: The name of the new member.
            model: Its model.

        Raises:
            InputError: The name is taken, or the model is a member already.
        """
        with self._gate.changing("add"):
            self._exposed.add(self._enlist(name, model))
            self._live_lanes.regroup()

    def drop(self, name: str) -> Model:
        """Remove a member, and return its model.

        Raises:
            InputError: There is no such member, or it is the last one.
        """
        with self._gate.changing("drop"):
            model = self._member(name).model
            if len(self) == 1:
                raise InputError(f"{name!r} is the last member; a fleet needs at least one.")
            self._live_lanes.drop(name)
            del self._members[name], self._recipes[name]
            self._by_model.pop(id(model), None)
            self._exposed.discard(name)
            self._origins.pop(name, None)
            return model

    def clone(self, name: str, *, as_: str) -> None:
        """Add a copy of a member, with its weights and optimizer state. Shuffles and dropout are the copy's own.

        Args:
            name: The member to copy.
            as_: The name of the new member.
        """
        with self._gate.changing("clone"):
            member = self._member(name)
            clone = self._enlist(as_, member.framework.copy_model(member.model))
            self._recipes[clone] = recipe = self._recipes[name]
            if recipe is not None:
                # Members of one recipe have one object. Fleets that share it must not see the clone.
                wider = recipe.with_copy(name, clone)
                self._recipes.update({key: wider for key, own in self._recipes.items() if own is recipe})
                self._recipe = wider if self._recipe is recipe else self._recipe
            self._live_lanes.copy_state(name, clone)
            if name in self._origins:
                self._origins[clone] = self._origins[name]

    # --- verbs ---------------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: OptimizerLike,
        loss: LossLike = None,
        *,
        objective: Callable[[Model, Tree], Any] | Each | None = None,
        metrics: Sequence[MetricLike] = (),
        clip_norm: float | Each | None = None,
        precision: Precision = "float32",
        schedule: ScheduleLike = None,
        members: Sequence[str] | None = None,
        **hyperparameters: Any,
    ) -> None:
        """Set how the members are trained. Optimizer, loss and numbers are one for all members, or `each(...)`.

        Keras models that are already compiled do not need it. Calling `compile` again starts the optimizers over.

        Args:
            optimizer: A name ("sgd", "adam", "adamw", …), a class of `torch.optim`, or a Keras or Optax optimizer.
                With `each(...)`, hyperparameters of only some optimizers are given with `functools.partial`, or
                in a Keras optimizer.
            loss: A name ("cross_entropy", "mse", …), or a function `loss(output, target)`; or `each(...)` of them.
            objective: A function `objective(model, batch)` for everything else, or `each(...)`. It returns a loss,
                or a loss and a dict of metrics. With neither loss nor objective, the output's own `.loss` is used.
            metrics: Names ("accuracy", "top_5", "mse", "mae", "r2"), or functions `metric(output, target)`.
            clip_norm: The largest norm of a member's gradient. None does not clip.
            precision: "float32", "bf16" or "fp16".
            schedule: "cosine", "linear", "step", "onecycle", a `Schedule`, or a function that takes an optimizer
                and returns a scheduler.
            members: The members to compile. All by default.
            **hyperparameters: Those of the optimizer, such as `lr` and `weight_decay`.

        Raises:
            InputError: A name is unknown, or an argument does not fit a member.
        """
        with self._gate.changing("compile"):
            chosen = self.names if members is None else [self._member(name).name for name in members]
            given = Recipe(optimizer, loss, objective, metrics, clip_norm, precision, schedule, hyperparameters)
            recipe = given.by_name(chosen)
            compile_all(recipe, [self._members[name] for name in chosen])
            anew = [name for name in chosen if not completes(recipe, self._recipes[name], name)]
            self._live_lanes.warn_of_dropped_state(anew)
            self._recipes.update(dict.fromkeys(chosen, recipe))
            if members is None:
                self._recipe = recipe
            self._live_lanes.forget(anew)

    def plan(
        self,
        data: Data = None,
        *,
        epochs: int | Each = 1,
        batch_size: int | Each | None = None,
        strategy: Strategy = "auto",
        steps_per_epoch: int | Each | None = None,
    ) -> Plan:
        """Return what will run where, and why.

        Whether a group can be fused is known only with data. If the data are a loader, its first batch is read;
        the random generators that it draws from are restored afterwards.

        Args:
            data: As for `fit`. Without data, the plan has only what the models say.
            epochs: As for `fit`.
            batch_size: As for `fit`.
            strategy: As for `fit`.
            steps_per_epoch: As for `fit`.

        Returns:
            The plan. It can be printed, compared, and turned into a dict.
        """
        check_strategy(strategy)
        with self._gate.reading("plan"), global_generators.kept(), computing():
            lanes, changed = self._reading.lanes()
            if data is None:
                compiled = all(
                    recipe and not recipe.missing and not recipe.lacking(name)
                    for name, recipe in self._recipes.items()
                )
                plan, built = lanes.plan_without_data("train" if compiled else "predict", changed)
                return describe(plan, [(lane, None) for lane in built], None, self._epoch_seconds)
            job = Job(
                tuple(self.names), data, epochs=epochs, batch_size=batch_size, steps_per_epoch=steps_per_epoch
            )
            job.check()
            plan, opened, _ = lanes.open(job, "train", strategy, changed, self._sharings)
            return describe(plan, [(one.lane, one.feed) for one in opened], job, self._epoch_seconds)

    @explain_arguments
    def fit(
        self,
        data: Data,
        *,
        validation: Data = None,
        validation_split: float | None = None,
        epochs: int | Each = 1,
        initial_epoch: int = 0,
        batch_size: int | Each | None = None,
        shuffle: bool = True,
        callbacks: Sequence[Any] = (),
        strategy: Strategy = "auto",
        progress: Literal["auto"] | bool = "auto",
        exchange: Exchange | Distill | Sequence[Exchange | Distill] | None = None,
        share: int | Each | None = None,
        steps_per_epoch: int | Each | None = None,
        sample_weight: Data = None,
        class_weight: dict[int, float] | None = None,
        record_steps: bool = False,
    ) -> History:
        """Train every member. A second `fit` continues from where the members are.

        Args:
            data: Arrays `(x, y)`, a loader, or a function that returns an iterator; one for all, or `each(...)`.
            validation: Data of the same kinds, evaluated after every epoch.
            validation_split: The fraction of the arrays, from their end, to take as validation data.
            epochs: Passes over the data; one value, or `each(...)`.
            initial_epoch: The number of epochs that are done already, as in Keras: `epochs` is then the last one,
                and `epochs - initial_epoch` are trained. Callbacks, the history and schedules use these numbers.
            batch_size: Rows of a step; one value, or `each(...)`. A loader has its own.
            shuffle: Each member shuffles its own rows, in a new order every epoch.
            callbacks: Callbacks of modelfleet or Keras. Keras's work for each Keras member on its own: the first
                one uses the given objects, the others use copies. `callback.members[name]` is that of a member.
            strategy: "auto" measures. "fused" insists on fusing. "interleaved" has members take turns; "threads"
                and "processes" run them side by side. On several devices, "threads" and "processes" have one for
                each device, and "data_parallel" spreads every member over all devices.
            progress: "auto" shows a live table on a terminal and lines elsewhere; False shows nothing.
            exchange: What members exchange while they train: `Average`, `Gossip`, `Distill`, `Exploit`, or an
                `Exchange` of yours; or a list of them. They come before the callbacks.
            share: How many turns a member takes while another takes one, as `each(...)`.
            steps_per_epoch: Steps after which an epoch ends, for data that never end; one value, or `each(...)`.
            sample_weight: For arrays, a weight for every row, which multiplies the row's loss; one array for all,
                or `each(...)`. A loader gives weights in its batches: (x, y, weights).
            class_weight: For Keras models, {label: weight}.
            record_steps: Record the loss of every step of every member, for `history.steps(name)`.

        Returns:
            The history: every member's metrics, epoch by epoch.

        Raises:
            InputError: The data do not fit the models, or an argument is out of range.
            StrategyError: The strategy is not possible.
            AllFailedError: Every member has failed.
        """
        check_strategy(strategy)
        wrapped = [*list_exchanges(exchange), *wrap_callbacks(callbacks)]
        refuse_exchange(wrapped, strategy, clustered=self._pool.clustered)
        if sample_weight is not None:
            data = add_sample_weight(data, sample_weight, self._members, self._recipes)
        if validation_split is not None:
            if validation is not None:
                raise InputError("fit got both validation and validation_split. Give one of them.")
            data, validation = split_validation(data, validation_split, self._members)
        elif validation is None:
            refuse_missing_validation(wrapped)
        job = Job(
            tuple(self.names),
            data,
            validation=validation,
            epochs=epochs,
            initial_epoch=initial_epoch,
            batch_size=batch_size,
            shuffle=shuffle,
            share=share,
            steps_per_epoch=steps_per_epoch,
            class_weight=class_weight,
            record_steps=record_steps,
        )
        job.check()
        job = job.without_past()
        shown = reporter(progress)
        with self._gate.changing("fit"), computing(), noticing() as raise_if_interrupted:
            generators = global_generators.state()  # before any loader draws from them
            members = list(self._members.values())
            try:
                shown.status("tracing and measuring")
                remote = strategy in ("processes", "data_parallel") or self._pool.clustered
                sent = copy_loaders(job, self._members) if remote else job
                plan, opened, feeding = self._live_lanes.open(
                    job, "train", strategy, self._exposed, self._sharings, checkpoints.stored_plan_of(wrapped)
                )
                if any(isinstance(one, Distill) for one in wrapped):
                    plan = plan.in_this_process()
                fit = Fit(
                    self,
                    plan,
                    make_runs(opened, feeding),
                    self._sharings(generators)[plan.sharing](sent),
                    self._live_lanes.halve,
                    wrapped,
                    shown,
                    generators,
                    in_step=len(opened) > 1 and feeding.one_loader,
                    devices=[str(device) for device in self._pool.of_all(members)],
                    hyperparameters={name: self._hyperparameters(name) for name in self.names},
                )
                self._reading.begin(fit)
                record = self._planner.measurements.recorder(self._live_lanes.groups, plan, opened)
                try:
                    raise_if_interrupted()
                    history = fit.run()
                    self._epoch_seconds = fit.epoch_seconds
                    record(fit.epoch_seconds)
                    return history
                finally:
                    self._reading.begin(None)
                    self._live_lanes.write_back()
                    self._by_model = {id(member.model): name for name, member in self._members.items()}
            except CannotSendError as error:
                instead = "" if self._pool.places else ' Or use "interleaved" or "threads".'
                raise StrategyError(f'strategy="processes" is not possible: {error}{instead}') from error
            finally:
                shown.close()

    @explain_arguments
    def evaluate(
        self,
        data: Data,
        *,
        batch_size: int | Each | None = None,
        strategy: Strategy = "auto",
        members: Sequence[str] | None = None,
    ) -> dict[str, dict[str, float]]:
        """Return every member's loss and metrics on data: {name: {metric: value}}.

        Args:
            data: As for `fit`.
            batch_size: As for `fit`.
            strategy: As for `predict`.
            members: As for `predict`.

        Raises:
            InputError: The data do not fit the models, or a member does not exist.
            StrategyError: The strategy is not possible.
        """
        return self._answering.answer("evaluate", data, batch_size, strategy, members)

    @explain_arguments
    def predict(
        self,
        data: Data,
        *,
        batch_size: int | Each | None = None,
        strategy: Strategy = "auto",
        members: Sequence[str] | None = None,
    ) -> dict[str, Tree]:
        """Return every member's outputs on data: {name: array}.

        Args:
            data: x, or (x, y), whose y is ignored; one for all, or `each(...)`.
            batch_size: As for `fit`.
            strategy: "auto" takes what is quickest: a fused program, or the models one after the other. "fused"
                insists on fusing. "interleaved" runs the models one after the other; "threads" and "processes"
                run them side by side. The numbers are the same.
            members: The members to run, by name. All by default.

        Raises:
            InputError: The data do not fit the models, or a member does not exist.
            StrategyError: The strategy is not possible.
        """
        return self._answering.answer("predict", data, batch_size, strategy, members)

    def save(self, folder: str | Path, *, optimizer: bool = True) -> None:
        """Save the fleet in a folder: safetensors files and a JSON manifest.

        The folder has the members' weights, the arguments of `compile`, and the optimizer state with the numbers
        of steps and epochs. So `load` returns a fleet whose `fit` continues as this one's would. An earlier copy
        in the folder stays complete until the new one is. Python attributes, training or evaluation mode, and
        which parameters are frozen are not saved: in those, `load` returns models as the factory makes them.

        Args:
            folder: The folder. It is created if it does not exist.
            optimizer: False leaves out the optimizer state, which for Adam takes twice the space of the weights.
                The first `fit` of the loaded fleet then starts as after `compile`.
        """
        with self._gate.reading("save"):
            if self._reading.fit is not None:
                self._reading.fit.sync_all("save")
            trained = self._live_lanes.training_states() if optimizer else None
            fleet = SavedFleet(self._members, self.seed, self._origins, self._recipes, self._recipe, trained)
            saving.save(folder, fleet)

    # --- lanes ---------------------------------------------------------------------------------------------------

    @property
    def _lanes(self) -> list[Lane]:
        return self._live_lanes.lanes

    def _sharings(self, generators: global_generators.State | None = None) -> Sharings:
        """Return the ways to share the devices."""
        devices = self._pool.of_all(list(self._members.values()))
        generators = global_generators.state() if generators is None else generators

        def writer(job: Job) -> OrderWriter:
            return OrderWriter(self._token, self._recipes, self._pool.devices, job, generators)

        return sharings(writer, devices, self._pool.places)

    # --- small parts ---------------------------------------------------------------------------------------------

    def _enlist(self, name: object, model: Model) -> str:
        text = check_name(name, self._members)
        framework = frameworks.adapter_of(model, text)
        framework.check_model(model, text)
        if not self._pool.clustered:
            self._pool.of(framework)  # raises InputError if a device does not exist
        twin = self._by_model.get(id(model))
        if twin is not None:
            raise InputError(
                f"members {twin!r} and {text!r} are one model object; each would undo the other's steps. "
                f"Give a copy (copy.deepcopy), or use clone."
            )
        self._members[text] = Member(text, model, member_seed(self.seed, text), framework)
        self._recipes[text] = self._recipe
        self._by_model[id(model)] = text
        return text

    def _hyperparameters(self, name: str) -> dict[str, Any]:
        """Return the plain values that a member was built and compiled with."""
        arguments = self._origins.get(name, {}).get("arguments", {})
        recipe = self._recipes[name]
        return plain_values({**arguments, **({} if recipe is None else recipe.given())}, name)

    def _member(self, name: str) -> Member:
        if not isinstance(name, str | int):
            raise InputError(
                f"{name!r} is not the name of a member. Give one name, such as {self.names[0]!r}. For a fleet of "
                f"some members, give their names in a list: fleet[fleet.names[:2]]."
            )
        if name not in self._members:
            raise unknown("member", name, self._members)
        return self._members[name]
