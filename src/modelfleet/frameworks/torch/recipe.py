"""From the recipe of `compile` to every member's task and hyperparameters, checked."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from modelfleet.each import Each, per_member
from modelfleet.errors import InputError
from modelfleet.frameworks.recipe import Prepared, check_objective, clip_norms, require_compiled
from modelfleet.frameworks.torch import losses, metrics, schedules
from modelfleet.frameworks.torch.modes import enter_training
from modelfleet.frameworks.torch.optimizers import hyperparameters
from modelfleet.frameworks.torch.task import PRECISIONS, Task
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.unknown_names import unknown


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Raise InputError if the recipe has an error for any of these members."""
    _prepare(recipe, [member.name for member in members])
    _check_loss_scaling(recipe, members)


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: str) -> Prepared[Task]:
    """Return the tasks and hyperparameters of members. Predicting needs no recipe."""
    if recipe is None:
        require_compiled(members, kind)
        recipe = Recipe("sgd")
    _check_loss_scaling(recipe, members)
    if kind == "train":
        for member in members:
            enter_training(member.model)
    return _prepare(recipe, [member.name for member in members])


def _check_loss_scaling(recipe: Recipe, members: Sequence[Member]) -> None:
    """Raise InputError for float16 parameters with a scaled loss, which their gradients can't hold.

    torch's GradScaler refuses them, too.
    """
    if recipe.precision != "fp16":
        return
    for member in members:
        for path, parameter in member.model.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise InputError(
                    f'member {member.name!r}: precision="fp16" keeps parameters in float32, but its {path!r} is '
                    f"float16. Give a float32 model (model.float()), or leave precision out to train it as it is."
                )


def _prepare(recipe: Recipe, names: Sequence[str]) -> Prepared[Task]:
    """Check a recipe and return its values for each member."""
    given = dict(recipe.hyperparameters or {})
    check_objective(recipe)
    if recipe.precision not in PRECISIONS:
        raise unknown("precision", recipe.precision, PRECISIONS)
    chosen, columns = hyperparameters.resolve_each(recipe.optimizer, given, names)
    if recipe.clip_norm is not None:
        columns["clip_norm"] = np.array(clip_norms(recipe.clip_norm, names))
    own_losses = losses.resolve_each(per_member(recipe.loss, names, "loss"))
    objectives = per_member(recipe.objective, names, "objective")
    task = Task(
        optimizer=chosen[0],
        metrics=metrics.resolve(recipe.metrics),
        clip=recipe.clip_norm is not None,
        precision=recipe.precision,
    )
    tasks: dict[tuple[int, ...], Task] = {}
    settings = list(zip(chosen, own_losses, objectives, strict=True))
    keys = [tuple(map(id, own)) for own in settings]
    for key, (optimizer, loss, objective) in zip(keys, settings, strict=True):
        if key not in tasks:
            tasks[key] = replace(task, optimizer=optimizer, loss=loss, objective=objective)
    own_schedules = per_member(recipe.schedule, names, "schedule")
    for schedule in own_schedules if isinstance(recipe.schedule, Each) else own_schedules[:1]:
        schedules.resolve(schedule)
    return Prepared([tasks[key] for key in keys], own_schedules, columns)
