"""From what `compile` was told to every member's task, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelfleet.each import per_member
from modelfleet.errors import InputError, unknown
from modelfleet.frameworks.jax import losses, metrics, optimizers
from modelfleet.frameworks.jax.task import PRECISIONS, Task
from modelfleet.members import Member
from modelfleet.recipe import Recipe


@dataclass(frozen=True)
class Prepared:
    """The task of each member. There are no columns: each member's own numbers are in its state."""

    tasks: list[Task]
    schedules: list[Any]
    columns: dict[str, np.ndarray] = field(default_factory=dict)


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Check a recipe for these members: every error of it now, none later."""
    _prepare(recipe, [member.name for member in members])


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: str) -> Prepared:
    """The tasks of members; predicting needs no recipe."""
    if recipe is None:
        if kind != "predict":
            verb = "evaluate" if kind == "evaluate" else "fit"
            raise InputError(
                f"call compile before {verb}: member {members[0].name!r} needs to know its loss and its optimizer."
            )
        return Prepared([Task()] * len(members), [None] * len(members))
    return _prepare(recipe, [member.name for member in members])


def _prepare(recipe: Recipe, names: Sequence[str]) -> Prepared:
    if recipe.loss is not None and recipe.objective is not None:
        raise InputError("compile got both a loss and an objective. Give one: an objective computes its own loss.")
    if recipe.loss is None and recipe.objective is None:
        raise InputError("compile got neither a loss nor an objective. A JAX model needs one to be trained.")
    if recipe.objective is not None and recipe.metrics:
        raise InputError(
            "compile got metrics beside an objective. Let the objective return them: (loss, {name: value})."
        )
    if recipe.precision == "fp16":
        raise InputError(
            'precision="fp16" is not for JAX models: its gradients need a loss scale that Optax does not have. '
            'Use "bf16", which needs none.'
        )
    if recipe.precision not in PRECISIONS:
        raise unknown("precision", recipe.precision, [name for name in PRECISIONS if name != "fp16"])
    given = dict(recipe.hyperparameters or {})
    chosen, own = optimizers.resolve(recipe.optimizer, recipe.schedule, given, names)
    clips = _clips(recipe.clip_norm, names)
    by_name = {name: {**row, "clip_norm": clip} for name, row, clip in zip(names, own, clips, strict=True)}
    loss = None if recipe.loss is None else losses.resolve(recipe.loss)
    found = metrics.resolve(recipe.metrics)
    tasks: dict[int, Task] = {}
    for optimizer in chosen:
        if id(optimizer) not in tasks:
            tasks[id(optimizer)] = Task(
                optimizer=optimizer,
                loss=loss,
                objective=recipe.objective,
                metrics=found,
                clip=recipe.clip_norm is not None,
                precision=recipe.precision,
                own=by_name,
            )
    return Prepared([tasks[id(optimizer)] for optimizer in chosen], [None] * len(names))


def _clips(clip_norm: Any, names: Sequence[str]) -> list[float]:
    values = per_member(clip_norm, names, "clip_norm")
    for name, value in zip(names, values, strict=True):
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            raise InputError(f"clip_norm of member {name!r} is {value!r}; expected a number above 0, or None.")
    return [float("inf") if value is None else float(value) for value in values]
