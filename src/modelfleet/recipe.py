"""What `fleet.compile` was told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a fleet's members are to be trained. Every hyperparameter is one value, or `each`."""

    optimizer: Any
    loss: Any = None
    objective: Callable[[Any, Any], Any] | None = None
    metrics: Sequence[Any] = ()
    clip_norm: Any = None
    precision: str = "float32"
    schedule: Any = None
    hyperparameters: Mapping[str, Any] | None = None
