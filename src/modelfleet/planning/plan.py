"""Plans: which lanes there are, where they run, and how they share their devices. A plan is plain data."""

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from modelfleet.lanes import LaneSpec
from modelfleet.types import Json, SharingName

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class Plan:
    """A frozen description of a run: the one that `fit` executes, `print` shows, and a checkpoint stores.

    Two plans are equal if they run the same lanes in the same way, whatever times were measured.

    Example:
        >>> plan = fleet.plan((x, y), epochs=10)
        >>> print(plan)
        >>> [lane.members for lane in plan.lanes]
    """

    lanes: tuple[LaneSpec, ...]
    sharing: SharingName = "interleaved"
    """Way in which the lanes share their devices."""
    note: str = field(default="", compare=False)
    """What the sharing costs on these devices, if that is worth knowing."""
    predicted_seconds: float | None = field(default=None, compare=False)
    """Predicted time for all epochs of all members."""
    seconds_per_epoch: float | None = field(default=None, compare=False)
    """Time of an epoch in the last run."""
    measuring_seconds: float = field(default=0.0, compare=False)
    """Time that measuring took."""

    def to_dict(self) -> dict[str, Json]:
        """Return the plan as values that JSON can hold."""
        return asdict(self)

    def in_this_process(self) -> "Plan":
        """Return the same lanes with a sharing that runs them in this process."""
        if self.sharing != "processes":
            return self
        several = len({lane.device for lane in self.lanes}) > 1
        return replace(self, sharing="threads" if several else "interleaved")

    def __str__(self) -> str:
        from modelfleet.planning.printing import as_text

        return as_text(self)

    __repr__ = __str__

    def __rich__(self) -> "RenderableType":
        """Return the plan for a rich console."""
        from modelfleet.planning.printing import as_renderable

        return as_renderable(self)
