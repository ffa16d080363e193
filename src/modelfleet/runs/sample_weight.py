"""Sample weights as a part of the data: (x, y) and weights become (x, y, weights)."""

from collections.abc import Mapping

import numpy as np

from modelfleet.each import Each, per_member, refuse_list
from modelfleet.errors import InputError
from modelfleet.feeds import is_loader
from modelfleet.feeds.checking import as_arrays, is_number_list
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.trees import map_tree
from modelfleet.types import Data, Tensor


def add_sample_weight(
    data: Data, weights: Data, members: Mapping[str, Member], recipes: Mapping[str, Recipe | None]
) -> Data:
    """Return the data with the weights of their rows as a third part.

    Args:
        data: Arrays (x, y), or `each(...)` of such arrays.
        weights: An array with one number for every row, or `each(...)`. For Keras it may be a tree of arrays.
        members: The members of the fleet.
        recipes: The recipe of each member.

    Returns:
        (x, y, weights), or `each(...)` of these.

    Raises:
        InputError: The data are a loader or not (x, y), the numbers of rows differ, or a member has an objective.
    """
    names = list(members)
    if isinstance(weights, Mapping):
        refuse_list(weights, "sample_weight", names)
    own = isinstance(data, Each) or isinstance(weights, Each)
    values = per_member(data, names, "data")
    known: dict[tuple[int, int], Data] = {}  # the same object for the same arrays, so that they are stored once
    found: dict[str, Data] = {}
    arrays: dict[int, Data] = {}
    for name, value, weight in zip(names, values, per_member(weights, names, "sample_weight"), strict=True):
        whose = f" of member {name!r}" if own else ""
        _refuse_objective(name, recipes[name])
        key = id(value), id(weight)
        if key not in known:
            _check_data(value, members[name], f"data{whose}")
            if id(weight) not in arrays:
                arrays[id(weight)] = map_tree(_floats, weight, is_number_list)
            triple = (*value, arrays[id(weight)])
            _check_rows(triple, members[name], whose)
            known[key] = triple
        found[name] = known[key]
    return Each(found) if own else found[names[0]]


def _refuse_objective(name: str, recipe: Recipe | None) -> None:
    if recipe is not None and recipe.objective is not None:
        raise InputError(
            f"sample_weight was given, but member {name!r} has an objective, which computes its loss itself. "
            f"Give the weights as a part of the data, fit((x, y, w)), and use them in the objective."
        )


def _check_data(value: Data, member: Member, label: str) -> None:
    if is_loader(value, member.framework.arrays, label):
        raise InputError(
            f"sample_weight is for arrays, and {label} is a loader. Let it yield (x, y, weights) instead."
        )
    if not isinstance(value, tuple) or len(value) != 2:
        form = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"of type {type(value).__name__}"
        raise InputError(
            f"sample_weight needs data (x, y), and {label} is {form}. Give fit((x, y), sample_weight=w)."
        )


def _check_rows(triple: tuple[Data, Data, Data], member: Member, whose: str) -> None:
    arrays = member.framework.arrays
    _, rows = as_arrays(triple[:2], arrays, f"data{whose}")
    _, weights = as_arrays(triple[2], arrays, f"sample_weight{whose}")
    if weights != rows:
        raise InputError(
            f"sample_weight{whose} has {weights} rows, but data{whose} has {rows}. Give one weight for every row."
        )


def _floats(weight: Data) -> Tensor:
    """Return weights as floats, because counts are common weights."""
    found = np.asarray(weight) if isinstance(weight, list) or hasattr(weight, "to_numpy") else weight
    if "int" in str(getattr(found, "dtype", "")) or "bool" in str(getattr(found, "dtype", "")):
        found = np.asarray(found.cpu() if hasattr(found, "cpu") else found).astype(np.float64)
    return found
