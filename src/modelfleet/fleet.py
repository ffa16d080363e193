"""A fleet: a named set of members, and the verbs people use on it."""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from modelfleet import checkpoints, frameworks, saving
from modelfleet.callbacks import Callback, Checkpoint
from modelfleet.checkpoints import Arrangement
from modelfleet.devices import parse_devices
from modelfleet.each import Each, per_member
from modelfleet.errors import InputError, StrategyError, unknown
from modelfleet.feeds import Feed
from modelfleet.fitting import Fit, noticing
from modelfleet.frameworks import randomness
from modelfleet.gate import Gate
from modelfleet.history import History
from modelfleet.lane_sets import LaneSet
from modelfleet.lanes import Lane
from modelfleet.members import Member, check_name, member_seed
from modelfleet.planning import supply
from modelfleet.planning.assembly import Assembly
from modelfleet.planning.plan import LanePlan, Plan
from modelfleet.planning.planner import Choice, Planner, usual_sharing
from modelfleet.planning.supply import Job
from modelfleet.progress import Reporter, reporter
from modelfleet.recipe import Recipe
from modelfleet.sharing import sharings
from modelfleet.sharing.crew import Orders
from modelfleet.sharing.shifts import Sharing, Shift
from modelfleet.sharing.threads import everywhere
from modelfleet.workers import CannotSendError, shared

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
        self._gate = Gate()
        self._fit: Fit | None = None  # the one under way
        self._took: float | None = None  # an epoch of the last run
        self._token = secrets.token_hex(8)  # by which worker processes know the fleet again
        self._recipes: dict[str, Recipe | None] = {}
        self._recipe: Recipe | None = None  # for members to come
        self._set = LaneSet(self._members, self._recipes, self._assembly, self._planner)
        self._aside: LaneSet | None = None  # the lanes of verbs that are called within others
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
        known: dict[str, None] = {}  # in their order, and quick to look up
        for name in members:
            known[check_name(name, known)] = None
        names = list(known)
        if not names:
            raise InputError("a fleet needs at least one member; members is below 1 or empty.")
        spreads = {key: per_member(value, names, key) for key, value in kwargs.items()}
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
        """A member's model: the very object that was given or built, with its weights as they are now.

        In a callback, too. What is changed in it there is taken into the training by `run.take(name)`.
        """
        member = self._member(name)
        with self._gate.reading(f"[{name!r}]"):
            if self._fit is not None:
                self._fit.sync(name)
            self._handed.add(name)
            return member.model

    def __repr__(self) -> str:
        kinds = {type(member.model).__name__ for member in self._members.values()}
        devices = self._assembly.named(list(self._members.values()))
        return f"<Fleet of {len(self)}: {', '.join(sorted(kinds))} on {', '.join(devices)}>"

    def add(self, name: str, model: Any) -> None:
        """Let a model join. Hyperparameters given by `each` must be compiled anew to have a value for it."""
        with self._gate.changing("add"):
            self._handed.add(self._enlist(name, model))
            self._set.regroup()

    def drop(self, name: str) -> Any:
        """Let a member go; gives its model."""
        with self._gate.changing("drop"):
            model = self._member(name).model
            if len(self) == 1:
                raise InputError(f"{name!r} is the last member; a fleet needs at least one.")
            self._set.forget([name])
            del self._members[name], self._recipes[name]
            self._by_model.pop(id(model), None)
            self._handed.discard(name)
            self._origins.pop(name, None)
            return model

    def clone(self, name: str, *, as_: str) -> None:
        """A new member with another's weights and optimizer state, and shuffles and dropout of its own."""
        with self._gate.changing("clone"):
            member = self._member(name)
            clone = self._enlist(as_, member.framework.copy_model(member.model))
            self._recipes[clone] = self._recipes[name]
            self._set.lend(name, clone)
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
        with self._gate.changing("compile"):
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
            self._set.forget(chosen)

    def plan(self, data: Any = None, *, epochs: Any = 1, batch_size: Any = None) -> Plan:
        """What will run where, and why. With data it is known whether every group can be fused.

        A loader is looked into; the generators that it draws from are then put back.
        """
        with self._gate.reading("plan"), randomness.kept(), frameworks.computing():
            lanes = self._reading()
            handed = self._changed()
            if data is None:
                compiled = all(recipe is not None for recipe in self._recipes.values())
                ready = lanes.ready("auto", "train" if compiled else "predict", handed)
                if not lanes.choice.lanes:
                    lanes.choice = Choice([], usual_sharing(lanes.studied))
                return self._described(lanes.choice, ready, {}, None)
            job = Job(tuple(self.names), data, epochs=epochs, batch_size=batch_size)
            job.check()
            fed = lanes.settled("auto", job, "train", handed, self._ways)
            by_lane = {id(lane): (lane, feed) for lane, feed in fed}
            return self._described(lanes.choice, [lane for lane, _ in fed], by_lane, job)

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
        callbacks: of modelfleet, and those of Keras, which then work for every Keras member on its own. The first
            Keras member uses the objects given, the others use copies: `callback.members[name]` has each.
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
        with self._gate.changing("fit"), frameworks.computing(), noticing() as refuse_interrupted:
            return self._trained(job, strategy, wrapped, shown, refuse_interrupted)

    def _sent(self, job: Job, strategy: str) -> Job:
        """The job for worker processes: a loader with its own generator goes there before it is looked into."""
        if strategy not in ("processes", "data_parallel") and not self._assembly.clustered:
            return job
        if not supply.has_loaders(list(self._members.values()), job):
            return job
        try:
            if isinstance(job.data, Each):  # one by one first, to name whose can't be sent
                for name, own in zip(job.names, per_member(job.data, job.names, "data"), strict=True):
                    shared.pickled(own, f"members {name!r} with their data")
            data, validation = shared.copied((job.data, job.validation), "the data")
        except CannotSendError as error:
            raise self._unsent(error) from error
        return replace(job, data=data, validation=validation)

    def _unsent(self, error: CannotSendError) -> StrategyError:
        or_else = "" if self._assembly.places else ' Or use "interleaved" or "threads".'
        return StrategyError(f'strategy="processes" can\'t be had: {error}{or_else}')

    def _trained(
        self,
        job: Job,
        strategy: str,
        callbacks: Sequence[Callback],
        shown: Reporter,
        refuse_interrupted: Callable[[], None],
    ) -> History:
        """The history of a fit. `refuse_interrupted` is called when all is prepared."""
        before = randomness.state()  # before any loader draws from the generators
        sent = self._sent(job, strategy)
        lanes = self._set.settled(strategy, job, "train", self._handed, self._ways, _kept(callbacks))
        choice, studied = self._set.choice, self._set.studied
        self._fit = run = Fit(
            self,
            supply.shifts(lanes, job),
            self._sharings(before)[choice.sharing](sent),
            choice.sharing,
            callbacks,
            shown,
            before,
            side_by_side=supply.side_by_side([lane for lane, _ in lanes], job),
            devices=[str(device) for device in self._assembly.all_chosen(list(self._members.values()))],
        )
        learn = self._planner.watch(studied, choice)
        self._aside = None
        try:
            refuse_interrupted()
            history = run.run()
            self._took = run.epoch_seconds
            learn(run.epoch_seconds)
            return history
        except CannotSendError as error:
            raise self._unsent(error) from error
        finally:
            self._fit = self._aside = None
            self._set.write_back()
            self._by_model = {id(member.model): name for name, member in self._members.items()}

    def evaluate(self, data: Any, *, batch_size: Any = None) -> dict[str, dict[str, float]]:
        """Every member's loss and metrics on data: {name: {metric: value}}."""
        job = Job(tuple(self.names), data, batch_size=batch_size, shuffle=False)
        found: dict[str, dict[str, float]] = {}
        with self._gate.reading("evaluate"), frameworks.computing():
            fed = self._reading().settled("auto", job, "evaluate", self._changed(), self._ways)
            one = supply.side_by_side([lane for lane, _ in fed], job)
            for (lane, feed), values in zip(fed, everywhere(fed, Lane.evaluating, side_by_side=one), strict=True):
                lane.refuse_failures(feed)
                self._keep_changes(lane)
                for row, name in enumerate(lane.names):
                    found[name] = {metric: float(column[row]) for metric, column in values.items()}
        return {name: found[name] for name in job.names}

    def predict(self, data: Any, *, batch_size: Any = None) -> dict[str, Any]:
        """Every member's outputs on data: {name: array}. `data` is x, or (x, y), whose y is left aside."""
        job = Job(tuple(self.names), data, batch_size=batch_size, shuffle=False)
        found: dict[str, Any] = {}
        with self._gate.reading("predict"), frameworks.computing():
            fed = self._reading().settled("auto", job, "predict", self._changed(), self._ways)
            one = supply.side_by_side([lane for lane, _ in fed], job)
            for (lane, _), outputs in zip(fed, everywhere(fed, Lane.predicting, side_by_side=one), strict=True):
                self._keep_changes(lane)
                found.update(zip(lane.names, outputs, strict=True))
        return {name: found[name] for name in job.names}

    def save(self, folder: str | Path) -> None:
        """Keep all members' weights in a folder: safetensors and a JSON manifest. A copy that was there stays
        whole until the new one is.

        Attributes of Python, modes and what is frozen are not kept: `load` gives models as the factory makes them.
        """
        with self._gate.reading("save"):
            if self._fit is not None:
                self._fit.sync_all("save")
            saving.save(Path(folder), self._members, self._origins, self.seed)

    # --- lanes ---------------------------------------------------------------------------------------------------

    @property
    def _lanes(self) -> list[Lane] | None:
        return self._set.lanes

    def _reading(self) -> LaneSet:
        """The lanes for a verb that reads: within another verb they are others than that one's."""
        if not self._gate.nested:
            return self._set
        if self._fit is not None:
            self._fit.sync_all(self._gate.verb)
        if self._aside is None:
            self._aside = self._set.aside([] if self._fit is None else self._fit.parts())
        return self._aside

    def _keep_changes(self, lane: Lane) -> None:
        """Have the models hold what evaluating or predicting has changed; and the training, if one is going on."""
        if lane.engine.write_changes(lane.members) and self._fit is not None:
            for name in lane.names:
                self._fit.take(name)

    def _changed(self) -> Collection[str]:
        """The members whose models hold what the lanes of a verb that reads may not."""
        return set(self._members) if self._gate.nested else self._handed

    def _ways(self) -> dict[str, Callable[[Job], Sharing]]:
        return self._sharings(randomness.state())

    def _sharings(self, before: randomness.State) -> dict[str, Callable[[Job], Sharing]]:
        """The ways to share the devices, for a job."""
        devices = self._assembly.all_chosen(list(self._members.values()))

        def orders(job: Job) -> Orders:
            return Orders(self._token, self._recipes, self._assembly.devices, job, before)

        return sharings(orders, devices, self._assembly.places)

    def _halved(self, shift: Shift) -> list[Shift]:
        """Two lanes in the place of one that has run out of memory; the width that fits is remembered."""
        studied = self._set.studied
        halves = supply.halved(studied, shift)
        self._planner.remember_width(studied, shift.lane.part, shift.feed, len(halves[0].names))
        # The later ones hold what is newer.
        self._set.lanes = [*(self._lanes or ()), *(half.lane for half in halves)]
        self._set.asked = []  # the next fit is planned anew
        self._aside = None
        return halves

    @staticmethod
    def _wrapped(callbacks: Sequence[Any]) -> list[Callback]:
        """The callbacks as modelfleet's own: those of a framework as one, in the place of the first of them."""
        if not isinstance(callbacks, Iterable):
            raise InputError(f"callbacks is {callbacks!r}; expected a list of callbacks: callbacks=[...].")
        given = list(callbacks)
        own = [callback for callback in given if isinstance(callback, Callback)]
        others = [callback for callback in given if not isinstance(callback, Callback)]
        if not others:
            return own
        place = next(index for index, callback in enumerate(given) if callback is others[0])
        return [*own[:place], frameworks.wrapped(others), *own[place:]]

    def _described(
        self, choice: Choice, lanes: Sequence[Lane], fed: Mapping[int, tuple[Lane, Feed]], job: Job | None
    ) -> Plan:
        described, longest = [], 1
        for lane in lanes:
            feed = fed[id(lane)][1] if id(lane) in fed else None
            steps = None
            if job is not None:
                epochs = dict(zip(job.names, per_member(job.epochs, job.names, "epochs"), strict=True))
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
            return checkpoints.arrangement(callback.folder, verify=callback.verify)
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
    verify: bool = True,
) -> Fleet:
    """A fleet that `Fleet.save` kept.

    factory: makes a model to be filled with weights; it gets the keywords that the member was built with.
    members: only these, without reading the others.
    allow_import: import the factory from where the folder says it was, if none is given. Code of the folder's
        choice then runs: only for folders you trust.
    verify: compare the checksums of what is read, and raise `StoreError` where the folder was damaged.
    """
    models, seed, origins = saving.read(Path(folder), factory, allow_import, members, verify=verify)
    fleet = Fleet(models, seed=seed, devices=devices)
    fleet._handed.clear()
    fleet._origins = origins
    return fleet
