"""Parts of a recipe that every framework prepares and checks in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from modelfleet.each import per_member
from modelfleet.errors import InputError
from modelfleet.frameworks.errors import NotCompiledError
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import ScheduleLike

TaskType = TypeVar("TaskType", covariant=True)


@dataclass(frozen=True)
class Prepared(Generic[TaskType]):
    """Recipe for some members, in their order (see `adapter_protocol.Prepared`)."""

    tasks: Sequence[TaskType]
    schedules: Sequence[ScheduleLike]
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Hyperparameters `(member,)` that are not part of the members' state; NaN if an optimizer has none."""


def compile_all(recipe: Recipe, members: Sequence[Member]) -> None:
    """Have every framework check a recipe for its members. Raise InputError if it does not fit one of them."""
    for framework in {id(member.framework): member.framework for member in members}.values():
        alike = [member for member in members if member.framework is framework]
        framework.compile(recipe.only([member.name for member in alike]), alike)


def require_compiled(members: Sequence[Member], kind: str) -> None:
    """Raise NotCompiledError unless `kind` is "predict", the only verb that works without a recipe."""
    if kind != "predict":
        verb = "evaluate" if kind == "evaluate" else "fit"
        raise NotCompiledError(
            f"call compile before {verb}: member {members[0].name!r} needs a loss and an optimizer."
        )


def check_objective(recipe: Recipe) -> None:
    """Raise InputError for a recipe that has an objective and also a loss or metrics."""
    if recipe.objective is None:
        return
    if recipe.loss is not None:
        raise InputError("compile got both a loss and an objective. Give one: an objective computes its own loss.")
    if recipe.metrics:
        raise InputError(
            "compile got metrics beside an objective. Let the objective return them: (loss, {name: value})."
        )


def clip_norms(clip_norm: Any, names: Sequence[str]) -> list[float]:
    """Return the largest gradient norm of every member; infinity for members without one."""
    values = per_member(clip_norm, names, "clip_norm")
    for name, value in zip(names, values, strict=True):
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            raise InputError(f"clip_norm of member {name!r} is {value!r}; expected a number above 0, or None.")
    return [float("inf") if value is None else float(value) for value in values]
