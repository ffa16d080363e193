"""A fleet: a named set of members, and the verbs people use on it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from modelfleet import frameworks, saving
from modelfleet.callbacks import Callback
from modelfleet.devices import parse_devices
from modelfleet.each import Each, spread
from modelfleet.errors import InputError, StrategyError, unknown
from modelfleet.feeds import Feed, LoaderFeed, is_loader, make_feed
from modelfleet.fitting import Fit, Shift
from modelfleet.history import History
from modelfleet.lanes import Lane
from modelfleet.members import Member, check_name, member_seed
from modelfleet.planning.assembly import Assembly, settle
from modelfleet.planning.plan import LanePlan, Plan
from modelfleet.progress import reporter
from modelfleet.recipe import Recipe

STRATEGIES = ("auto", "fused", "interleaved", "threads", "processes")


class Fleet:
    """Many models, trained, evaluated and kept together, each with the numbers it would have had alone.

    models: a mapping from name to model, or a sequence of models (their names are then "0", "1", …).
    seed: with a member's name it makes the member's own seed, for its shuffles and its dropout.
    devices: "auto", or a device by name: "cpu", "cpu:0", "cuda:0".

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
        self._framework = frameworks.adapter_of(pairs[0][1], str(pairs[0][0]))
        chosen = self._framework.choose(parse_devices(devices))
        if len(chosen) > 1:
            raise InputError(
                f"a fleet runs on one device for now; got {', '.join(map(str, chosen))}. Give one of them."
            )
        self._device = chosen[0]
        self._assembly = Assembly(self._framework, self._device)
        self._turns = False  # whether the lanes at hand hold one member each because the strategy said so
        self._recipe: Recipe | None = None
        self._lanes: list[Lane] | None = None
        self._carried: dict[
            str, tuple[Lane, int]
        ] = {}  # where a member's optimizer state is, between two sets of lanes
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
        framework = frameworks.of_factory(factory)
        models = {
            name: framework.build(factory, own, member_seed(seed, name), name)
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
        return f"<Fleet of {len(self)}: {', '.join(sorted(kinds))} on {self._device}>"

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
        del self._members[name], self._by_model[id(model)]
        self._handed.discard(name)
        self._origins.pop(name, None)
        self._carried.pop(name, None)
        return model

    def clone(self, name: str, *, as_: str) -> None:
        """A new member with another's weights and optimizer state, and shuffles and dropout of its own."""
        model = self._framework.copy_model(self._member(name).model)
        clone = self._enlist(as_, model)
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
        **hyperparameters: Any,
    ) -> None:
        """Say how the members are trained. Every hyperparameter is one value for all, or `each(...)`.

        optimizer: a name ("sgd", "adam", "adamw", …) or a class of `torch.optim`.
        loss: a name ("cross_entropy", "mse", …) or `loss(output, target)`.
        objective: `objective(model, batch)` for everything else; returns a loss, or a loss and a dict of metrics.
            With neither, the output's own `.loss` is used.
        metrics: names ("accuracy", "top_5", "mse", "mae", "r2"), or functions `metric(output, target)`.
        clip_norm: the largest norm of a member's gradient.
        precision: "float32", "bf16" or "fp16".
        schedule: "cosine", "linear", "step", "onecycle", a `Schedule`, or what makes a scheduler of an optimizer.
        """
        recipe = Recipe(optimizer, loss, objective, metrics, clip_norm, precision, schedule, hyperparameters)
        self._framework.prepare(recipe, self.names)  # every error of it now, none later
        self._recipe = recipe
        self._lanes = None
        self._carried = {}

    def plan(self, data: Any = None, *, epochs: Any = 1, batch_size: Any = None) -> Plan:
        """What will run where, and why. With data it is known whether every group can be fused."""
        if data is None:
            return self._described(self._ready(), None)
        lanes = self._settled("auto", data, batch_size, shuffle=True)
        longest = spread(epochs, self.names, "epochs")
        steps: dict[int, int | None] = {}
        for lane, feed in lanes:
            own = [longest[self.names.index(name)] for name in lane.names]
            steps[id(lane)] = None if feed.steps is None else int((feed.steps * np.array(own)).max())
        return self._described([lane for lane, _ in lanes], steps)

    def fit(
        self,
        data: Any,
        *,
        validation: Any = None,
        epochs: Any = 1,
        batch_size: Any = None,
        shuffle: bool = True,
        callbacks: Sequence[Callback] = (),
        strategy: str = "auto",
        progress: str | bool = "auto",
        exchange: Any = None,
    ) -> History:
        """Train every member; gives the history. A second `fit` goes on from where the members are.

        data: `(x, y)` arrays, a loader, or a function that returns an iterator; one for all, or `each(...)`.
        epochs, batch_size: one value, or `each(...)`.
        shuffle: every member's rows in an order of its own, anew at every epoch.
        strategy: "auto" fuses what can be; "fused" insists, "interleaved" has the members take turns.
        progress: a live table on a terminal and lines elsewhere; False for silence.
        """
        if exchange is not None:
            raise InputError("exchange is not built yet: members train independently. Leave it out.")
        _check_strategy(strategy)
        names = self.names
        lengths = _epochs(epochs, names)
        shown = reporter(progress)
        randomness = self._framework.randomness()  # as it is before any loader draws from it
        lanes = self._settled(strategy, data, batch_size, shuffle=shuffle)
        checked = self._validation([lane for lane, _ in lanes], validation, batch_size)
        shifts = []
        for (lane, feed), check in zip(lanes, checked, strict=True):
            shifts.append(self._shift(lane, feed, check, np.array([lengths[name] for name in lane.names])))
        run = Fit(self, shifts, callbacks, shown, self._framework, randomness)
        try:
            return run.run()
        finally:
            for lane, _ in lanes:
                lane.engine.write_back(lane.members)

    def evaluate(self, data: Any, *, batch_size: Any = None) -> dict[str, dict[str, float]]:
        """Every member's loss and metrics on data: {name: {metric: value}}."""
        found: dict[str, dict[str, float]] = {}
        for lane, feed in self._settled("auto", data, batch_size, shuffle=False, kind="evaluate"):
            values = lane.evaluate(feed)
            lane.refuse_failures(feed)
            for row, name in enumerate(lane.names):
                found[name] = {metric: float(column[row]) for metric, column in values.items()}
        return {name: found[name] for name in self.names}

    def predict(self, data: Any, *, batch_size: Any = None) -> dict[str, Any]:
        """Every member's outputs on data: {name: array}. `data` is x, or (x, y), whose y is left aside."""
        found: dict[str, Any] = {}
        for lane, feed in self._settled("auto", data, batch_size, shuffle=False, kind="predict"):
            found.update(zip(lane.names, lane.predict(feed), strict=True))
        return {name: found[name] for name in self.names}

    def save(self, folder: str | Path) -> None:
        """Keep all members' weights in a folder: safetensors and a JSON manifest. A copy that was there stays
        whole until the new one is."""
        saving.save(Path(folder), self._members, self._origins, self.seed, self._framework)

    # --- lanes ---------------------------------------------------------------------------------------------------

    def _settled(
        self, strategy: str, data: Any, batch_size: Any, *, shuffle: bool, kind: str = "train"
    ) -> list[tuple[Lane, Feed]]:
        """The lanes with their feeds, checked against each other and ready for their steps."""
        if self._recipe is None and kind != "predict":
            verb = "evaluate" if kind == "evaluate" else "fit"
            raise InputError(f"call compile before {verb}: it needs to know the loss and the optimizer.")
        values = spread(data, self.names, "data")
        lanes = self._ready(strategy)
        fed = []
        for lane, feed in self._feeds(lanes, data, values, batch_size, shuffle=shuffle, what="data"):
            if kind == "predict":
                lane.engine.output_shape(feed.first(), lane.names[0])
            else:
                lane.engine.open_sums(self._check(lane, feed, data, values))
            fed.append((lane, feed))
        settled = settle(self._assembly, fed, kind, strategy)
        if [lane for lane, _ in settled] != lanes:
            self._regroup()
            self._lanes = [lane for lane, _ in settled]
            self._carry_over()
        return settled

    def _ready(self, strategy: str = "auto") -> list[Lane]:
        """The lanes of the fleet as it is now, their weights as the members' models have them."""
        turns = strategy == "interleaved"
        parted = strategy == "fused" and not all(lane.engine.programs.fused for lane in self._lanes or ())
        if self._lanes is None or turns != self._turns or parted or self._restructured(self._lanes):
            self._regroup()
            recipe = self._recipe or Recipe("sgd")
            self._lanes = self._assembly.lanes(list(self._members.values()), recipe, fused=not turns)
            self._turns = turns
            self._carry_over()
        else:
            for lane in self._lanes:
                lane.refresh(self._handed)
        return self._lanes

    def _restructured(self, lanes: Sequence[Lane]) -> bool:
        """Whether somebody who holds a model has changed its structure: frozen a layer, say."""
        return any(
            self._framework.signature(member.model) != lane.signature
            for lane in lanes
            for member in lane.members
            if member.name in self._handed
        ) or not all(lane.engine.still_shared(lane.members) for lane in lanes)

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

    def _feeds(
        self, lanes: Sequence[Lane], data: Any, values: Sequence[Any], batch_size: Any, *, shuffle: bool, what: str
    ) -> Iterator[tuple[Lane, Feed]]:
        """Every lane with its feed. One loader for all is read once, by one feed that the lanes share."""
        arrays = self._framework.arrays
        if not isinstance(data, Each) and is_loader(data, arrays, what):
            whole = self._feed(lanes, data, values, batch_size, shuffle=shuffle, what=what)
            first = 0
            for lane in lanes:
                yield lane, whole.select(range(first, first + len(lane.members)))
                first += len(lane.members)
            return
        for lane in lanes:
            yield lane, self._feed([lane], data, values, batch_size, shuffle=shuffle, what=what)

    def _feed(
        self, lanes: Sequence[Lane], data: Any, values: Sequence[Any], batch_size: Any, *, shuffle: bool, what: str
    ) -> Feed:
        """One feed for all members of some lanes, in their order."""
        members = [member for lane in lanes for member in lane.members]
        places = {name: place for place, name in enumerate(self._members)}
        rows = [places[member.name] for member in members]
        if isinstance(batch_size, Each):
            sizes = spread(batch_size, self.names, "batch_size")
            batch_size = Each([sizes[row] for row in rows])
        return make_feed(
            Each([values[row] for row in rows]) if isinstance(data, Each) else data,
            names=[member.name for member in members],
            seeds=[member.seed for member in members],
            batch_size=batch_size,
            shuffle=shuffle,
            device=lanes[0].engine.device,
            arrays=self._framework.arrays,
            epochs_done=np.concatenate([lane.epochs for lane in lanes]),
            what=what,
        )

    def _check(self, lane: Lane, feed: Feed, data: Any, values: Sequence[Any]) -> list[str]:
        """Find all that can be wrong with data before the first step; gives the names of the sums it makes."""
        first = feed.first()
        own = isinstance(data, Each)
        pairs = {
            id(value): (name, value)
            for name, value in zip(self.names, values, strict=True)
            if name in lane.places and isinstance(value, tuple) and len(value) == 2
        }
        if pairs or isinstance(feed, LoaderFeed):
            shape = lane.engine.output_shape(first, lane.names[0])
            for name, (_, target) in pairs.values():
                lane.engine.check_targets(shape, target, name if own else None)
            if isinstance(feed, LoaderFeed):
                feed.check = lane.engine.label_check(shape)
                first = feed.first()  # again, now checked
        return lane.engine.check(first, lane.names[0])

    def _validation(self, lanes: Sequence[Lane], validation: Any, batch_size: Any) -> list[Feed | None]:
        """Every lane's feed of validation data, checked."""
        if validation is None:
            return [None for _ in lanes]
        values = spread(validation, self.names, "validation")
        # A loader has batches of its own size, whatever that of the training data is.
        size = None if is_loader(values[0], self._framework.arrays, "validation") else batch_size
        feeds: list[Feed | None] = []
        for lane, feed in self._feeds(lanes, validation, values, size, shuffle=False, what="validation"):
            self._check(lane, feed, validation, values)
            feeds.append(feed)
        return feeds

    def _shift(self, lane: Lane, feed: Feed, validation: Feed | None, epochs: np.ndarray) -> Shift:
        per_epoch = np.ones(len(lane.members), dtype=np.int64) if feed.steps is None else feed.steps
        schedules = self._framework.Schedules(
            lane.schedules, lane.columns, lane.engine.task.optimizer, per_epoch, epochs, names=lane.names
        )
        lane.engine.forgive()
        return Shift(lane, feed, validation, schedules, epochs, lane.steps.copy())

    def _described(self, lanes: Sequence[Lane], steps: Mapping[int, int | None] | None) -> Plan:
        return Plan(
            tuple(
                LanePlan(
                    members=tuple(lane.names),
                    device=str(self._device),
                    fused=lane.engine.programs.fused,
                    reason=_why(lane),
                    parameters=lane.engine.parameters,
                    state_bytes=lane.engine.bytes,
                    steps=None if steps is None else steps[id(lane)],
                    seconds_per_step=lane.seconds_per_step,
                    program=lane.engine.programs.description,
                )
                for lane in lanes
            )
        )

    # --- members -------------------------------------------------------------------------------------------------

    def _enlist(self, name: object, model: Any) -> str:
        text = check_name(name, self._members)
        if frameworks.adapter_of(model, text) is not self._framework:
            raise InputError(f"member {text!r} is of another framework than the others.")
        self._framework.check_model(model, text)
        twin = self._by_model.get(id(model))
        if twin is not None:
            raise InputError(
                f"members {twin!r} and {text!r} are one model object; each would undo the other's steps. "
                f"Give a copy (copy.deepcopy), or use clone."
            )
        self._members[text] = Member(text, model, member_seed(self.seed, text))
        self._by_model[id(model)] = text
        return text

    def _member(self, name: str) -> Member:
        if name not in self._members:
            raise unknown("member", name, self._members)
        return self._members[name]


def _why(lane: Lane) -> str:
    programs = lane.engine.programs
    together = f"{len(lane.members)} of one structure, fused" if programs.fused and len(lane.members) > 1 else ""
    parts = [together, lane.reason, programs.untraced and f"every step runs its Python: {programs.untraced}"]
    return "; ".join(part for part in parts if part) or "on its own"


def _listed(models: Any) -> list[Any]:
    if isinstance(models, str | bytes) or not isinstance(models, Iterable):
        raise InputError(
            f"models is a {type(models).__name__}; give a mapping from name to model, or a sequence of models."
        )
    return list(models)


def _epochs(epochs: Any, names: Sequence[str]) -> dict[str, int]:
    lengths = dict(zip(names, spread(epochs, names, "epochs"), strict=True))
    for name, value in lengths.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
            raise InputError(f"epochs of member {name!r} is {value!r}; expected a whole number, 0 or more.")
    return {name: int(value) for name, value in lengths.items()}


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    if strategy in ("threads", "processes"):
        raise StrategyError(
            f'strategy={strategy!r} is not built yet. Use "auto", "fused", or "interleaved", which takes turns.'
        )


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
    framework = frameworks.adapter("torch")
    models, seed, origins = saving.read(Path(folder), factory, allow_import, members, framework)
    fleet = Fleet(models, seed=seed, devices=devices)
    fleet._handed.clear()
    fleet._origins = origins
    return fleet
