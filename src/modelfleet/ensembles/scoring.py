"""Evaluating an ensemble: the loss and the metrics of its combined output."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelfleet.each import Each
from modelfleet.errors import InputError
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import LossLike, MetricLike, Tree

Compiled = tuple[LossLike, Sequence[MetricLike]]


def score(
    members: Sequence[Member],
    recipes: Mapping[str, Recipe | None],
    output: Tree,
    target: Tree,
    metrics: Sequence[MetricLike] | None,
    *,
    votes: bool,
) -> dict[str, float]:
    """Return the loss and the metrics of a combined output.

    Args:
        members: The members that it was combined of. The framework of the first computes the numbers.
        recipes: The recipe of each member.
        output: The combined output, or the shares of the votes.
        target: The targets.
        metrics: Names or functions; None for those that the members were compiled with.
        votes: True if the output is shares of votes, which have no loss.

    Raises:
        InputError: It is not known what to compute, or it can't be computed.
    """
    framework: Any = members[0].framework  # has names that an adapter need not have
    if not hasattr(framework, "score"):
        raise InputError(
            f"{framework.NAME} models have no losses and metrics here. Call predict, and compare its arrays with "
            f"the targets."
        )
    first, *others = [_compiled(member, recipes[member.name]) for member in members]
    if metrics is None:
        odd = next((number for number, own in enumerate(others) if not _same(first[1], own[1])), None)
        if odd is not None:
            raise InputError(
                f"members {members[0].name!r} and {members[odd + 1].name!r} were compiled with different metrics. "
                f"Say what to compute: metrics=[...]."
            )
        metrics = first[1]
    loss = None if votes or not all(_same(first[0], own[0]) for own in others) else first[0]
    if loss is None and not metrics:
        raise InputError(
            "there is nothing to compute: the members have no metrics, and no loss for this output. Give metrics, "
            'such as metrics=["accuracy"], or compile the fleet with them.'
        )
    return framework.score(members[0].model, output, target, loss, metrics)


def _compiled(member: Member, recipe: Recipe | None) -> Compiled:
    """Return the loss and the metrics of a member; None and nothing if it was not compiled."""
    own = getattr(member.framework, "compiled", None)
    if own is not None:
        return own(member.model)
    if recipe is None or recipe.missing:
        return None, ()
    loss = recipe.loss
    if isinstance(loss, Each):
        loss = loss.values.get(member.name) if isinstance(loss.values, dict) else None
    return loss, recipe.metrics


def _same(one: object, other: object) -> bool:
    return one is other or bool(one == other)
