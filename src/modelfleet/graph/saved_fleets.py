"""Fleets that are nodes of a saved graph: their members, and what these were compiled with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelfleet.errors import InputError
from modelfleet.fleet import Fleet
from modelfleet.frameworks.model_building import is_made, list_models
from modelfleet.recipe import Recipe
from modelfleet.store import recipe_json
from modelfleet.types import Json

SCHEMA = {"seed": int, "members": [str], "recipes": [{str: object}], "recipe_of": [(int, None)]}


@dataclass(frozen=True)
class FleetEntry:
    """What a manifest says of a fleet. The weights are among those of the graph, `(member, …)`."""

    seed: int
    names: Sequence[str]
    recipes: Mapping[str, Recipe | None]
    """Recipe of each member; None if it is trained by the graph's."""


def entry_of(fleet: Fleet) -> FleetEntry:
    """Return the entry of a fleet."""
    return FleetEntry(fleet.seed, fleet.names, dict(fleet._recipes))


def encoded(entry: FleetEntry) -> dict[str, Json]:
    """Return an entry as JSON."""
    different = list({id(own): own for own in entry.recipes.values() if own is not None}.values())
    numbers = {id(own): number for number, own in enumerate(different)}
    return {
        "seed": entry.seed,
        "members": list(entry.names),
        "recipes": [recipe_json.encode(own) for own in different],
        "recipe_of": [numbers.get(id(entry.recipes[name])) for name in entry.names],
    }


def decoded(saved: Mapping[str, Json], *, allow_import: bool) -> FleetEntry:
    """Return the entry of a manifest."""
    recipes = [recipe_json.decode(own, allow_import=allow_import) for own in saved["recipes"]]
    chosen = [None if number is None else recipes[number] for number in saved["recipe_of"]]
    return FleetEntry(saved["seed"], saved["members"], dict(zip(saved["members"], chosen, strict=True)))


def made_fleet(given: Any, entry: FleetEntry, node: str) -> Fleet:
    """Return the fleet of a node, to be filled with the saved weights.

    Args:
        given: A fleet, its models by name or in their order, or a function that returns one of these.
        entry: What was saved.
        node: The name of the node.

    Raises:
        InputError: The members are not those that were saved.
    """
    given = given() if callable(given) and not is_made(given) else given
    if isinstance(given, Fleet):
        fleet = given
    else:
        models = given if isinstance(given, Mapping) else list_models(given)
        if len(models) != len(entry.names):
            raise InputError(
                f"there are {len(models)} models for the {len(entry.names)} members of the saved fleet {node!r}. "
                f"Give one for each."
            )
        named = models if isinstance(models, Mapping) else dict(zip(entry.names, models, strict=True))
        fleet = Fleet(named, seed=entry.seed)
    if fleet.names != list(entry.names):
        raise InputError(
            f"the members of {node!r} are {', '.join(map(repr, fleet.names))}, and those saved are "
            f"{', '.join(map(repr, entry.names))}. Give a model for each member, by its name and in this order."
        )
    fleet._recipes.update(entry.recipes)
    return fleet
