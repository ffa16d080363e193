"""Recipes of TensorFlow's own models, which can only predict."""

from collections.abc import Sequence

from modelfleet.errors import InputError
from modelfleet.frameworks.recipe import Prepared
from modelfleet.frameworks.tensorflow.task import Task
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Raise InputError: these models can't be trained."""
    raise _refusal(members[0], "compiled")


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: Kind) -> Prepared[Task]:
    """Return the tasks of members. Raises InputError for any kind but "predict"."""
    if kind != "predict":
        raise _refusal(members[0], "trained" if kind == "train" else "evaluated")
    return Prepared([Task()] * len(members), [None] * len(members))


def _refusal(member: Member, verb: str) -> InputError:
    return InputError(
        f"member {member.name!r} is a {type(member.model).__name__} of TensorFlow's own, which can predict, but "
        f"can't be {verb}: only a Keras model says what its loss and its weights are. Give a keras.Model."
    )
