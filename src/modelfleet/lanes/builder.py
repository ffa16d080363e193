"""Building lanes: from a specification and the members to a live lane on its device."""

from dataclasses import replace

import numpy as np

from modelfleet.devices import Device, parse_devices
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.lanes.groups import Groups
from modelfleet.lanes.lane import Lane
from modelfleet.lanes.spec import LaneSpec
from modelfleet.members import Member

HOST = Device("cpu")


class LaneBuilder:
    """Builds lanes, and remembers the programs of every combination of variants.

    So another lane of the same variants traces and compiles nothing again.
    """

    def __init__(self) -> None:
        self._programs: list[tuple[tuple[object, ...], object]] = []

    def build(self, groups: Groups, spec: LaneSpec, *, scratch: bool = False) -> Lane:
        """Return a new lane.

        Args:
            groups: The members of the fleet.
            spec: The lane to build. If it has no device yet, it gets the first one that it may run on.
            scratch: For a trial: a lane of one member steps a copy of the member's model, if it steps a model.
        """
        own = [groups.tasks[name] for name in spec.members]
        framework = own[0].member.framework
        (spec,) = groups.on_first_device([spec])
        assert spec.device is not None
        # A lane that is trained on a cluster has a stand-in here: it holds the last state, evaluates and predicts.
        (device,) = parse_devices(spec.device) or (HOST,)
        native = framework.native(HOST if device.kind == "ray" else device)
        keys = {key: None for task in own for key in task.hyperparameters}
        hyperparameters = {key: np.array([task.hyperparameters.get(key, np.nan) for task in own]) for key in keys}
        members = [task.member for task in own]
        # Tasks compare by identity, and a signature may be costly to hash: so a list, not a dict.
        variants = groups.variants(spec)
        firsts = [groups.tasks[names[0]] for names in variants]
        known = [(first.signature, first.task) for first in firsts], spec.fused, native
        programs = next((programs for key, programs in self._programs if key == known), None)
        leaves_alone = getattr(framework, "leaves_models_alone", lambda task, programs: False)
        if scratch and len(members) == 1 and not leaves_alone(own[0].task, programs):
            members = [_copy(member) for member in members]
        number = {name: number for number, names in enumerate(variants) for name in names}
        context = LaneContext(
            members,
            [task.task for task in own],
            [number[name] for name in spec.members],
            hyperparameters,
            native,
            spec.fused,
            programs,
        )
        engine = framework.make_engine(context)
        if programs is None and engine.programs is not None:
            self._programs.append((known, engine.programs))
        schedules = [task.schedule for task in own]
        lane = Lane(members, engine, own[0].signature, context.tasks, hyperparameters, schedules, spec)
        lane.epochs[:] = [groups.epochs.get(name, 0) for name in spec.members]  # shuffles depend on them
        return lane


def _copy(member: Member) -> Member:
    try:
        return replace(member, model=member.framework.copy_model(member.model))
    except Exception as error:  # whatever a model's attributes may hold
        raise CannotFuseError(f"member {member.name!r} can't be copied for a trial: {error}") from error
