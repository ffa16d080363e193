"""A fleet: a named set of members, and the verbs people use on it."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from modelfleet import checkpoints, frameworks, saving
from modelfleet.callbacks import Callback, Checkpoint
from modelfleet.checkpoints import Arrangement
from modelfleet.devices import parse_devices
from modelfleet.each import spread
from modelfleet.errors import InputError, StrategyError, unknown
from modelfleet.feeds import Feed
from modelfleet.fitting import Fit
from modelfleet.history import History
from modelfleet.lanes import Lane
from modelfleet.members import Member, check_name, member_seed
from modelfleet.planning import supply
from modelfleet.planning.assembly import Assembly, Part, refuse_here, refuse_undivided, refuse_unfused, settle
from modelfleet.planning.placement import spread_out
from modelfleet.planning.plan import LanePlan, Plan
from modelfleet.planning.planner import Choice, Planner, usual_sharing
from modelfleet.planning.supply import Job
from modelfleet.progress import reporter
from modelfleet.recipe import Recipe
from modelfleet.sharing import sharings
from modelfleet.sharing.crew import Orders
from modelfleet.sharing.shifts import Sharing, Shift
from modelfleet.sharing.threads import everywhere
from modelfleet.workers import CannotSendError

STRATEGIES = ("auto", "fused", "interleaved", "threads", "processes", "data_parallel")


class Fleet:
    """Many models, trained, evaluated and kept together, each with the numbers it would have had alone.

    models: a mapping from name to model, or a sequence of models (their names are then "0", "1", …).
    seed: with a member's name it makes the member's own seed, for its shuffles and its dropout.
    devices: "auto", or devices by name: "cpu", "cuda:0", "cpu:0,cpu:1"; "ray" for those of a Ray cluster.

        fleet = mf.Fleet({"narrow": net(64), "wide": net(256)})
        fleet.compile("adam", "cross_entropy", lr=1e-3)
        history = fleet.fit((x, y), epochs=10)
    """

    def __init__(
        self,
        models: Mapping[str, Any] | Sequence[Any],
        *,
        seed: int = 0,
        devices: str | Sequence[str] = "auto",
    ) -> None:
        pairs = list(models.items()) if isinstance(models, Mapping) else list(enumerate(_listed(models)))
        if not pairs:
            raise InputError("a fleet needs at least one member; got none.")
        self.seed = int(seed)
        self._members: dict[str, Member] = {}
        self._by_model: dict[int, str] = {}  # the member of a model object, which must be of one only
        self._assembly = Assembly(parse_devices(devices))
        self._planner = Planner()
        self._choice = Choice([])  # how the lanes at hand run
        self._took: float | None = None  # an epoch of the last run
        self._token = secrets.token_hex(8)  # by which worker processes know the fleet again
        self._recipes: dict[str, Recipe | None] = {}
        self._recipe: Recipe | None = None  # for members to come
        self._lanes: list[Lane] | None = None
        self._asked: list[Part] = []  # what the lanes at hand were made for
        self._parallel = False  # whether each of them is over all devices
        self._kind = ""  # what they can do: "predict" only, or all
        # Where a member's optimizer state is, between two sets of lanes.
        self._carried: dict[str, tuple[Lane, int]] = {}
        self._handed: set[str] = set()  # members whose models somebody else may hold, and change
        self._origins: dict[str, dict[str, Any]] = {}  # how members were built, for `save`
        for name, model in pairs:
            self._handed.add(self._enlist(name, model))

    @classmethod
    def build(
        cls,
        factory: Callable[..., Any],
        members: int | Iterable[str],
        *,
        seed: int = 0,
        devices: str | Sequence[str] = "auto",
        **kwargs: Any,
    ) -> Self:
        """A fleet of models that `factory(**kwargs)` makes, each from its own seed.

        members: how many, or their names. Any keyword may be `each(...)`: one value per member.

            fleet = mf.Fleet.build(make_net, 50, seed=0, width=mf.each(widths))
        """
        if not callable(factory):
            raise InputError(f"the factory is {factory!r}; expected a function that returns a new model.")
        if isinstance(members, int | np.integer) and not isinstance(members, bool):
            members = [str(number) for number in range(int(members))]
        elif isinstance(members, str) or not isinstance(members, Iterable):
            raise InputError(f"members is {members!r}; give a number, or a sequence of names.")
        names: list[str] = []
        for name in members:
            names.append(check_name(name, names))
        if not names:
            raise InputError("a fleet needs at least one member; members is below 1 or empty.")
        spreads = {key: spread(value, names, key) for key, value in kwargs.items()}
        arguments = [{key: values[row] for key, values in spreads.items()} for row in range(len(names))]
        models = {
            name: frameworks.build(factory, own, member_seed(seed, name), name)
            for name, own in zip(names, arguments, strict=True)
        }
        fleet = cls(models, seed=seed, devices=devices)
        fleet._handed.clear()
        fleet._origins = {
            name: {"factory": saving.import_path(factory), "arguments": own}
            for name, own in zip(names, arguments, strict=True)
        }
        return fleet

    # --- who is in it --------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The members' names, in their order."""
        return list(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Any:
        """A member's model: the very object that was given or built, with its weights as they are now."""
        model = self._member(name).model
        self._handed.add(name)
        return model

    def __repr__(self) -> str:
        kinds = {type(member.model).__name__ for member in self._members.values()}
        devices = self._assembly.named(list(self._members.values()))
        return f"<Fleet of {len(self)}: {', '.join(sorted(kinds))} on {', '.join(devices)}>"

    def add(self, name: str, model: Any) -> None:
        """Let a model join. Hyperparameters given by `each` must be compiled anew to have a value for it."""
        self._handed.add(self._enlist(name, model))
        self._regroup()

    def drop(self, name: str) -> Any:
        """Let a member go; gives its model."""
        model = self._member(name).model
        if len(self) == 1:
            raise InputError(f"{name!r} is the last member; a fleet needs at least one.")
        self._regroup()
        del self._members[name], self._recipes[name]
        self._by_model.pop(id(model), None)
        self._handed.discard(name)
        self._origins.pop(name, None)
        self._carried.pop(name, None)
        return model

    def clone(self, name: str, *, as_: str) -> None:
        """A new member with another's weights and optimizer state, and shuffles and dropout of its own."""
        member = self._member(name)
        clone = self._enlist(as_, member.framework.copy_model(member.model))
        self._recipes[clone] = self._recipes[name]
        self._regroup()
        if name in self._carried:
            self._carried[clone] = self._carried[name]
        if name in self._origins:
            self._origins[clone] = self._origins[name]

    # --- the verbs -----------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: Any,
        loss: Any = None,
        *,
        objective: Callable[[Any, Any], Any] | None = None,
        metrics: Sequence[Any] = (),
        clip_norm: Any = None,
        precision: str = "float32",
        schedule: Any = None,
        members: Sequence[str] | None = None,
        **hyperparameters: Any,
    ) -> None:
        """Say how the members are trained. Every hyperparameter is one value for all, or `each(...)`.

        optimizer: a name ("sgd", "adam", "adamw", …), a class of `torch.optim`, or what Keras or Optax take.
        loss: a name ("cross_entropy", "mse", …) or `loss(output, target)`.
        objective: `objective(model, batch)` for everything else; returns a loss, or a loss and a dict of metrics.
            With neither, the output's own `.loss` is used.
        metrics: names ("accuracy", "top_5", "mse", "mae", "r2"), or functions `metric(output, target)`.
        clip_norm: the largest norm of a member's gradient.
        precision: "float32", "bf16" or "fp16".
        schedule: "cosine", "linear", "step", "onecycle", a `Schedule`, or what makes a scheduler of an optimizer.
        members: only these; without it, all. Keras models that are compiled already need none of this.
        """
        chosen = self.names if members is None else [self._member(name).name for name in members]
        given = Recipe(optimizer, loss, objective, metrics, clip_norm, precision, schedule, hyperparameters)
        recipe = given.by_name(chosen)
        for framework in {
            id(self._members[name].framework): self._members[name].framework for name in chosen
        }.values():
            own = [self._members[name] for name in chosen if self._members[name].framework is framework]
            framework.compile(recipe.only([member.name for member in own]), own)  # every error of it now
        self._recipes.update(dict.fromkeys(chosen, recipe))
        if members is None:
            self._recipe = recipe
            self._carried = {}
        else:
            self._regroup()
            for name in chosen:
                self._carried.pop(name, None)
        self._lanes = None

    def plan(self, data: Any = None, *, epochs: Any = 1, batch_size: Any = None) -> Plan:
        """What will run where, and why. With data it is known whether every group can be fused."""
        if data is None:
            compiled = all(recipe is not None for recipe in self._recipes.values())
            lanes = self._ready("auto", "train" if compiled else "predict")
            if not self._choice.lanes:
                self._choice = Choice([], usual_sharing(self._studied))
            return self._described(lanes, {}, None)
        job = Job(tuple(self.names), data, epochs=epochs, batch_size=batch_size)
        job.check()
        lanes = self._settled("auto", job, "train")
        return self._described([lane for lane, _ in lanes], {id(lane): (lane, feed) for lane, feed in lanes}, job)

    def fit(
        self,
        data: Any,
        *,
        validation: Any = None,
        epochs: Any = 1,
        batch_size: Any = None,
        shuffle: bool = True,
        callbacks: Sequence[Any] = (),
        strategy: str = "auto",
        progress: str | bool = "auto",
        exchange: Any = None,
        share: Any = None,
        steps_per_epoch: int | None = None,
        class_weight: Any = None,
    ) -> History:
        """Train every member; gives the history. A second `fit` goes on from where the members are.

        data: `(x, y)` arrays, a loader, or a function that returns an iterator; one for all, or `each(...)`.
        epochs, batch_size: one value, or `each(...)`.
        shuffle: every member's rows in an order of its own, anew at every epoch.
        strategy: "auto" measures; "fused" insists on fusing; "interleaved" has the members take turns, "threads"
            and "processes" run them side by side. On several devices "threads" and "processes" have one for each,
            and "data_parallel" has every member on all of them.
        callbacks: of modelfleet, and those of Keras, which then work for every Keras member on its own.
        progress: a live table on a terminal and lines elsewhere; False for silence.
        share: how many turns a member takes while another takes one; best `each(...)`.
        steps_per_epoch: where an epoch ends, for data that go on and on.
        class_weight: for Keras models, {label: weight}.
        """
        if exchange is not None:
            raise InputError("exchange is not built yet: members train independently. Leave it out.")
        if strategy not in STRATEGIES:
            raise unknown("strategy", strategy, STRATEGIES)
        job = Job(
            tuple(self.names),
            data,
            validation=validation,
            epochs=epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            share=share,
            steps_per_epoch=steps_per_epoch,
            class_weight=class_weight,
        )
        job.check()
        shown = reporter(progress)
        wrapped = self._wrapped(callbacks)
        randomness = self._randomness()  # as it is before any loader draws from it
        lanes = self._settled(strategy, job, "train", _kept(wrapped))
        shifts = supply.shifts(lanes, job)
        side_by_side = supply.side_by_side([lane for lane, _ in lanes], job)
        name = self._choice.sharing
        sharing = self._sharings(randomness)[name](job)
        learn = self._planner.watch(self._studied, self._choice)
        devices = [str(device) for device in self._assembly.all_chosen(list(self._members.values()))]
        run = Fit(
            self, shifts, sharing, name, wrapped, shown, randomness, side_by_side=side_by_side, devices=devices
        )
        try:
            history = run.run()
            self._took = run.epoch_seconds
            learn(run.epoch_seconds)
            return history
        except CannotSendError as error:
            or_else = "" if self._assembly.places else ' Or use "interleaved" or "threads".'
            raise StrategyError(f'strategy="processes" can\'t be had: {error}{or_else}') from error
        finally:
            for lane in self._lanes or ():
                lane.engine.write_back(lane.members)
            self._by_model = {id(member.model): name for name, member in self._members.items()}

    def evaluate(self, data: Any, *, batch_size: Any = None) -> dict[str, dict[str, float]]:
        """Every member's loss and metrics on data: {name: {metric: value}}."""
        job = Job(tuple(self.names), data, batch_size=batch_size, shuffle=False)
        found: dict[str, dict[str, float]] = {}
        fed = self._settled("auto", job, "evaluate")
        in_turn = supply.side_by_side([lane for lane, _ in fed], job)
        for (lane, feed), values in zip(fed, everywhere(fed, Lane.evaluate, in_turn=in_turn), strict=True):
            lane.refuse_failures(feed)
            for row, name in enumerate(lane.names):
                found[name] = {metric: float(column[row]) for metric, column in values.items()}
        return {name: found[name] for name in self.names}

    def predict(self, data: Any, *, batch_size: Any = None) -> dict[str, Any]:
        """Every member's outputs on data: {name: array}. `data` is x, or (x, y), whose y is left aside."""
        job = Job(tuple(self.names), data, batch_size=batch_size, shuffle=False)
        found: dict[str, Any] = {}
        fed = self._settled("auto", job, "predict")
        in_turn = supply.side_by_side([lane for lane, _ in fed], job)
        for (lane, _), outputs in zip(fed, everywhere(fed, Lane.predict, in_turn=in_turn), strict=True):
            found.update(zip(lane.names, outputs, strict=True))
        return {name: found[name] for name in self.names}

    def save(self, folder: str | Path) -> None:
        """Keep all members' weights in a folder: safetensors and a JSON manifest. A copy that was there stays
        whole until the new one is."""
        saving.save(Path(folder), self._members, self._origins, self.seed)

    # --- lanes ---------------------------------------------------------------------------------------------------

    def _settled(
        self, strategy: str, job: Job, kind: str, kept: Arrangement | None = None
    ) -> list[tuple[Lane, Feed]]:
        """The lanes with their feeds, checked against each other and ready for their steps.

        `kept` is the arrangement of a run that is to be resumed, if there is one.
        """
        lanes = self._ready(strategy, kind, kept)
        fed = supply.feeds(lanes, job)
        for lane, feed in fed:
            if kind == "predict":
                lane.engine.output_shape(feed.first(), lane.names[0])
            else:
                supply.check(lane, feed, job)
        settled = settle(self._studied, fed, kind, strategy)
        if kind == "train":
            ways = self._sharings(self._randomness())
            sharing = None if kept is None else kept.sharing
            self._choice = self._planner.decide(self._studied, settled, job, strategy, ways, sharing)
            settled = self._choice.lanes
        if [lane for lane, _ in settled] != lanes:
            self._regroup()
            self._lanes = [lane for lane, _ in settled]
            self._carry_over()
        return settled

    def _ready(self, strategy: str, kind: str, kept: Arrangement | None = None) -> list[Lane]:
        """The lanes of the fleet as it is now, their weights as the members' models have them."""
        lanes = self._lanes
        if self._assembly.clustered:
            refuse_here(strategy)
        if self._assembly.look():
            lanes = None
        if lanes is None or self._restructured(lanes) or (self._kind == "predict" and kind != "predict"):
            self._studied = self._assembly.study(list(self._members.values()), self._recipes, kind)
            self._kind = kind
            lanes = None
        if strategy == "fused":
            refuse_unfused(self._studied.groups)
        parallel = strategy == "data_parallel" or (kept is not None and kept.sharing == "data_parallel")
        if parallel:
            members = list(self._members.values())
            refuse_undivided(members, self._assembly.all_chosen(members))
        # On several devices there is a thread or a process for each, and groups need not be taken apart for them.
        whole = ("auto", "fused", "threads", "processes") if self._studied.scattered else ("auto", "fused")
        alone = strategy not in (*whole, "data_parallel")
        asked = self._studied.apart(f'strategy="{strategy}"') if alone else self._studied.groups
        if kept is not None and kept.members == set(self.names):
            asked = kept.placed(self._studied)
        parted = lanes is not None and strategy == "fused" and not all(lane.engine.fused for lane in lanes)
        parted |= parallel != self._parallel
        self._parallel = parallel
        if lanes is None or parted or [part.names for part in asked] != [part.names for part in self._asked]:
            self._regroup()
            self._asked = list(asked)
            parts = asked if kept is not None or parallel else spread_out(self._studied, asked)
            self._lanes = lanes = [self._assembly.lane(self._studied, part) for part in parts]
            self._carry_over()
        else:
            for lane in lanes:
                lane.refresh(self._handed)
        return lanes

    def _restructured(self, lanes: Sequence[Lane]) -> bool:
        """Whether somebody who holds a model has changed its structure: frozen a layer, say."""
        return any(
            member.framework.signature(member.model) != lane.signature
            for lane in lanes
            for member in lane.members
            if member.name in self._handed
        ) or not all(lane.engine.still_shared(lane.members) for lane in lanes)

    def _sharings(self, randomness: Mapping[str, Any]) -> dict[str, Callable[[Job], Sharing]]:
        """The ways to share the devices, for a job."""
        devices = self._assembly.all_chosen(list(self._members.values()))

        def orders(job: Job) -> Orders:
            return Orders(self._token, self._recipes, self._assembly.devices, job, randomness)

        return sharings(orders, devices, self._assembly.places)

    def _halved(self, shift: Shift) -> list[Shift]:
        """Two lanes in the place of one that has run out of memory; the width that fits is remembered."""
        halves = supply.halved(self._studied, shift)
        self._planner.remember_width(self._studied, shift.lane.part, shift.feed, len(halves[0].names))
        self._lanes = [*(self._lanes or ()), *(half.lane for half in halves)]  # the later ones hold what is newer
        self._asked = []  # the next fit is planned anew
        return halves

    def _randomness(self) -> dict[str, Any]:
        adapters = {member.framework.NAME: member.framework for member in self._members.values()}
        return {name: adapter.randomness() for name, adapter in adapters.items()}

    @staticmethod
    def _wrapped(callbacks: Sequence[Any]) -> list[Callback]:
        """The callbacks as modelfleet's own: those of a framework run per member."""
        wrapped = []
        for callback in callbacks:
            if isinstance(callback, Callback):
                wrapped.append(callback)
            else:
                wrapped.append(frameworks.wrapped(callback))
        return wrapped

    def _regroup(self) -> None:
        """Give up the lanes, and remember where each member's optimizer state is."""
        for lane in self._lanes or ():
            self._carried.update({name: (lane, row) for row, name in enumerate(lane.names)})
        self._lanes = None

    def _carry_over(self) -> None:
        for lane in self._lanes or ():
            for row, name in enumerate(lane.names):
                if name in self._carried:
                    lane.adopt(row, *self._carried[name])
        self._carried = {}

    def _described(self, lanes: Sequence[Lane], fed: Mapping[int, tuple[Lane, Feed]], job: Job | None) -> Plan:
        choice, described, longest = self._choice, [], 1
        for lane in lanes:
            feed = fed[id(lane)][1] if id(lane) in fed else None
            steps = None
            if job is not None:
                epochs = dict(zip(job.names, spread(job.epochs, job.names, "epochs"), strict=True))
                own = np.array([int(epochs[name]) for name in lane.names])
                longest = max(longest, int(own.max()))
                steps = None if feed is None or feed.steps is None else int((feed.steps * own).max())
            described.append(
                LanePlan(
                    members=tuple(lane.names),
                    device=lane.device,
                    fused=lane.engine.fused,
                    reason=_why(lane),
                    parameters=lane.engine.parameters,
                    state_bytes=lane.engine.bytes,
                    working_bytes=None if feed is None else lane.engine.working_bytes(feed.first()),
                    wave=lane.part.wave,
                    steps=steps,
                    predicted_seconds_per_step=choice.predicted.get(id(lane)),
                    seconds_per_step=lane.seconds_per_step,
                    program=lane.engine.program,
                )
            )
        return Plan(
            tuple(described),
            choice.sharing,
            predicted_seconds=None if job is None or choice.epoch is None else choice.epoch * longest,
            seconds_per_epoch=self._took,
            measuring_seconds=choice.measuring,
        )

    # --- members -------------------------------------------------------------------------------------------------

    def _enlist(self, name: object, model: Any) -> str:
        text = check_name(name, self._members)
        framework = frameworks.adapter_of(model, text)
        framework.check_model(model, text)
        if not self._assembly.clustered:
            self._assembly.chosen(framework)  # which refuses devices that are not here
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

    def _member(self, name: str) -> Member:
        if name not in self._members:
            raise unknown("member", name, self._members)
        return self._members[name]


def _kept(callbacks: Sequence[Callback]) -> Arrangement | None:
    """The arrangement of the run that a checkpoint would resume."""
    for callback in callbacks:
        if isinstance(callback, Checkpoint) and callback.resume and checkpoints.exists(callback.folder):
            return checkpoints.arrangement(callback.folder)
    return None


def _why(lane: Lane) -> str:
    engine = lane.engine
    together = f"{len(lane.members)} of one structure, fused" if engine.fused and len(lane.members) > 1 else ""
    if lane.part.split is not None:
        group, devices = lane.part.split
        together = f"{len(lane.members)} of {group} of one structure, split over {devices} devices"
    parts = [together, lane.part.reason, engine.untraced and f"every step runs its Python: {engine.untraced}"]
    return "; ".join(part for part in parts if part) or "on its own"


def _listed(models: Any) -> list[Any]:
    if isinstance(models, str | bytes) or not isinstance(models, Iterable):
        raise InputError(
            f"models is a {type(models).__name__}; give a mapping from name to model, or a sequence of models."
        )
    return list(models)


def load(
    folder: str | Path,
    factory: Callable[..., Any] | None = None,
    *,
    members: Sequence[str] | None = None,
    allow_import: bool = False,
    devices: str | Sequence[str] = "auto",
) -> Fleet:
    """A fleet that `Fleet.save` kept.

    factory: makes a model to be filled with weights; it gets the keywords that the member was built with.
    members: only these, without reading the others.
    allow_import: import the factory from where the folder says it was, if none is given. Code of the folder's
        choice then runs: only for folders you trust.
    """
    models, seed, origins = saving.read(Path(folder), factory, allow_import, members)
    fleet = Fleet(models, seed=seed, devices=devices)
    fleet._handed.clear()
    fleet._origins = origins
    return fleet
