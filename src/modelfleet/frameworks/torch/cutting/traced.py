"""A model as a graph of operations, whichever way it was traced."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec

from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree


@dataclass(frozen=True)
class Traced:
    """A graph that computes what a model computes, from the leaves of its inputs to the leaves of its output.

    Attributes:
        graph: The operations. `get_attr` and `call_module` nodes name what is in the model by its path there.
        model: The model that was traced.
        constants: Tensors by path that the trace has made, and the model does not have.
        structure: How the leaves of the output form the model's output.
        how: How it was traced, for people.
    """

    graph: fx.Graph
    model: nn.Module
    constants: dict[str, Tensor]
    structure: TreeSpec
    how: str


def attribute(owner: nn.Module, path: str) -> Any:
    """Return what a model has at a path, such as `layers.0.weight`.

    Raises:
        AttributeError: There is nothing.
    """
    found: Any = owner
    for name in path.split("."):
        found = getattr(found, name)
    return found


def rows_of(example: Tree) -> int:
    """Return the number of rows of a batch: the length of the first axis of its first tensor that has one."""
    return next((len(leaf) for leaf in leaves(example) if leaf.ndim), 0)


def with_rows(example: Tree, count: int) -> Tree:
    """Return a batch with another number of rows, which repeats those that it has."""
    rows = rows_of(example)

    def resized(leaf: Tensor) -> Tensor:
        if not leaf.ndim or len(leaf) != rows:
            return leaf
        return leaf[[number % rows for number in range(count)]]

    return map_tree(resized, example)
