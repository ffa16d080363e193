"""Loading fleets that `Fleet.save` has saved."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelfleet import saving
from modelfleet.errors import StoreError
from modelfleet.fleet import Fleet
from modelfleet.formatting import without_period
from modelfleet.frameworks.recipe import compile_all
from modelfleet.garbage import without_full_collections
from modelfleet.lanes.saved_state import TrainingState
from modelfleet.members import Member
from modelfleet.recipe import Missing, Recipe
from modelfleet.saving import Factory, SavedFleet
from modelfleet.store import recipe_json


@without_full_collections()
def load(
    folder: str | Path,
    factory: Factory = None,
    *,
    members: Sequence[str] | None = None,
    allow_import: bool = False,
    devices: str | Sequence[str] = "auto",
    verify: bool = True,
) -> Fleet:
    """Load a saved fleet: its models, recipes and optimizer state, so that `fit` continues.

    Values that JSON can't hold (a lambda, an object of Optax) are not in the folder. If the recipe had any, the
    first `fit` names them and asks for a `compile`. With the same optimizer, members keep their optimizer state.

    Args:
        folder: The folder.
        factory: Makes a model to fill with weights. It gets the keywords that the member was built with. For
            members that are unlike, give a factory or a model for each: `{"a": make_a, "b": model_b}`, or
            `each(...)`.
        members: Load only these, without reading the others.
        allow_import: Import the functions of the recipes, and the factory if none is given, by the names in the
            folder. This runs code that the folder chooses: use it only with folders you trust.
        devices: See `Fleet`.
        verify: Compare the checksums of what is read.

    Returns:
        The fleet.

    Raises:
        StoreError: The folder is damaged, or holds no fleet.
        InputError: A factory can't be called, or there is none for a member.
    """
    found = saving.read(folder, factory, allow_import, members, verify=verify)
    fleet = Fleet({name: member.model for name, member in found.members.items()}, seed=found.seed, devices=devices)
    fleet._exposed.clear()
    fleet._origins = dict(found.origins)
    fleet._recipes.update(found.recipes)
    fleet._recipe = found.recipe
    _compile(fleet, found, allow_import)
    fleet._live_lanes.give_saved(_fill_optimizers(fleet, found))
    return fleet


def _compile(fleet: Fleet, found: SavedFleet, allow_import: bool) -> None:
    """Compile the members as they were. If a recipe can't be used any more, its `missing` says why."""
    members = dict(fleet._members)
    for name, compiled in found.compiled.items():
        own: Any = getattr(members[name].framework, "own_training", None)
        if own is None:
            continue
        if "config" in compiled:
            reason = own.compile_again(members[name].model, compiled["config"])
            if reason is None:
                del members[name]
            else:
                fleet._recipes[name] = Recipe(None, missing=_not_repeated(reason))
        elif fleet._recipes[name] is None:
            fleet._recipes[name] = recipe_json.decode(compiled["lost"], allow_import=allow_import)
    by_recipe: dict[int, list[Member]] = {}
    for name, member in members.items():
        recipe = fleet._recipes[name]
        if recipe is not None and not recipe.lacking(name):
            by_recipe.setdefault(id(recipe), []).append(member)
    for together in by_recipe.values():
        recipe = fleet._recipes[together[0].name]
        assert recipe is not None
        if recipe.missing:
            continue
        try:
            compile_all(recipe, together)
        except Exception as error:  # the recipe of a damaged folder may hold anything
            unusable = replace(recipe, missing=_not_repeated(without_period(error)))
            fleet._recipes.update({member.name: unusable for member in together})


def _not_repeated(reason: str) -> dict[str, Missing]:
    return {"compile": Missing(f"can't be repeated: {reason}", recipe_json.left_out(reason))}


def _fill_optimizers(fleet: Fleet, found: SavedFleet) -> dict[str, TrainingState]:
    """Return the members' training states. Models that hold their own optimizers get their states at once."""
    states: dict[str, TrainingState] = {}
    for (name,), state in found.trained or ():
        member = fleet._members[name]
        own, optimizer = getattr(member.framework, "own_training", None), state.state.get("optimizer")
        if own is not None and optimizer and member.model.compiled:
            difference = own.fill_optimizer(member.model, optimizer)
            if difference is not None:
                raise StoreError(
                    f"the optimizer state of member {name!r} does not fit its model: {difference}. "
                    f"Give the factory that the fleet was built with."
                )
            state = replace(state, state={"member": state.state.get("member", {})})
        states[name] = state
    return states
