"""Engine of a lane of Keras members, on the backend that Keras has in this process."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import keras
import numpy as np

from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.keras.plain import PlainEngine
from modelfleet.frameworks.keras.task import Task
from modelfleet.members import Member
from modelfleet.types import NativeDevice

backend_module = import_module(f"modelfleet.frameworks.keras.{keras.backend.backend()}")


def make_engine(
    members: Sequence[Member],
    task: Task,
    columns: Mapping[str, np.ndarray],
    device: NativeDevice,
    *,
    fused: bool,
    programs: Any = None,
) -> Engine:
    """Return the engine of a lane: by the backend's programs, or for one member by the model's own functions."""
    if task.plain is not None:
        return PlainEngine(members, task, device)
    return backend_module.Engine(members, task, columns, device, fused=fused, programs=programs)
