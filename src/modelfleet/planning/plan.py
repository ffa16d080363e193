"""The plan: what will run where, and why. A frozen value that prints as a table."""

from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from modelfleet.words import count, size, some


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
    steps: int | None = None
    """Steps that the longest-training member will take."""
    seconds_per_step: float | None = None
    """As measured in the last run."""
    program: str = "not traced yet"
    """How the steps run: traced, compiled, or as plain Python."""


@dataclass(frozen=True)
class Plan:
    """Lanes, their sharing of the device and their placement."""

    lanes: tuple[LanePlan, ...]
    sharing: str = "interleaved"

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

        members = sum(len(lane.members) for lane in self.lanes)
        title = f"{count(members, 'member')} in {count(len(self.lanes), 'lane')}"
        if len(self.lanes) > 1:
            title += f", {self.sharing}"
        table = Table(title=title, title_justify="left", expand=False)
        for column in ("lane", "members", "device", "parameters", "memory", "steps", "program", "why"):
            table.add_column(column, overflow="fold")
        for number, lane in enumerate(self.lanes):
            table.add_row(
                str(number),
                escape(some(lane.members)),
                lane.device,
                f"{len(lane.members)} × {lane.parameters:,}",
                size(lane.state_bytes),
                _steps(lane),
                escape(lane.program),
                escape(lane.reason),
            )
        return table


def _steps(lane: LanePlan) -> str:
    if lane.steps is None:
        return "–"
    if lane.seconds_per_step is None:
        return f"{lane.steps:,}"
    return f"{lane.steps:,} of {1000 * lane.seconds_per_step:.3g} ms"
