"""Jobs: the arguments of one `fit`, `evaluate` or `predict`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from modelfleet.each import Each, per_member, refuse_list
from modelfleet.errors import InputError
from modelfleet.types import Data


@dataclass(frozen=True)
class Job:
    """Arguments of a verb. Every value may be one for all members, or `each`."""

    names: tuple[str, ...]
    data: Data
    validation: Data = None
    epochs: int | Each = 1
    """Last epoch, counted from 1. After `without_past`, the number of epochs to train."""
    initial_epoch: int = 0
    """Epochs that are done already."""
    batch_size: int | Each | None = None
    shuffle: bool = True
    share: int | Each | None = None
    steps_per_epoch: int | Each | None = None
    class_weight: dict[int, float] | None = None
    record_steps: bool = False
    _by_name: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def by_name(self, name: str) -> dict[str, Any]:
        """Return every member's own value of a field. Cached, because thousands of lanes need it."""
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

    def without_past(self) -> "Job":
        """Return the job with the number of epochs that are left to train after `initial_epoch`."""
        if not self.initial_epoch:
            return self
        left = {name: int(last) - self.initial_epoch for name, last in self.by_name("epochs").items()}
        return replace(self, epochs=Each(left) if isinstance(self.epochs, Each) else left[self.names[0]])

    def step_limits(self, names: Sequence[str]) -> np.ndarray | None:
        """Return `(member,)`: the steps after which each member's epoch ends; None if its data decide."""
        if self.steps_per_epoch is None:
            return None
        own = self.by_name("steps_per_epoch")
        return np.array([own[name] for name in names], dtype=np.int64)

    def limit_steps(self, steps: np.ndarray | None, names: Sequence[str]) -> np.ndarray | None:
        """Return the steps of an epoch of these members, which `steps_per_epoch` may cut short."""
        limits = self.step_limits(names)
        return steps if steps is None or limits is None else np.minimum(steps, limits)

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
        if self.steps_per_epoch is not None:
            for name, value in self.by_name("steps_per_epoch").items():
                if not _is_whole(value, 1):
                    whose = f" of member {name!r}" if isinstance(self.steps_per_epoch, Each) else ""
                    raise InputError(f"steps_per_epoch{whose} is {value!r}; expected a whole number, 1 or more.")
        self._check_initial_epoch()

    def _check_initial_epoch(self) -> None:
        first = self.initial_epoch
        if not _is_whole(first, 0):
            raise InputError(
                f"initial_epoch is {first!r}; expected one whole number for all members, 0 or more. "
                f"Give the number of epochs that are done already."
            )
        for name, last in self.by_name("epochs").items():
            if first and last <= first:
                whose = f" of member {name!r}" if isinstance(self.epochs, Each) else ""
                raise InputError(
                    f"epochs{whose} is {last} and initial_epoch is {first}; expected epochs above initial_epoch, "
                    f"since epochs is the last one to train. To train {last} more, give epochs={first + last}."
                )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)
