"""Recipes: the arguments of `fleet.compile`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from modelfleet.each import Each, per_member, refuse_list
from modelfleet.errors import InputError
from modelfleet.types import Json, LossLike, MetricLike, Model, OptimizerLike, ScheduleLike, Tree

NUMBERS = ("lr", "clip_norm")
"""Arguments that are never True or False."""
_SEVERAL_NUMBERS = {"betas", "etas", "step_sizes"}  # hyperparameters that are a tuple for one member, too


@dataclass(frozen=True)
class Missing:
    """An argument of `compile` that is not in a saved folder, or may not be read from it."""

    reason: str
    """Rest of a sentence that begins with its name: "was a lambda of train, which can't be saved"."""
    encoded: Json
    """Value in the folder in place of the argument."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Arguments of `compile`: how members are trained. Optimizer, loss, objective and numbers may be `each`."""

    optimizer: OptimizerLike
    loss: LossLike = None
    objective: Callable[[Model, Tree], Any] | Each | None = None
    metrics: Sequence[MetricLike] = ()
    clip_norm: float | Each | None = None
    precision: str = "float32"
    schedule: ScheduleLike = None
    hyperparameters: Mapping[str, Any] | None = None
    missing: Mapping[str, Missing] = field(default_factory=dict)
    """Arguments that were not read from a saved fleet, by name. With any, members can't be trained."""

    def by_name(self, names: Sequence[str]) -> "Recipe":
        """Return this recipe with the values of every `each` by member name.

        Raises:
            InputError: If an `each` does not have one value for every member, or a hyperparameter is a plain list.
        """
        self._refuse_flags()
        if isinstance(self.optimizer, list):  # a transformation of Optax is a tuple
            refuse_list(self.optimizer, "optimizer", names)
        for key, value in {"clip_norm": self.clip_norm, **(self.hyperparameters or {})}.items():
            if key not in _SEVERAL_NUMBERS:
                refuse_list(value, key, names)
        return self.mapped(
            lambda value, argument: Each(dict(zip(names, per_member(value, names, argument), strict=True)))
        )

    def only(self, names: Sequence[str]) -> "Recipe":
        """Return this recipe for some of the members. A missing value is noticed when the recipe is used."""
        kept = set(names)

        def narrow(value: Each, argument: str) -> Each:
            assert isinstance(value.values, dict)
            return Each({name: own for name, own in value.values.items() if name in kept})

        return self.mapped(narrow)

    def of(self, name: str) -> "Recipe":
        """Return this recipe with a member's own values, for several models that stand for it."""

        def own(value: Each, argument: str) -> Any:
            assert isinstance(value.values, dict)
            return value.values[name]

        return self.mapped(own)

    def with_copy(self, name: str, copy: str) -> "Recipe":
        """Return this recipe with the values of a member for its copy, too."""

        def widen(value: Each, argument: str) -> Each:
            assert isinstance(value.values, dict)
            others = {other: own for other, own in value.values.items() if other != copy}
            return Each(others | ({copy: value.values[name]} if name in value.values else {}))

        return self.mapped(widen)

    def lacking(self, name: str) -> list[str]:
        """Return the arguments that have no value for a member: those of a member that joined after `compile`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= self.hyperparameters or {}
        return [key for key, own in given.items() if isinstance(own, Each) and name not in own.values]

    def optimizer_of(self, name: str) -> OptimizerLike:
        """Return the optimizer of a member; None for a member that joined after `compile`."""
        chosen = self.optimizer
        return chosen.values.get(name) if isinstance(chosen, Each) and isinstance(chosen.values, dict) else chosen

    def given(self) -> dict[str, Any]:
        """Return the optimizer, the schedule and the hyperparameters that were given."""
        found = {"optimizer": self.optimizer, "clip_norm": self.clip_norm, "schedule": self.schedule}
        return {key: own for key, own in found.items() if own is not None} | dict(self.hyperparameters or {})

    def _refuse_flags(self) -> None:
        """Raise InputError if a number is True or False, which would count as 1 or 0."""
        given = {"clip_norm": self.clip_norm, **(self.hyperparameters or {})}
        for key in NUMBERS:
            value = given.get(key)
            values = [value] if not isinstance(value, Each) else value.values
            for own in values.values() if isinstance(values, dict) else values:
                if isinstance(own, bool):
                    raise InputError(f"{key} is {own}; expected a number.")

    def mapped(self, change: Callable[[Each, str], Any]) -> "Recipe":
        """Return this recipe with every `each` changed by a function of it and of its argument's name."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["hyperparameters"] = dict(self.hyperparameters or {})
        for values in (given, given["hyperparameters"]):
            for argument, value in values.items():
                if isinstance(value, Each):
                    values[argument] = change(value, argument)
        return Recipe(**given)


def plain_values(given: Mapping[str, Any], name: str) -> dict[str, str | int | float | np.number]:
    """Return a member's own values of these arguments, as far as they are numbers or strings."""
    own = {
        key: value.values[name] if isinstance(value, Each) and isinstance(value.values, dict) else value
        for key, value in given.items()
    }
    return {key: value for key, value in own.items() if isinstance(value, str | int | float | np.number)}
