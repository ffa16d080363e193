"""From what `compile` was told to every member's task and hyperparameters, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from modelfleet.each import Each, per_member
from modelfleet.errors import InputError, unknown
from modelfleet.frameworks.torch import hyperparameters, losses, metrics, schedules
from modelfleet.frameworks.torch.modes import enter_training
from modelfleet.frameworks.torch.task import PRECISIONS, Task
from modelfleet.members import Member
from modelfleet.recipe import Recipe


@dataclass(frozen=True)
class Prepared:
    """A recipe for named members: the task of each, and the hyperparameters as columns `(member,)`."""

    tasks: list[Task]
    columns: dict[str, np.ndarray]
    schedules: list[object]


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Check a recipe for these members: every error of it now, none later."""
    _prepare(recipe, [member.name for member in members])
    _refuse_scaling_half(recipe, members)


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: str) -> Prepared:
    """The tasks and hyperparameters of members; predicting needs no recipe."""
    if recipe is None:
        if kind != "predict":
            verb = "evaluate" if kind == "evaluate" else "fit"
            raise InputError(
                f"call compile before {verb}: member {members[0].name!r} needs to know its loss and its optimizer."
            )
        recipe = Recipe("sgd")
    _refuse_scaling_half(recipe, members)
    if kind == "train":
        for member in members:
            enter_training(member.model)
    return _prepare(recipe, [member.name for member in members])


def _refuse_scaling_half(recipe: Recipe, members: Sequence[Member]) -> None:
    """Refuse to scale the loss of float16 parameters, whose gradients can't hold the scale; so does GradScaler."""
    if recipe.precision != "fp16":
        return
    for member in members:
        for path, parameter in member.model.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise InputError(
                    f'member {member.name!r}: precision="fp16" keeps parameters in float32, but its {path!r} is '
                    f"float16. Give a float32 model (model.float()), or leave precision out to train it as it is."
                )


def _prepare(recipe: Recipe, names: Sequence[str]) -> Prepared:
    """Check a recipe and spread it over the members."""
    given = dict(recipe.hyperparameters or {})
    if recipe.loss is not None and recipe.objective is not None:
        raise InputError("compile got both a loss and an objective. Give one: an objective computes its own loss.")
    if recipe.objective is not None and recipe.metrics:
        raise InputError(
            "compile got metrics beside an objective. Let the objective return them: (loss, {name: value})."
        )
    if recipe.precision not in PRECISIONS:
        raise unknown("precision", recipe.precision, PRECISIONS)
    optimizer, hyper = hyperparameters.resolve(recipe.optimizer, given)
    columns = hyperparameters.columns(hyper, names)
    if recipe.clip_norm is not None:
        columns["clip_norm"] = _clip_column(recipe.clip_norm, names)
    task = Task(
        optimizer=optimizer,
        loss=None if recipe.loss is None else losses.resolve(recipe.loss),
        objective=recipe.objective,
        metrics=metrics.resolve(recipe.metrics),
        clip=recipe.clip_norm is not None,
        precision=recipe.precision,
    )
    flags = hyperparameters.static_flags(recipe.optimizer, given, names)
    distinct: dict[tuple[tuple[str, bool], ...], Task] = {}
    tasks = []
    for own in flags:
        key = tuple(sorted(own.items()))
        if key not in distinct:
            distinct[key] = replace(task, optimizer=replace(optimizer, flags=own))
        tasks.append(distinct[key])
    wanted = per_member(recipe.schedule, names, "schedule")
    for schedule in wanted if isinstance(recipe.schedule, Each) else wanted[:1]:
        schedules.resolve(schedule)
    return Prepared(tasks, columns, wanted)


def _clip_column(clip_norm: object, names: Sequence[str]) -> np.ndarray:
    values = per_member(clip_norm, names, "clip_norm")
    for name, value in zip(names, values, strict=True):
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            raise InputError(f"clip_norm of member {name!r} is {value!r}; expected a number above 0, or None.")
    return np.array([np.inf if value is None else float(value) for value in values])
