"""Which engine a lane of torch members has."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from modelfleet.frameworks.torch.base import TorchEngine
from modelfleet.frameworks.torch.engine import Engine
from modelfleet.frameworks.torch.plain import PlainEngine
from modelfleet.frameworks.torch.programs import Programs
from modelfleet.frameworks.torch.task import Task
from modelfleet.members import Member


def engine(
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
    return Engine(members, task, columns, device, fused=fused, programs=programs)
