"""State of a lane whose steps a worker takes, and how many workers may be lost."""

from dataclasses import dataclass, field

from modelfleet.types import State
from modelfleet.workers.supervisor import Policy, RestartBudget

WORKER_POLICY = Policy(
    start_timeout=300.0, patience=10.0, max_failed_starts=3, max_failed_restarts=3, max_deaths=2
)
"""Decides when a lane's worker is given up, and how many workers may be lost before the lane's members fail."""


@dataclass
class RemoteState:
    """State of a lane while a worker takes its steps, as the worker reported it last."""

    state: State | None = None
    """Everything, on the host. None if the lane in this process holds it."""
    changed: bool = False
    """True if the lane in this process was changed, and the worker does not know it yet."""
    stopped: list[str] = field(default_factory=list)
    """Members that were stopped, and the worker does not know it yet."""
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(WORKER_POLICY))
    """Counts the workers that were lost since the lane's last epoch ended."""
