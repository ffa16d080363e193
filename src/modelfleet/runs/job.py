"""Jobs: what `fit`, `evaluate` or `predict` was asked to do."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from modelfleet.each import Each, per_member, refuse_list
from modelfleet.errors import InputError
from modelfleet.types import Data


@dataclass(frozen=True)
class Job:
    """The arguments of a verb. Every value may be one for all members, or `each`."""

    names: tuple[str, ...]
    data: Data
    validation: Data = None
    epochs: int | Each = 1
    batch_size: int | Each | None = None
    shuffle: bool = True
    share: int | Each | None = None
    steps_per_epoch: int | None = None
    class_weight: dict[int, float] | None = None
    _by_name: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def by_name(self, name: str) -> dict[str, Any]:
        """Return every member's own value of a field. Thousands of lanes ask for it."""
        if name not in self._by_name:
            values = per_member(getattr(self, name), self.names, name)
            self._by_name[name] = dict(zip(self.names, values, strict=True))
        return self._by_name[name]

    def only(self, names: Sequence[str]) -> "Job":
        """Return the job of some of the members."""
        kept: dict[str, Any] = {}
        for one in fields(self):
            if isinstance(getattr(self, one.name), Each):
                own = self.by_name(one.name)
                kept[one.name] = Each({name: own[name] for name in names})
        return replace(self, names=tuple(names), **kept)

    @property
    def longest(self) -> int:
        """Return the epochs of the member that trains longest."""
        return max(int(epochs) for epochs in self.by_name("epochs").values())

    def limit_steps(self, steps: np.ndarray | None) -> np.ndarray | None:
        """Return the steps of an epoch, which `steps_per_epoch` may cut short."""
        if steps is None or self.steps_per_epoch is None:
            return steps
        return np.minimum(steps, self.steps_per_epoch)

    def check(self) -> None:
        """Raise InputError for a number that makes no sense."""
        for argument in ("epochs", "share", "steps_per_epoch"):
            refuse_list(getattr(self, argument), argument, self.names)
        for name, value in self.by_name("epochs").items():
            if not _is_whole(value, 0):
                raise InputError(f"epochs of member {name!r} is {value!r}; expected a whole number, 0 or more.")
        for name, value in self.by_name("share").items():
            if value is not None and not _is_whole(value, 1):
                raise InputError(
                    f"share of member {name!r} is {value!r}; expected a whole number of turns, 1 or more."
                )
        if self.steps_per_epoch is not None and not _is_whole(self.steps_per_epoch, 1):
            raise InputError(f"steps_per_epoch is {self.steps_per_epoch!r}; expected a whole number, 1 or more.")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)
