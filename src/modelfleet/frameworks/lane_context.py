"""Context of a lane: everything that an engine is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from modelfleet.members import Member
from modelfleet.types import NativeDevice


class Task(Protocol):
    """Everything that the members of a lane have in common beside their structure. Equal tasks can be fused."""

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
    """Members of the lane, of one structure and task."""
    task: OwnTask
    """Task of the adapter that the members have in common."""
    columns: Mapping[str, np.ndarray]
    """Hyperparameters `(member,)` that are not part of the state."""
    device: NativeDevice
    """Device, as the adapter's `native` returned it."""
    fused: bool
    """True if a step should be one program for all members."""
    programs: OwnPrograms | None = None
    """`programs` of another engine of the same structure and task, so that nothing is traced again."""
