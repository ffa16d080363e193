"""Models of a node: one, or those of a fleet. What the rest of a graph asks of them is here."""

from collections.abc import Sequence

from modelfleet.errors import InputError
from modelfleet.fleet import Fleet
from modelfleet.frameworks.fleet_models import FleetModels
from modelfleet.frameworks.node_engine import nodes_of, require_nodes
from modelfleet.members import Member
from modelfleet.types import Model, State


def fleet_member(name: str, fleet: Fleet, kind: str) -> Member:
    """Return a fleet as a node.

    Raises:
        InputError: Its members are not of one framework, or it can't run them in a graph.
    """
    members = list(fleet._members.values())
    frameworks = {id(member.framework): member.framework for member in members}
    if len(frameworks) > 1:
        names = " and ".join(sorted(framework.NAME for framework in frameworks.values()))
        raise InputError(
            f"the fleet {name!r} has members of {names}. A fleet that is a node is one program: give one of torch "
            f"models."
        )
    (framework,) = frameworks.values()
    if not hasattr(nodes_of(framework), "make_fleet_node"):
        raise InputError(
            f"the fleet {name!r} has {framework.NAME} models, and a {kind} can run fleets of torch models only. "
            f"Make a node of each model."
        )
    return Member(name, fleet_models(fleet), members[0].seed, framework)


def fleet_models(fleet: Fleet) -> FleetModels:
    """Return the models of a fleet as they are now, with what each was compiled with."""
    members = fleet._members.values()
    return FleetModels(
        tuple(fleet._members),
        tuple(member.model for member in members),
        tuple(member.seed for member in members),
        tuple(fleet._recipes[member.name] for member in members),
    )


def models_of(member: Member) -> dict[str, Model]:
    """Return the models of a node by the names that messages use."""
    own = member.model
    if isinstance(own, FleetModels):
        return {f"{member.name}.{name}": model for name, model in zip(own.names, own.models, strict=True)}
    return {member.name: own}


def is_trained(member: Member) -> bool:
    """Return True if any model of a node takes a gradient."""
    return any(require_nodes(member.framework).trained(model) for model in models_of(member).values())


def frozen_names(member: Member) -> list[str]:
    """Return the names of a node's weights that take no gradient, as far as its framework tells."""
    nodes = require_nodes(member.framework)
    names = getattr(nodes, "frozen_names", None)
    if names is None:
        return []
    models = models_of(member)
    alone = len(models) == 1 and member.name in models
    return [name if alone else f"{label}.{name}" for label, model in models.items() for name in names(model)]


def evaluating_nodes(members: Sequence[Member]) -> frozenset[str]:
    """Return the nodes that stay in evaluation mode in training: torch modules, if other nodes are in training
    mode.

    So it is with the parts of an undivided model. If all are in evaluation mode, all are trained as after
    `train()`.
    """
    modes = {
        member.name: bool(getattr(member.model, "training", True))
        for member in members
        if not isinstance(member.model, FleetModels)
    }
    return (
        frozenset(name for name, training in modes.items() if not training) if any(modes.values()) else frozenset()
    )


def copied(member: Member) -> Model:
    """Return a copy of a node's model, or of a fleet's models."""
    own = member.model
    return own.copy(member.framework) if isinstance(own, FleetModels) else member.framework.copy_model(own)


def fill(member: Member, state: State) -> None:
    """Copy a node's weights, as its engine has read them, into its models."""
    own = member.model
    if not isinstance(own, FleetModels):
        require_nodes(member.framework).fill(own, state)
        return
    for row, model in enumerate(own.models):
        rows = {
            part: {name: array[row : row + 1] for name, array in tensors.items()}
            for part, tensors in state.items()
        }
        require_nodes(member.framework).fill(model, rows)
