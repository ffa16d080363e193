"""The check that members of a fleet are what each is when a plain loop trains it alone."""

from collections.abc import Mapping
from typing import Any

import modelfleet as mf
from modelfleet import testing

TOLERANCE = 1e-4
EXACT = 1e-10  # in float64
LONGEST = 100  # steps; rounding grows in longer runs, as it does between two machines


def check(
    fleet: mf.Fleet,
    initial: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    recipes: Mapping[str, Mapping[str, Any]],
    epochs: Mapping[str, int],
    batch: int,
    tolerance: float = TOLERANCE,
) -> float:
    """The largest relative difference between members and their copies trained alone.

    Args:
        fleet: The fleet, trained.
        initial: The members to check, as they were before.
        data: The data of each.
        recipes: The arguments of `testing.alone` for each; none for a Keras model that is compiled.
        epochs: The epochs of each.
        batch: The rows of a batch.
        tolerance: The largest difference to accept.

    Raises:
        RuntimeError: A member differs by more.
    """
    worst = 0.0
    for name, model in initial.items():
        recipe = recipes.get(name, {"optimizer": None})
        alone = testing.alone(model, name, data[name], epochs=epochs[name], batch_size=batch, **recipe)
        worst = max(worst, accept(fleet, name, alone, tolerance))
    return worst


def accept(fleet: mf.Fleet, name: str, alone: Any, tolerance: float = TOLERANCE) -> float:
    """How much a member differs from its copy trained alone; RuntimeError if that is too much."""
    difference, where = testing.largest_difference(fleet[name], alone)
    if not difference <= tolerance:
        raise RuntimeError(f"member {name!r} is not as alone: {where} differs by {difference:.1e}")
    return difference
