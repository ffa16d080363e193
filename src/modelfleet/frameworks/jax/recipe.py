"""From the recipe of `compile` to every member's task, checked.

There are no columns: each member's own numbers are in its state.
"""

from collections.abc import Sequence
from dataclasses import replace

from modelfleet.each import per_member
from modelfleet.errors import InputError
from modelfleet.frameworks.jax import losses, metrics, optimizers
from modelfleet.frameworks.jax.task import PRECISIONS, Task
from modelfleet.frameworks.recipe import Prepared, check_objective, clip_norms, require_compiled
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind
from modelfleet.unknown_names import unknown


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Raise InputError if the recipe has an error for any of these members."""
    _prepare(recipe, [member.name for member in members])


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: Kind) -> Prepared[Task]:
    """Return the tasks of members. Predicting needs no recipe."""
    if recipe is None:
        require_compiled(members, kind)
        return Prepared([Task()] * len(members), [None] * len(members))
    return _prepare(recipe, [member.name for member in members])


def _prepare(recipe: Recipe, names: Sequence[str]) -> Prepared[Task]:
    check_objective(recipe)
    if recipe.loss is None and recipe.objective is None:
        raise InputError("compile got neither a loss nor an objective. A JAX model needs one to be trained.")
    if recipe.precision == "fp16":
        raise InputError(
            'precision="fp16" is not for JAX models: its gradients need a loss scale that Optax does not have. '
            'Use "bf16", which needs none.'
        )
    if recipe.precision not in PRECISIONS:
        raise unknown("precision", recipe.precision, [name for name in PRECISIONS if name != "fp16"])
    given = dict(recipe.hyperparameters or {})
    chosen, own = optimizers.resolve(recipe.optimizer, recipe.schedule, given, names)
    clips = clip_norms(recipe.clip_norm, names)
    by_name = {name: {**row, "clip_norm": clip} for name, row, clip in zip(names, own, clips, strict=True)}
    task = Task(
        metrics=metrics.resolve(recipe.metrics),
        clip=recipe.clip_norm is not None,
        precision=recipe.precision,
        own=by_name,
    )
    given_losses = per_member(recipe.loss, names, "loss")
    resolved = {id(loss): None if loss is None else losses.resolve(loss) for loss in given_losses}
    objectives = per_member(recipe.objective, names, "objective")
    settings = list(zip(chosen, given_losses, objectives, strict=True))
    keys = [tuple(map(id, own)) for own in settings]
    tasks: dict[tuple[int, ...], Task] = {}
    for key, (optimizer, loss, objective) in zip(keys, settings, strict=True):
        if key not in tasks:
            tasks[key] = replace(task, optimizer=optimizer, loss=resolved[id(loss)], objective=objective)
    return Prepared([tasks[key] for key in keys], [None] * len(names))
