"""Engine of a lane of Keras members, on the backend that Keras has in this process."""

from importlib import import_module
from typing import Any

import keras

from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.keras.plain import PlainEngine
from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.lane_context import LaneContext

backend_module = import_module(f"modelfleet.frameworks.keras.{keras.backend.backend()}")


def leaves_models_alone(task: Task, programs: Any) -> bool:
    """Return True if lanes of these programs keep their state apart from the models until they are done."""
    if task.plain is not None or programs is None or programs.untraced is not None:
        return False
    return backend_module.apart(programs) is None


def make_engine(context: LaneContext[Task, Any]) -> Engine:
    """Return the engine of a lane: by the backend's programs, or for one member by the model's own functions."""
    return backend_module.Engine(context) if context.task.plain is None else PlainEngine(context)
