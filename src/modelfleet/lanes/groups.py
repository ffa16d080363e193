"""Groups: which members may be fused, and what keeps the others apart."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from modelfleet.devices import Device
from modelfleet.errors import InputError
from modelfleet.frameworks.adapter_protocol import Adapter, Prepared, Task
from modelfleet.frameworks.errors import NotCompiledError
from modelfleet.lanes.device_pool import DevicePool
from modelfleet.lanes.spec import LaneSpec
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind, Model, ScheduleLike, Signature


@dataclass(frozen=True)
class MemberTask:
    """One member with everything that its lane needs to know about it."""

    member: Member
    signature: Signature
    task: Task
    hyperparameters: dict[str, float]
    schedule: ScheduleLike


@dataclass(frozen=True)
class Group:
    """Members that may be fused, and what keeps them apart from the first group."""

    members: tuple[str, ...]
    apart_because: str | None


def group(tasks: Mapping[str, MemberTask]) -> list[Group]:
    """Put members of one family together, in the order of their first members. Variants stay together within."""
    found: dict[Hashable, list[str]] = {}
    for name, own in tasks.items():
        found.setdefault(_family(own), []).append(name)
    groups = []
    for names in found.values():
        reason = _why_apart(names[0], tasks) if groups else None
        plain = getattr(tasks[names[0]].task, "plain", None)
        if plain is not None:
            reason = f"{names[0]!r} runs on its own: {plain}"
        variants = by_variant(tasks, names)
        groups.append(Group(tuple(name for own in variants for name in own), reason))
    return groups


def by_variant(tasks: Mapping[str, MemberTask], names: Sequence[str]) -> list[list[str]]:
    """Return members by variant. Those of one task are next to each other, and so are those of one optimizer."""
    found: dict[str, dict[int, dict[Signature, list[str]]]] = {}
    for name in names:
        own = tasks[name]
        by_task = found.setdefault(own.task.optimizer_name, {}).setdefault(id(own.task), {})
        by_task.setdefault(own.signature, []).append(name)
    return [
        variant for by_task in found.values() for variants in by_task.values() for variant in variants.values()
    ]


def _family(own: MemberTask) -> Hashable:
    framework = own.member.framework
    family = getattr(framework, "family", None)
    key = (own.signature, id(own.task)) if family is None else family(own.signature, own.task)
    return id(framework), key


def _why_apart(name: str, tasks: Mapping[str, MemberTask]) -> str:
    """Return what keeps a member apart from the first one."""
    first = next(iter(tasks))
    own, other = tasks[name], tasks[first]
    framework = own.member.framework
    if framework is not other.member.framework:
        return f"{name!r} is a {framework.NAME} model, {first!r} a {other.member.framework.NAME} model"
    what = framework.difference(own.signature, other.signature) or _other_task(own.task, other.task)
    return f"{name!r} differs from {first!r}: {what}"


def _other_task(task: Task, other: Task) -> str:
    own, others = task.optimizer_name, other.optimizer_name
    if own != others:
        return f"its optimizer is {own}, not {others}"
    return "it was compiled with other settings"


class Groups:
    """A fleet's members with their tasks, in groups that may be fused.

    Raises:
        InputError: A recipe does not fit a member, or the members are to be trained and have no recipe.
    """

    def __init__(
        self, pool: DevicePool, members: Sequence[Member], recipes: Mapping[str, Recipe | None], kind: Kind
    ) -> None:
        self.pool = pool
        self.kind = kind
        self.tasks: dict[str, MemberTask] = {}
        self.specs: list[LaneSpec] = []
        """One fused lane for each group, not placed yet."""
        self.epochs: dict[str, int] = {}
        """Epochs that each member has finished, as far as its lanes have reported them."""
        self._trainable = False
        usable = {member.name: _usable(recipes.get(member.name), member.name, kind) for member in members}
        for framework, recipe, own in _by_recipe(members, usable):
            self._prepare(framework, recipe, own)
        for found in group(self.tasks):
            self.specs.append(LaneSpec(found.members, True, found.apart_because))

    def _prepare(self, framework: Adapter, recipe: Recipe | None, members: Sequence[Member]) -> None:
        prepared = _prepare(framework, recipe, members, self.kind)
        models = [member.model for member in members]
        signatures = _signatures(framework, models)
        for position, member in enumerate(members):
            self.tasks[member.name] = MemberTask(
                member,
                signatures[position],
                prepared.tasks[position],
                {key: own for key, column in prepared.columns.items() if not np.isnan(own := column[position])},
                prepared.schedules[position],
            )

    def variants(self, spec: LaneSpec) -> list[list[str]]:
        """Return a lane's members by variant: those of one variant have the same structure and task."""
        return by_variant(self.tasks, spec.members)

    def drop(self, name: str) -> bool:
        """Take a member out, and return True. The first member of a group stays, since reasons name it: False."""
        for number, spec in enumerate(self.specs):
            if name in spec.members[1:]:
                self.specs[number] = replace(spec, members=tuple(own for own in spec.members if own != name))
                del self.tasks[name]
                self.epochs.pop(name, None)
                return True
        return False

    def refuse_shared_parameters(self) -> None:
        """Raise InputError if two members train the same parameter. Members that only read it may share it."""
        if self._trainable:
            return
        members = [task.member for task in self.tasks.values()]
        for framework in {id(member.framework): member.framework for member in members}.values():
            own = [member for member in members if member.framework is framework]
            twice = framework.trained_twice([member.model for member in own])
            if twice is not None:
                first, second, parameter = twice
                raise InputError(
                    f"members {own[first].name!r} and {own[second].name!r} share the trained parameter "
                    f"{parameter!r}: one would undo the other's steps. Freeze it (requires_grad=False), or give "
                    f"each its own copy."
                )
        self._trainable = True

    def framework(self, spec: LaneSpec) -> Adapter:
        """Return the framework of a lane's members."""
        return self.tasks[spec.members[0]].member.framework

    def devices(self, spec: LaneSpec) -> tuple[Device, ...]:
        """Return the devices that a lane may run on."""
        return self.pool.of(self.framework(spec))

    @property
    def several_devices(self) -> bool:
        """Return True if the lanes have to be placed: on several devices, or on a cluster."""
        return bool(self.pool.places) or len({d for spec in self.specs for d in self.devices(spec)}) > 1

    def apart(self, reason: str) -> list[LaneSpec]:
        """Return a lane of one for every member, with the reason for that."""
        return [
            LaneSpec((name,), False, spec.apart_because or reason) for spec in self.specs for name in spec.members
        ]

    def on_first_device(self, specs: Sequence[LaneSpec]) -> list[LaneSpec]:
        """Return the specs. Those without a device get the first one that they may run on."""
        return [replace(s, device=str(self.devices(s)[0])) if s.device is None else s for s in specs]


def _usable(recipe: Recipe | None, name: str, kind: Kind) -> Recipe | None:
    """Return the recipe of a member. To predict, a member that joined after `compile` needs none.

    Raises:
        InputError: The recipe has no value for the member.
    """
    lacking = [] if recipe is None or recipe.missing else recipe.lacking(name)
    if lacking and kind != "predict":
        raise InputError(
            f"{lacking[0]}: each(...) has no value for {name!r}, which joined after compile. Give it its own: "
            f"fleet.compile(..., members=[{name!r}])."
        )
    return None if lacking else recipe


def _signatures(framework: Adapter, models: Sequence[Model]) -> Sequence[Signature]:
    find = getattr(framework, "signatures", None)
    return [framework.signature(model) for model in models] if find is None else find(models)


def _prepare(framework: Adapter, recipe: Recipe | None, members: Sequence[Member], kind: Kind) -> Prepared:
    """Return the tasks of members. An incomplete recipe of a saved fleet counts as none."""
    if recipe is None or not recipe.missing:
        return framework.prepare(recipe and recipe.only([member.name for member in members]), members, kind)
    try:
        return framework.prepare(None, members, kind)
    except NotCompiledError as error:
        lost = "; ".join(f"its {name} {missing.reason}" for name, missing in recipe.missing.items())
        raise NotCompiledError(
            f"call compile before {kind if kind == 'evaluate' else 'fit'}: the folder that member "
            f"{members[0].name!r} was loaded from has only a part of its recipe: {lost}. If the optimizer is the "
            f"same, the member continues with the saved optimizer state."
        ) from error


def _by_recipe(
    members: Sequence[Member], recipes: Mapping[str, Recipe | None]
) -> Iterator[tuple[Adapter, Recipe | None, list[Member]]]:
    """Yield the members of each framework and recipe together, in the order of their first members."""
    found: dict[tuple[int, int], tuple[Adapter, Recipe | None, list[Member]]] = {}
    for member in members:
        recipe = recipes.get(member.name)
        key = id(member.framework), id(recipe)
        found.setdefault(key, (member.framework, recipe, []))[2].append(member)
    yield from found.values()
