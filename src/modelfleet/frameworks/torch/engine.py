"""Engines of lanes of torch members."""

from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.torch.base import TorchEngine
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.fused.programs import Programs
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.plain.engine import PlainEngine
from modelfleet.frameworks.torch.task import Task


def make_engine(context: LaneContext[Task, Programs[Steps]]) -> TorchEngine:
    """Return the engine for a lane: plain for one member, fused for several."""
    return PlainEngine(context) if len(context.members) == 1 else FusedEngine(context)
