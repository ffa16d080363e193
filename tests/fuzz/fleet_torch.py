"""How a program's verbs are said for torch models."""

from typing import Any

import torch
from tests.fuzz.models_torch import KINDS, make, nets, observe, stateful
from tests.fuzz.programs import Data, Program, Recipe, turns
from tests.fuzz.recipes_torch import PAIRS, SCHEDULES, loss_of, optimizer_of, recipes
from tests.fuzz.reference import LOW_PRECISION, Knob
from tests.fuzz.reference_torch import TorchReference, edit, freeze, train

import modelfleet as mf

__all__ = ["REFERENCE", "compile", "copied", "edit", "freeze", "loader", "make", "observe", "tensors", "tolerance"]
__all__ += ["KINDS", "nets", "recipes", "stateful", "train", "turn"]

REFERENCE = TorchReference


def tolerance(program: Program) -> float:
    """How far numbers may be apart, relative to the largest of an array, or to 1."""
    found = [getattr(verb, "recipe", None) for verb in program.verbs]
    recipes = [recipe for recipe in found if isinstance(recipe, Recipe)]
    if any(recipe.precision == "bf16" for recipe in recipes):
        return LOW_PRECISION
    if program.dtype == "float32":
        return 2e-3
    # A gradient that is 0 but for rounding, as of a bias before a norm, is divided by its own size.
    normed = any("norm" in part for net in program.nets for part in net.parts)
    rough = any(
        recipe.optimizer in ("adagrad", "rmsprop") or (normed and recipe.optimizer != "sgd") for recipe in recipes
    )
    return 1e-5 if rough else 1e-8


def compile(fleet: Any, recipe: Recipe, names: list[str], check: Any, *, all_: bool) -> None:
    """As a user compiles."""
    if not hasattr(check, "knob"):
        check.knob = Knob()

    def own(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        return mf.each({name: turns(value, number) for number, name in enumerate(names)})

    hyper = {key: value if key in PAIRS else own(value) for key, value in recipe.hyper}
    fleet.compile(
        optimizer_of(recipe),
        metrics=list(recipe.metrics),
        clip_norm=own(recipe.clip),
        schedule=SCHEDULES.get(recipe.schedule or "", recipe.schedule),
        precision=recipe.precision,
        members=None if all_ else names,
        **loss_of(recipe, check.program.task, check.program.dtype, check.knob),
        **hyper,
    )


def turn(check: Any, value: float) -> None:
    """Turn the user's knob."""
    if not hasattr(check, "knob"):
        check.knob = Knob()
    check.knob.value = value


def tensors(reference: TorchReference, data: Data, member: int | None) -> Any:
    """Arrays as a user has them: of NumPy in single precision, of torch in double."""
    x, y = reference.arrays(data, member)
    return (x, y) if reference.program.dtype == "float32" else (torch.from_numpy(x), torch.from_numpy(y))


def loader(reference: TorchReference, data: Data, batch: int, member: int | None) -> Any:
    """A loader of the fleet's own."""
    return reference.loader(data, batch, member)


def copied(tree: Any) -> Any:
    """A copy of a user's arrays; None for what is read from elsewhere."""
    if isinstance(tree, tuple | list):
        return type(tree)(map(copied, tree))
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    return tree.copy() if hasattr(tree, "copy") else None


SHUFFLED = True
"""Whether there are loaders that shuffle."""
DTYPES = ("float64", "float64", "float64", "float32")
