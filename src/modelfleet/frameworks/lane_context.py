"""Context of a lane: everything that an engine is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from modelfleet.members import Member
from modelfleet.types import NativeDevice


class Task(Protocol):
    """Everything beside its structure that decides how a member is trained. Equal tasks can be fused."""

    @property
    def summary(self) -> str:
        """Return the task as one line for checkpoints. A run can continue only with an equal summary."""
        ...

    @property
    def optimizer_name(self) -> str:
        """Return the name of the optimizer, for a plan."""
        ...


OwnTask = TypeVar("OwnTask", bound=Task, covariant=True)
OwnPrograms = TypeVar("OwnPrograms", covariant=True)


@dataclass(frozen=True, eq=False)
class LaneContext(Generic[OwnTask, OwnPrograms]):
    """Members of a lane, and how its engine should run them."""

    members: Sequence[Member]
    """Members of the lane, of one family: see `Adapter.family`."""
    tasks: Sequence[OwnTask]
    """Task of each member, made by the adapter. Members of one variant have the same object."""
    variants: Sequence[int]
    """Variant of each member, counted from 0: members of one variant have the same structure and task."""
    columns: Mapping[str, np.ndarray]
    """Hyperparameters `(member,)` that are not part of the state."""
    device: NativeDevice
    """Device, as the adapter's `native` returned it."""
    fused: bool
    """True if a step should be one program for all members."""
    programs: OwnPrograms | None = None
    """`programs` of another engine of the same variants, so that nothing is traced again."""

    @property
    def task(self) -> OwnTask:
        """Return the task of the first member."""
        return self.tasks[0]

    @property
    def firsts(self) -> list[int]:
        """Return the position of the first member of each variant."""
        return [self.variants.index(number) for number in range(max(self.variants) + 1)]


def alike(
    members: Sequence[Member],
    task: OwnTask,
    columns: Mapping[str, np.ndarray],
    device: NativeDevice,
    *,
    fused: bool,
    programs: OwnPrograms | None = None,
) -> LaneContext[OwnTask, OwnPrograms]:
    """Return the context of members of one structure and task."""
    count = len(members)
    return LaneContext(members, [task] * count, [0] * count, columns, device, fused, programs)
