"""Engines of lanes of torch members."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from modelfleet.frameworks.torch.base import TorchEngine
from modelfleet.frameworks.torch.fused import FusedEngine
from modelfleet.frameworks.torch.plain import PlainEngine
from modelfleet.frameworks.torch.programs import Programs
from modelfleet.frameworks.torch.task import Task
from modelfleet.members import Member


def make_engine(
    members: Sequence[Member],
    task: Task,
    columns: Mapping[str, np.ndarray],
    device: torch.device,
    *,
    fused: bool,
    programs: Programs | None = None,
) -> TorchEngine:
    """Return the engine for a lane: plain for one member, fused for several."""
    if len(members) == 1:
        return PlainEngine(members, task, columns, device)
    return FusedEngine(members, task, columns, device, fused=fused, programs=programs)
