"""How a program's verbs are said for Keras models: they are compiled as ever, and so is a fleet of them."""

from typing import Any

from tests.fuzz.models_keras import KINDS, make, nets, observe, stateful
from tests.fuzz.programs import Data, Freeze, Program, Recipe
from tests.fuzz.reference_keras import KerasReference, compile_one, edit, recipes, train
from tests.fuzz.reference_keras import freeze as _freeze

__all__ = ["DTYPES", "KINDS", "REFERENCE", "SHUFFLED", "compile", "copied", "edit", "freeze", "loader", "make"]
__all__ += ["nets", "observe", "recipes", "stateful", "tensors", "tolerance", "train", "turn"]

REFERENCE = KerasReference
SHUFFLED = False
DTYPES = ("float32",)


def tolerance(program: Program) -> float:
    """How far numbers may be apart, relative to the largest of an array, or to 1."""
    return 1e-3


def compile(fleet: Any, recipe: Recipe, names: list[str], check: Any, *, all_: bool) -> None:
    """As a user compiles: model by model."""
    for number, name in enumerate(names):
        model = fleet[name]
        model.fuzzed = (recipe, number, check.program.task)
        compile_one(model, *model.fuzzed)


def turn(check: Any, value: float) -> None:
    """There are no objectives that could read a knob."""


def freeze(model: Any, verb: Freeze) -> None:
    """Freeze a layer and compile again, as Keras asks for."""
    _freeze(model, verb)
    compile_one(model, *model.fuzzed)


def tensors(reference: KerasReference, data: Data, member: int | None) -> Any:
    """Arrays as a user has them."""
    return reference.arrays(data, member)


def loader(reference: KerasReference, data: Data, batch: int, member: int | None) -> Any:
    """A loader of the fleet's own."""
    return reference.loader(data, batch, member)


def copied(tree: Any) -> Any:
    """A copy of a user's arrays; None for what is read from elsewhere."""
    return tuple(leaf.copy() for leaf in tree) if isinstance(tree, tuple) else None
