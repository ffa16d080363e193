"""From a fleet's recipe, or each model's own `compile`, to every member's task."""

from collections.abc import Sequence

import keras

from modelfleet.each import per_member
from modelfleet.errors import InputError
from modelfleet.frameworks.errors import NotCompiledError
from modelfleet.frameworks.keras import losses, metrics, optimizers
from modelfleet.frameworks.keras.optimizers import Argument
from modelfleet.frameworks.keras.task import Task, task_of
from modelfleet.frameworks.recipe import Prepared
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind

COMPILE_OPTIONS = ("loss_weights", "weighted_metrics")  # for model.compile, not for the optimizer


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Compile every member's model with an optimizer of its own. If one can't be compiled, change nothing."""
    names = [member.name for member in members]
    check_recipe(recipe)
    given = {
        "optimizer": recipe.optimizer,
        "loss": recipe.loss,
        "metrics": recipe.metrics,
        "clip_norm": recipe.clip_norm,
        "schedule": recipe.schedule,
        **(recipe.hyperparameters or {}),
    }
    columns = {key: per_member(value, names, key) for key, value in given.items()}
    arguments = [
        _compile_arguments({key: values[position] for key, values in columns.items()}, name)
        for position, name in enumerate(names)
    ]
    for member, own in zip(members, arguments, strict=True):
        member.model.compile(**own)


def check_recipe(recipe: Recipe) -> None:
    """Raise InputError for what no Keras model takes."""
    if recipe.objective is not None:
        raise InputError(
            "compile got an objective, which Keras models do not take. "
            "Override compute_loss in the model's class, or give a loss."
        )
    if recipe.precision != "float32":
        raise InputError(
            f"compile got precision={recipe.precision!r}. A Keras model gets its precision when it is made: call "
            f'keras.config.set_dtype_policy("mixed_bfloat16") before you make the models, and leave precision out.'
        )


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: Kind) -> Prepared[Task]:
    """Return the tasks of members, from how their models are compiled now. Predicting needs no compile.

    There are no columns: learning rates are among the optimizer's variables.
    """
    tasks = []
    for member in members:
        if recipe is not None and not member.model.compiled:  # it was added after the fleet was compiled
            compile(recipe.only([member.name]), [member])
        if kind != "predict":
            _check_compiled(member, kind)
        if kind == "evaluate" and member.model.optimizer is not None and keras.backend.backend() != "tensorflow":
            optimizers.built(member.model)  # as Keras's own evaluate does
        tasks.append(task_of(member.model))
    return Prepared(tasks, [None] * len(tasks))


def _check_compiled(member: Member, kind: Kind) -> None:
    model = member.model
    if not model.compiled or (kind == "train" and model.optimizer is None):
        missing = "an optimizer" if model.compiled else "an optimizer and a loss"
        raise NotCompiledError(
            f"member {member.name!r} is not compiled: it needs {missing}. "
            f"Call model.compile(...) on it, or fleet.compile(...) for all members."
        )


def _compile_arguments(given: dict[str, Argument], name: str) -> dict[str, Argument]:
    """Return the arguments of one member's `model.compile`."""
    found = {key: given.pop(key) for key in COMPILE_OPTIONS if key in given}
    optimizer, loss, metric = given.pop("optimizer"), given.pop("loss"), given.pop("metrics")
    clip_norm, schedule = given.pop("clip_norm"), given.pop("schedule")
    if clip_norm is not None:
        given["global_clipnorm"] = clip_norm
    found["optimizer"] = optimizers.scheduled(optimizer, schedule, given, name)
    found["loss"] = losses.resolve(loss)
    found["metrics"] = metrics.resolve(metric, loss) or None
    if found.get("weighted_metrics"):
        found["weighted_metrics"] = metrics.resolve(found["weighted_metrics"], loss)
    return found
