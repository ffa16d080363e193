"""What TensorFlow's own models can be told to do: to predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.members import Member
from modelfleet.recipe import Recipe


@dataclass(frozen=True)
class Task:
    """To predict; there is no other."""

    summary: str = "predict"


@dataclass(frozen=True)
class Prepared:
    """The task of each member."""

    tasks: list[Task]
    schedules: list[None]
    columns: dict[str, np.ndarray] = field(default_factory=dict)


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Refused: these models are not trained."""
    raise _refusal(members[0], "compiled")


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: str) -> Prepared:
    """The tasks of members, to predict."""
    if kind != "predict":
        raise _refusal(members[0], "trained" if kind == "train" else "evaluated")
    return Prepared([Task()] * len(members), [None] * len(members))


def _refusal(member: Member, what: str) -> InputError:
    return InputError(
        f"member {member.name!r} is a {type(member.model).__name__} of TensorFlow's own, which can predict, but "
        f"can't be {what}: only a Keras model says what its loss and its weights are. Give a keras.Model."
    )


class Schedules:
    """There are none (see `protocol.Schedules`)."""

    by_step = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._columns: dict[str, np.ndarray] = {}

    def at(self, steps: np.ndarray) -> Mapping[str, np.ndarray]:
        """No hyperparameters."""
        return self._columns

    def end_epoch(self, values: Sequence[Mapping[str, float]]) -> None:
        """Nothing to go by."""

    def state(self) -> None:
        """Nothing to keep."""

    def restore(self, state: None) -> None:
        """Nothing to take up."""
