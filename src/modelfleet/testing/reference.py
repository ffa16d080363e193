"""Parts that the reference loops of all frameworks share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from modelfleet.shuffles import permutations
from modelfleet.types import LossLike, Model, OptimizerLike, Precision, ScheduleLike, Tree


@dataclass(frozen=True)
class Training:
    """Training of one member: the arguments of `modelfleet.testing.alone`."""

    name: str
    """Name of the member, for errors."""
    optimizer: OptimizerLike
    loss: LossLike
    objective: Callable[[Model, Tree], Any] | None
    seed: int
    """Seed of the member itself."""
    epochs: int
    batch_size: int
    shuffle: bool
    clip_norm: float | None
    precision: Precision
    schedule: ScheduleLike
    schedule_per: Literal["epoch", "step"]
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def rows(self, count: int, epoch: int) -> Iterator[np.ndarray]:
        """Yield the row numbers of each batch of an epoch, in the order in which a fleet takes them."""
        order = np.arange(count)
        if self.shuffle:
            order = permutations(np.array([self.seed]), epoch, np.array([count]))[0]
        for start in range(0, count, self.batch_size):
            yield order[start : start + self.batch_size]
