"""Node engines: the framework's side of one node of a graph, on one rank.

A node computes micro-batches: rows of a batch that go through the graph together. The engine keeps what the
backward pass of each of them needs. It never sees edges or other nodes: `graph.rank` hands it inputs and
gradients.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from modelfleet.frameworks.stacked import Given
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind, Model, NativeDevice, State, Tensor, Tree

DrawShapes = tuple[tuple[tuple[int, ...], int | None], ...]
"""For each random draw of a step, in order: its shape, and the axis that has the rows."""


NodeHyper = Mapping[str, float | np.ndarray]
"""Hyperparameters of a node by name; `(member,)` if the node is a fleet."""


@dataclass(frozen=True)
class Draws:
    """Random draws of a step of the whole graph, and where one node's begin."""

    shapes: DrawShapes
    """Shapes of the draws of all nodes, in the order in which the undivided model would draw."""
    first: int
    """Number of this node's first draw."""


@dataclass(frozen=True)
class Step:
    """One step, as all nodes of a graph see it."""

    rows: tuple[tuple[int, int], ...]
    """Start and end of every micro-batch within the batch."""
    train: bool
    """True if the nodes are in training mode, and keep what the backward pass needs."""

    @property
    def count(self) -> int:
        """Return the number of rows of the batch."""
        return self.rows[-1][1]


@dataclass(frozen=True)
class LossParts:
    """What a micro-batch adds to the loss of a step: the loss is the sum of the totals over that of the counts."""

    total: float
    count: float
    sums: Mapping[str, float]
    """What it adds to the metrics of the epoch. "rows" is the number of its rows."""
    members: Mapping[str, "LossParts"] = field(default_factory=dict)
    """What it adds to the loss of each member, if the node is a fleet, whose loss is the sum over its members."""


@dataclass(frozen=True)
class TrialInputs:
    """What a node is tried on: what its model is called with for some rows of data, and for fewer of them.

    An edge may carry tensors whose first axis is not that of the rows, and tensors without rows. So which axis has
    them is told by comparing the shapes.
    """

    whole: Tree
    fewer: Tree
    """The same for the first rows alone. Only its shapes count: the numbers are taken from `whole`."""
    rows: int
    fewer_rows: int


@dataclass(frozen=True)
class NodeTrial:
    """What a node did with a few rows, before anything was trained."""

    outputs: Tree
    fewer_outputs: Tree
    """Outputs for the fewer rows."""
    forward: float
    """Seconds."""
    backward: float
    kept_bytes: int
    """What its backward pass keeps of its forward pass."""
    draws: DrawShapes | str
    """What it draws for which rows; or why that can't be told, and what to do."""
    mixes_rows: bool
    """True if it computes with, or updates its buffers by, the rows of a batch together, as BatchNorm does."""
    changed: frozenset[str] = frozenset()
    """Buffers that its forward has written to."""
    own_streams: bool = False
    """True if its draws are not among those of the graph: those of a fleet's members are their own."""
    drawn: int = 0
    """How often it draws, also if what it draws can't be told by rows."""


class NodeEngine(Protocol):
    """Engine of one node. Trees of tensors are the framework's own, on the node's device.

    Engines that train may have `count_into(held: HeldBytes | None)`: then they say what they keep for backwards.
    """

    trained: bool
    """True if the node has weights that take a gradient."""
    failed: Mapping[str, int]
    """Members of a fleet whose numbers were not finite in this step, with the trouble (`frameworks.errors`)."""

    def begin(self, step: Step, hyper: NodeHyper, draws: Draws) -> None:
        """Start a step. `hyper` are the node's hyperparameters."""
        ...

    def forward(self, micro: int, inputs: Tree, wanted: Collection[int]) -> Tree:
        """Return the outputs for a micro-batch, without a graph of their own.

        Args:
            micro: The number of the micro-batch.
            inputs: What the model is called with: one tree, a tuple of arguments, or a dict of keywords.
            wanted: Numbers of the leaves of `inputs` whose gradients `backward` has to return.
        """
        ...

    def count(self, micro: int, target: Tree) -> float:
        """Return the count by which the loss of the whole batch is divided.

        A fleet keeps the counts of its members, and returns 1.

        Args:
            micro: A micro-batch that has been through `forward`: the others have outputs like its own.
            target: (y,) or (y, sample_weight) of the whole batch.
        """
        ...

    def loss(self, micro: int, target: Tree, divisor: float) -> LossParts:
        """Compute the loss of a micro-batch's outputs, for `backward` divided by a number.

        Args:
            micro: The number of the micro-batch.
            target: (y,) or (y, sample_weight) of its rows.
            divisor: What the gradients are divided by at once.
        """
        ...

    def backward(
        self, micro: int, gradients: Sequence[Tensor | None], *, inputs_only: bool = False
    ) -> list[Tensor]:
        """Add a micro-batch's gradients to those of the step, and return those of the wanted inputs.

        Args:
            micro: The number of the micro-batch.
            gradients: The gradient of every leaf of the outputs; None where there is none.
            inputs_only: Leave those of the weights to `backward_weights`.
        """
        ...

    def backward_weights(self, micro: int) -> None:
        """Add the gradients of the weights that `backward` has left out."""
        ...

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the step so far, to be summed over replicas in place."""
        ...

    def norm(self) -> tuple[float, bool]:
        """Return the squared norm of the gradients, and whether all are finite."""
        ...

    def apply(self, scale: float) -> None:
        """Take the optimizer's step, with all gradients multiplied by `scale`."""
        ...

    def end(self, *, skipped: bool) -> None:
        """End a step. If it was skipped, the buffers are as they were before it, and it does not count."""
        ...

    def try_out(self, inputs: TrialInputs, wanted: Collection[int], *, train: bool) -> NodeTrial:
        """Return what the node does with a few rows, without changing it. `wanted` is as for `forward`."""
        ...

    def place(self, tree: Tree) -> Tree:
        """Return a tree of arrays or tensors as tensors on the node's device."""
        ...

    def read(self, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state, as arrays on the host: tensors `(1, …)` by part and name."""
        ...

    def write(self, state: Given) -> None:
        """Replace the state by part and name."""
        ...


class Nodes(Protocol):
    """What an adapter's optional module `nodes` exports, if the framework's models can be nodes of graphs.

    Some names are optional:

    * `check_output(model, name)`, if an edge does not carry everything that a model may return. It raises
      InputError.
    * `buffer_addresses(model)`, if models may share buffers: where each buffer's numbers are, by its name.
    * `GroupTransport`. Without it, nodes run in threads only.
    """

    @property
    def GroupTransport(self) -> Any:  # noqa: N802  a class
        """Return the class of transports between processes, with a class method `join`."""
        ...

    def compile(self, recipe: Recipe, members: Sequence[Member]) -> None:
        """Raise InputError if a recipe does not fit a node. The models stay as they are."""
        ...

    def prepare(self, recipe: Recipe | None, members: Sequence[Member], kind: Kind) -> Any:
        """Return the tasks of nodes, as `adapter_protocol.Prepared`. Those with a loss have `values`."""
        ...

    def make_node(
        self,
        member: Member,
        task: Any,
        columns: Mapping[str, np.ndarray],
        device: NativeDevice,
        *,
        recompute: bool = False,
    ) -> NodeEngine:
        """Return the engine of a node."""
        ...

    def make_fleet_node(
        self,
        name: str,
        members: Sequence[Member],
        tasks: Sequence[Any],
        columns: Mapping[str, np.ndarray],
        device: NativeDevice,
        *,
        recompute: bool = False,
        isolates: bool = False,
    ) -> NodeEngine:
        """Return the engine of a node that is a fleet. An adapter may leave this out.

        `isolates` is True if nothing depends on the members, so that each may fail by itself.
        """
        ...

    def numbers(self, values: Sequence[float], device: NativeDevice) -> Tensor:
        """Return a tensor of numbers, for a sum over ranks."""
        ...

    def clip_factor(self, norm: float, most: float) -> float:
        """Return what gradients of a norm are multiplied by. Frameworks whose nodes do not train leave it out."""
        ...

    def add(self, total: Tensor, other: Tensor) -> None:
        """Add a tensor to another one in place, whatever device it is on."""
        ...

    def to_host(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor as a NumPy array."""
        ...

    def trained(self, model: Model) -> bool:
        """Return True if any weight of a model takes a gradient."""
        ...

    def fill(self, model: Model, state: Given) -> None:
        """Copy a node's weights, as its engine has read them, into a model of the same structure."""
        ...


def nodes_of(framework: object) -> Nodes | None:
    """Return what an adapter exports for nodes of graphs; None if its models can't be nodes."""
    return getattr(framework, "nodes", None)


def require_nodes(framework: object) -> Nodes:
    """Return what the adapter of a node exports."""
    found = nodes_of(framework)
    assert found is not None
    return found
