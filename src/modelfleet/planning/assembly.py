"""From members and their recipes to lanes: who is fused with whom, and who can't be."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from modelfleet.devices import Device
from modelfleet.errors import FleetWarning, InputError, StrategyError
from modelfleet.feeds import Feed
from modelfleet.frameworks.protocol import CannotFuseError
from modelfleet.lanes import Lane
from modelfleet.members import Member
from modelfleet.planning.groups import group
from modelfleet.recipe import Recipe
from modelfleet.words import without_period
from modelfleet.workers import Place, places

HOST = Device("cpu")


@dataclass(frozen=True)
class Part:
    """Members of one group that make a lane, and how they run in it."""

    names: tuple[str, ...]
    fused: bool
    reason: str | None = None
    """What keeps them apart from others, if anything does."""
    wave: int = 0
    """Lanes of a later wave begin when those of the earlier ones are done: for want of memory."""
    device: Device | None = None
    """Where it runs; None: on the only device there is."""
    split: tuple[int, int] | None = None
    """Of a group that is split: how many members it has, and over how many devices."""


@dataclass
class Assembly:
    """Makes the lanes of a fleet.

    `programs` remembers the programs of every structure and task met so far, so that another set of lanes of the
    same structure traces and compiles nothing anew.
    """

    devices: tuple[Device, ...] | None
    programs: list[tuple[Any, Any, bool, Any, Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """Of a cluster, as it was when it was last looked at."""

    @property
    def clustered(self) -> bool:
        """Whether the devices are those of a cluster: named, or because this process is connected to one."""
        if self.devices is not None:
            return any(device.kind == "ray" for device in self.devices)
        cluster = sys.modules.get("modelfleet.workers.ray")
        return cluster is not None and cluster.connected()

    def look(self) -> bool:
        """See which devices the cluster has now, if there is one; gives whether they are others than before."""
        before = [place.name for place in self.places]
        self.places = places.on_cluster(self.devices) or []
        return [place.name for place in self.places] != before

    def chosen(self, framework: Any) -> tuple[Device, ...]:
        """The devices that a framework's members may run on."""
        if self.places:
            return tuple(Device("ray", int(place.name.partition(":")[2])) for place in self.places)
        return framework.choose(self.devices)

    def all_chosen(self, members: Sequence[Member]) -> tuple[Device, ...]:
        """The devices that any of the members may run on."""
        frameworks = {id(member.framework): member.framework for member in members}
        return tuple(dict.fromkeys(d for framework in frameworks.values() for d in self.chosen(framework)))

    def named(self, members: Sequence[Member]) -> list[str]:
        """The devices as people name them, without a look at a cluster."""
        if self.clustered:
            return [str(device) for device in self.devices or (Device("ray"),)]
        return [str(device) for device in self.all_chosen(members)]

    def study(self, members: Sequence[Member], recipes: Mapping[str, Recipe | None], kind: str) -> "Studied":
        """What the members are and what they are to do; raises `InputError` for what can't be."""
        return Studied(self, members, recipes, kind)

    def lane(self, studied: "Studied", part: Part, *, scratch: bool = False) -> Lane:
        """Return the lane of a part. A scratch lane, for trials, steps a copy of a member that is on its own."""
        own = [studied.rows[name] for name in part.names]
        framework = own[0].member.framework
        columns = {key: np.array([row.columns[key] for row in own]) for key in own[0].columns}
        signature, task = own[0].signature, own[0].task
        device = part.device or self.chosen(framework)[0]
        # What is trained on a cluster has a stand-in here, which holds its last state; it evaluates and predicts.
        native = framework.native(HOST if device.kind == "ray" else device)
        known = (signature, task, part.fused, native)
        programs = next((p for *key, p in self.programs if tuple(key) == known), None)
        members = [row.member for row in own]
        if scratch and len(members) == 1:
            members = [_copied(member) for member in members]
        engine = framework.Engine(members, task, columns, native, fused=part.fused, programs=programs)
        if programs is None and engine.programs is not None:
            self.programs.append((*known, engine.programs))
        schedules = [row.schedule for row in own]
        lane = Lane(members, engine, signature, columns, schedules, part, str(device))
        lane.epochs[:] = [studied.epochs.get(name, 0) for name in part.names]  # feeds shuffle by them at once
        return lane


def _copied(member: Member) -> Member:
    try:
        return replace(member, model=member.framework.copy_model(member.model))
    except Exception as error:  # whatever a model's attributes may hold
        raise CannotFuseError(f"member {member.name!r} can't be copied for a trial: {error}") from error


@dataclass(frozen=True)
class _Row:
    """One member as studied."""

    member: Member
    signature: Any
    task: Any
    columns: dict[str, Any]
    schedule: Any


class Studied:
    """The members of a fleet with their tasks, in groups."""

    def __init__(
        self, assembly: Assembly, members: Sequence[Member], recipes: Mapping[str, Recipe | None], kind: str
    ) -> None:
        self.assembly = assembly
        self.rows: dict[str, _Row] = {}
        self.groups: list[Part] = []
        self.epochs: dict[str, int] = {}
        """By member: the epochs that it has finished, once lanes have told."""
        first = members[0].name
        for framework, recipe, own in _by_recipe(members, recipes):
            names = [member.name for member in own]
            prepared = framework.prepare(recipe and recipe.only(names), own, kind)
            for position, member in enumerate(own):
                columns = {key: column[position] for key, column in prepared.columns.items()}
                self.rows[member.name] = _Row(
                    member,
                    framework.signature(member.model),
                    prepared.tasks[position],
                    columns,
                    prepared.schedules[position],
                )
            signatures = [self.rows[name].signature for name in names]
            for found in group(names, signatures, prepared.tasks, framework.difference):
                reason = found.reason
                if reason is None and self.groups:
                    reason = self._unlike(names[found.positions[0]], first)
                self.groups.append(Part(tuple(names[position] for position in found.positions), True, reason))

    def refuse_shared_parameters(self) -> None:
        """Raise `InputError` if members share a parameter that is trained. Those who only read may."""
        members = [row.member for row in self.rows.values()]
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

    def _unlike(self, name: str, first: str) -> str:
        own, other = self.rows[name], self.rows[first]
        framework = own.member.framework
        if framework is not other.member.framework:
            return f"{name!r} is of {framework.NAME}, {first!r} of {other.member.framework.NAME}"
        what = framework.difference(own.signature, other.signature)
        return f"{name!r} is unlike {first!r}: {what or 'it was compiled otherwise'}"

    def devices(self, part: Part) -> tuple[Device, ...]:
        """Where a part may run."""
        return self.assembly.chosen(self.rows[part.names[0]].member.framework)

    @property
    def scattered(self) -> bool:
        """Whether there are several devices, or those of a cluster: then every part has its place."""
        return bool(self.assembly.places) or len({d for part in self.groups for d in self.devices(part)}) > 1

    def apart(self, reason: str) -> list[Part]:
        """Every member in a lane of its own, taking turns, for a reason."""
        return [Part((name,), False, found.reason or reason) for found in self.groups for name in found.names]


def _by_recipe(
    members: Sequence[Member], recipes: Mapping[str, Recipe | None]
) -> Iterator[tuple[Any, Recipe | None, list[Member]]]:
    """The members of one framework and one recipe together, in the order of their first members."""
    found: dict[tuple[int, int], tuple[Any, Recipe | None, list[Member]]] = {}
    for member in members:
        recipe = recipes.get(member.name)
        key = id(member.framework), id(recipe)
        found.setdefault(key, (member.framework, recipe, []))[2].append(member)
    yield from found.values()


def refuse_unfused(parts: Sequence[Part]) -> None:
    """Raise `StrategyError` if the groups are not one: for those who insist on fusing."""
    for part in parts:
        if part.reason is not None:
            raise StrategyError(
                f"not all members can be fused: {part.reason}. "
                f'Make them alike, or drop strategy="fused" and let them take turns.'
            )


def refuse_here(strategy: str) -> None:
    """Raise `StrategyError` for what can't be on a cluster, whose lanes are always stepped by actors."""
    if strategy not in ("auto", "processes", "data_parallel"):
        raise StrategyError(
            f'strategy="{strategy}" is for the devices of this machine, and the fleet is on a Ray cluster. '
            f'Use "auto" or "processes" there.'
        )


def refuse_undivided(members: Sequence[Member], devices: Sequence[Device]) -> None:
    """Raise `StrategyError` if members can't be spread over devices, whatever their models are."""
    if len(devices) < 2:
        raise StrategyError(
            f'strategy="data_parallel" spreads each member over several devices, and there is only '
            f'{", ".join(map(str, devices))}. Name more, as in devices="cuda:0,cuda:1".'
        )
    for member in members:
        if not hasattr(member.framework, "Group"):
            raise StrategyError(
                f'strategy="data_parallel" is for torch models, and member {member.name!r} is of '
                f"{member.framework.NAME}. Let whole members share the devices: leave the strategy out."
            )


def refuse_indivisible(lanes: Sequence[tuple[Lane, Feed]]) -> None:
    """Raise `StrategyError` for a lane whose members need all rows of a batch at once."""
    for lane, feed in lanes:
        batch = feed.first()
        reason = lane.engine.indivisible(batch.data, shared=batch.shared)
        if reason is not None:
            raise StrategyError(f'strategy="data_parallel" can\'t be had for member {lane.names[0]!r}: {reason}.')


def settle(
    studied: Studied, lanes: Sequence[tuple[Lane, Feed]], kind: str, strategy: str
) -> list[tuple[Lane, Feed]]:
    """Make sure that every lane can take its steps: trace them, and part members that can't be fused."""
    settled: list[tuple[Lane, Feed]] = []
    for lane, feed in lanes:
        try:
            lane.ready(feed.first(), kind)
            settled.append((lane, feed))
        except CannotFuseError as error:
            if strategy == "fused":
                raise StrategyError(
                    f"member {lane.names[0]!r} and those like it can't be fused: {without_period(error)}. "
                    f'Drop strategy="fused" and let them take turns.'
                ) from error
            if error.shared and kind == "train":
                warnings.warn(
                    f"members {lane.names[0]!r} and {lane.names[1]!r} take turns and share what they change: "
                    f"{without_period(error)}. "
                    f"Their numbers depend on each other. Give each its own loss or objective, by "
                    f"compile(..., members=[name]), or its own copy of what is shared.",
                    FleetWarning,
                    stacklevel=2,
                )
            for position, name in enumerate(lane.names):
                part = replace(lane.part, names=(name,), fused=False, reason=f"not fused: {error}", split=None)
                single = studied.assembly.lane(studied, part)
                own = feed.select([position])
                if kind != "predict":
                    single.engine.check(own.first(), name)
                single.ready(own.first(), kind)
                settled.append((single, own))
    return settled
