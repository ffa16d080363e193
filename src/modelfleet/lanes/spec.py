"""Specifications of lanes: plain data that a plan holds, a checkpoint stores, and a builder builds from."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaneSpec:
    """One lane of a plan: its members, how and where they run, and why.

    Two specs are equal if they describe the same lane. The fields below `split` describe a lane that was built or
    measured; they take no part in the comparison.
    """

    members: tuple[str, ...]
    fused: bool
    """True if one program steps all members."""
    apart_because: str | None = None
    """Reason why these members are not in one lane with others. None if nothing keeps them apart."""
    wave: int = 0
    """Lanes of a later wave start when the earlier waves are done, because all of them do not fit into memory."""
    device: str | None = None
    """Device of the lane. None until it is placed."""
    split: tuple[int, int] | None = None
    """For a piece of a group that is split over devices: the group's size, and the number of devices."""
    reason: str = field(default="", compare=False)
    """All reasons why the lane is as it is, in words."""
    parameters: int = field(default=0, compare=False)
    """Number of trained parameters per member, or of the widest one."""
    state_bytes: int = field(default=0, compare=False)
    """Size of the weights and the optimizer's state on the device."""
    working_bytes: int | None = field(default=None, compare=False)
    """Memory that a step takes beside the state, if it is known."""
    steps: int | None = field(default=None, compare=False)
    """Steps of the member that trains longest."""
    predicted_seconds_per_step: float | None = field(default=None, compare=False)
    """Time of a step, from a trial or an earlier run."""
    seconds_per_step: float | None = field(default=None, compare=False)
    """Time of a step in the last run."""
    program: str = field(default="not traced yet", compare=False)
    """Way in which the steps run: traced, compiled, or as plain Python."""

    @property
    def width(self) -> int:
        """Return the number of members."""
        return len(self.members)

    @property
    def key(self) -> tuple[tuple[str, ...], bool, str | None]:
        """Return everything that a built lane depends on. A lane with an equal key can be used again."""
        return self.members, self.fused, self.device


def join_reasons(*reasons: str | None) -> str:
    """Return the given reasons as one text."""
    return "; ".join(reason for reason in reasons if reason)
