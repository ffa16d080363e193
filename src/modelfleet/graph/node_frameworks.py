"""Frameworks of a graph's nodes: what they say of a recipe and of edges, and what does not go across them."""

from collections.abc import Sequence

from modelfleet.errors import StrategyError
from modelfleet.frameworks.node_engine import require_nodes
from modelfleet.graph.topology import Topology
from modelfleet.members import Member
from modelfleet.recipe import Recipe


def compile_nodes(recipe: Recipe, members: Sequence[Member]) -> None:
    """Have the nodes' framework check a recipe. The gradient is clipped by the graph, as one.

    Raises:
        InputError: The recipe does not fit a node.
        StrategyError: The nodes are of several frameworks.
    """
    first = members[0]
    for other in members:
        if other.framework is not first.framework:
            raise StrategyError(
                f"node {first.name!r} is a {first.framework.NAME} model and node {other.name!r} a "
                f"{other.framework.NAME} model. Gradients do not cross from one framework to another, so such a "
                f"graph only predicts. To train, give models of one framework."
            )
    require_nodes(first.framework).compile(recipe.only([member.name for member in members]), members)


def check_edges(topology: Topology, members: Sequence[Member]) -> None:
    """Raise InputError if a node's output has something that an edge does not carry, such as a mask of Keras."""
    for member in members:
        check = getattr(require_nodes(member.framework), "check_output", None)
        if topology.out_of[member.name] and check is not None:
            check(member.model, member.name)


def refuse_processes(members: Sequence[Member], strategy: str) -> None:
    """Raise StrategyError if the nodes of a framework can't be in processes."""
    for member in members:
        if strategy != "threads" and not hasattr(require_nodes(member.framework), "GroupTransport"):
            raise StrategyError(
                f"node {member.name!r} is a {member.framework.NAME} model, and those run in threads of one "
                f'process. Leave strategy out, or say strategy="threads"; name devices of this machine.'
            )
