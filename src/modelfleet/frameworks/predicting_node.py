"""Nodes of a graph that only predict, by the program that answers for a replica, whatever the framework."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.frameworks.functional import Replica
from modelfleet.frameworks.node_engine import Draws, LossParts, NodeHyper, NodeTrial, Step, TrialInputs
from modelfleet.frameworks.stacked import Given
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tensor, Tree


class PredictingNode:
    """Engine of a node that does not train (see `frameworks.node_engine.NodeEngine`).

    Args:
        name: The node, for errors.
        replica: Has the program.
        host: True if the device is a CPU: edges then carry NumPy arrays, which every framework takes.
        untrained: Why the node does not train, and what to do: a whole sentence.
    """

    trained = False

    def __init__(self, name: str, replica: Replica, *, host: bool, untrained: str) -> None:
        self.name = name
        self.failed: Mapping[str, int] = {}
        self._replica = replica
        self._host = host
        self._untrained = untrained
        self._sizes: set[int] = set()  # numbers of rows that the program was called with
        self._step = Step(((0, 0),), train=False)

    def begin(self, step: Step, hyper: NodeHyper, draws: Draws) -> None:
        """Start a batch."""
        self._step = step

    def forward(self, micro: int, inputs: Tree, wanted: Collection[int]) -> Tree:
        """Return the outputs for a micro-batch."""
        replica = self._replica
        outputs = padded_call(replica.compute, inputs, self._sizes, replica.on_host, replica.place)
        return self._replica.on_host(outputs) if self._host else outputs

    def place(self, tree: Tree) -> Tree:
        """Return arrays, or tensors of any framework, on the node's device."""
        return self._replica.place(tree)

    def end(self, *, skipped: bool) -> None:
        """Do nothing: nothing is kept of a batch."""

    def read(self, parts: Collection[str] | None = None) -> State:
        """Return nothing: the model stays as it is."""
        return {}

    def write(self, state: Given) -> None:
        """Do nothing: there is no state beside the model."""

    # --- what only nodes that train do ---------------------------------------------------------------------------

    def try_out(self, inputs: TrialInputs, wanted: Collection[int], *, train: bool) -> NodeTrial:
        """Raise StrategyError: only a fit tries nodes."""
        raise StrategyError(self._untrained)

    def count(self, micro: int, target: Tree) -> float:
        """Raise StrategyError."""
        raise StrategyError(self._untrained)

    def loss(self, micro: int, target: Tree, divisor: float) -> LossParts:
        """Raise StrategyError."""
        raise StrategyError(self._untrained)

    def backward(
        self, micro: int, gradients: Sequence[Tensor | None], *, inputs_only: bool = False
    ) -> list[Tensor]:
        """Raise StrategyError."""
        raise StrategyError(self._untrained)

    def backward_weights(self, micro: int) -> None:
        """Raise StrategyError."""
        raise StrategyError(self._untrained)

    def gradients(self) -> list[Tensor]:
        """Raise StrategyError."""
        raise StrategyError(self._untrained)

    def norm(self) -> tuple[float, bool]:
        """Raise StrategyError."""
        raise StrategyError(self._untrained)

    def apply(self, scale: float) -> None:
        """Raise StrategyError."""
        raise StrategyError(self._untrained)


def padded_call(
    call: Callable[[Tree], Tree],
    inputs: Tree,
    sizes: set[int],
    host: Callable[[Tree], Tree],
    place: Callable[[Tree], Tree],
) -> Tree:
    """Return what a program returns for some rows. A short batch is padded to a size that was compiled before.

    Args:
        call: The program.
        inputs: The rows.
        sizes: The numbers of rows that the program was called with. This call's is added.
        host: Brings tensors to the host.
        place: Brings them back.
    """
    rows = len(leaves(inputs)[0])
    size = min((known for known in sizes if known >= rows), default=rows)
    sizes.add(size)
    if size == rows:
        return call(inputs)
    outputs = call(place(map_tree(lambda leaf: _padded(leaf, size), host(inputs))))
    return map_tree(lambda leaf: leaf[:rows] if leaf.shape[:1] == (size,) else leaf, outputs)


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    """Return rows with the last one repeated, up to a number of rows."""
    return np.concatenate([array, np.repeat(array[-1:], max(0, size - len(array)), 0)])
