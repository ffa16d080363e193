"""How a program's verbs are said for JAX models."""

from typing import Any

from tests.fuzz.models_jax import KINDS, make, nets, observe, stateful
from tests.fuzz.programs import Data, Freeze, Program, Recipe, turns
from tests.fuzz.reference import Knob
from tests.fuzz.reference_jax import OPTIMIZERS, JaxReference, edit, loss_of, recipes, train

import modelfleet as mf

__all__ = ["DTYPES", "KINDS", "REFERENCE", "SHUFFLED", "compile", "copied", "edit", "freeze", "loader", "make"]
__all__ += ["nets", "observe", "recipes", "stateful", "tensors", "tolerance", "train", "turn"]

REFERENCE = JaxReference
SHUFFLED = False
DTYPES = ("float32",)


def tolerance(program: Program) -> float:
    """How far numbers may be apart, relative to the largest of an array, or to 1."""
    return 1e-3


def compile(fleet: Any, recipe: Recipe, names: list[str], check: Any, *, all_: bool) -> None:
    """As a user compiles."""
    if not hasattr(check, "knob"):
        check.knob = Knob()

    def own(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        return mf.each({name: turns(value, number) for number, name in enumerate(names)})

    fleet.compile(
        recipe.optimizer if recipe.form == "name" else OPTIMIZERS[recipe.optimizer],
        metrics=list(recipe.metrics),
        clip_norm=own(recipe.clip),
        members=None if all_ else names,
        **loss_of(recipe, check.program.task, check.knob),
        **{key: own(value) for key, value in recipe.hyper},
    )


def turn(check: Any, value: float) -> None:
    """Turn the user's knob."""
    if not hasattr(check, "knob"):
        check.knob = Knob()
    check.knob.value = value


def freeze(model: Any, verb: Freeze) -> None:
    """Flax has no such thing: what is not trained is another kind of variable."""


def tensors(reference: JaxReference, data: Data, member: int | None) -> Any:
    """Arrays as a user has them."""
    return reference.arrays(data, member)


def loader(reference: JaxReference, data: Data, batch: int, member: int | None) -> Any:
    """A loader of the fleet's own."""
    return reference.loader(data, batch, member)


def copied(tree: Any) -> Any:
    """A copy of a user's arrays; None for what is read from elsewhere."""
    return tuple(leaf.copy() for leaf in tree) if isinstance(tree, tuple) else None
