"""The plan: what will run where, and why. A frozen value that prints as a table."""

from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from modelfleet.words import count, duration, size, some


@dataclass(frozen=True)
class LanePlan:
    """One lane: its members, where it runs, and why it is as it is."""

    members: tuple[str, ...]
    device: str
    fused: bool
    reason: str
    parameters: int
    """Trained numbers per member."""
    state_bytes: int
    """What the weights and the optimizer's state take on the device."""
    working_bytes: int | None = None
    """What a step takes on the device beside the state, where it is known."""
    wave: int = 0
    """Lanes of a later wave begin when those of the earlier ones are done: for want of memory."""
    steps: int | None = None
    """Steps that the longest-training member will take."""
    predicted_seconds_per_step: float | None = None
    """By a trial, or by an earlier run."""
    seconds_per_step: float | None = None
    """As it was in the last run."""
    program: str = "not traced yet"
    """How the steps run: traced, compiled, or as plain Python."""


@dataclass(frozen=True)
class Plan:
    """Lanes, their sharing of the device and their placement."""

    lanes: tuple[LanePlan, ...]
    sharing: str = "interleaved"
    predicted_seconds: float | None = None
    """For all epochs of all members."""
    seconds_per_epoch: float | None = None
    """As it was in the last run."""
    measuring_seconds: float = 0.0
    """What was spent on finding this plan."""

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's terms."""
        return asdict(self)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), width=110, force_terminal=False)
        console.print(self.__rich__())
        file = console.file
        assert isinstance(file, StringIO)
        return file.getvalue().rstrip()

    def __rich__(self) -> Any:
        """The plan as a table."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=self._title(), caption=self._caption(), title_justify="left", caption_justify="left")
        for column in ("lane", "members", "device", "parameters", "memory", "steps", "program"):
            table.add_column(column, overflow="fold")
        table.add_column("why", min_width=30)
        for number, lane in enumerate(self.lanes):
            table.add_row(
                f"{number}" if not lane.wave else f"{number}, wave {lane.wave + 1}",
                escape(some(lane.members)),
                lane.device,
                f"{len(lane.members)} × {lane.parameters:,}",
                _memory(lane),
                _steps(lane),
                escape(lane.program),
                escape(lane.reason),
            )
        return table

    def _title(self) -> str:
        members = sum(len(lane.members) for lane in self.lanes)
        title = f"{count(members, 'member')} in {count(len(self.lanes), 'lane')}"
        if len(self.lanes) > 1:
            title += f", {self.sharing}"
        return title

    def _caption(self) -> str | None:
        parts = []
        if self.predicted_seconds is not None:
            parts.append(f"predicted {duration(self.predicted_seconds)}")
        if self.seconds_per_epoch is not None:
            parts.append(f"the last run took {duration(self.seconds_per_epoch)} an epoch")
        if self.measuring_seconds >= 0.01:
            parts.append(f"measuring took {duration(self.measuring_seconds)}")
        return "; ".join(parts) or None


def _memory(lane: LanePlan) -> str:
    if lane.working_bytes is None:
        return size(lane.state_bytes)
    return f"{size(lane.state_bytes)}\n+ {size(lane.working_bytes)}"


def _steps(lane: LanePlan) -> str:
    if lane.steps is None:
        return "–"
    lines = [f"{lane.steps:,}"]
    if lane.predicted_seconds_per_step is not None:
        lines.append(f"of ≈ {_ms(lane.predicted_seconds_per_step)}")
    if lane.seconds_per_step is not None:
        lines.append(f"took {_ms(lane.seconds_per_step)}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
