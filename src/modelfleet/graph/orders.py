"""What the owner of a graph sends its ranks, and what they send back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modelfleet.frameworks.node_engine import Draws, LossParts, NodeHyper, Step
from modelfleet.graph.board import Board
from modelfleet.graph.topology import Topology
from modelfleet.graph.transport import Hub
from modelfleet.recipe import Recipe
from modelfleet.schedules import Event, GraphSpec, Schedule
from modelfleet.types import Json, Kind, Model, State, Tree
from modelfleet.workers.rendezvous import Rendezvous


@dataclass(frozen=True)
class NodeOrder:
    """A node that a rank has to compute."""

    name: str
    model: Model
    framework: str
    seed: int
    state: State
    """State beside the model's own weights, on the host: that of the optimizer, and the number of steps."""


@dataclass(frozen=True)
class RankOrder:
    """Everything that a rank needs to take part in a verb."""

    rank: int
    device: str
    """Its device, as the worker names it."""
    nodes: tuple[NodeOrder, ...]
    topology: Topology
    spec: GraphSpec
    recipe: Recipe | None
    losses: tuple[str, ...]
    """Nodes that have a loss."""
    schedules: Mapping[str, Schedule]
    """Schedules by name: each step says which one it follows."""
    meeting: "str | Rendezvous | Hub"
    """Where the ranks meet: an address for processes, or the hub of threads."""
    size: int
    """Number of ranks."""
    timeout: float
    """Seconds to wait for another rank."""
    kind: Kind
    threads: int
    """Threads of a logical CPU."""
    divides: bool = False
    """True if each loss is divided by a count of its own: there are several, or those of a fleet's members."""
    recompute: frozenset[str] = frozenset()
    """Nodes whose activations are recomputed."""
    evaluating: frozenset[str] = frozenset()
    """Nodes that stay in evaluation mode."""
    clip_norm: float | None = None
    board: Board | None = None
    settings: Mapping[str, Json] = field(default_factory=dict)
    """Settings of the owner's frameworks that change the numbers."""


@dataclass(frozen=True)
class StepOrder:
    """One step, or one batch to evaluate or to predict."""

    schedule: str
    step: Step
    inputs: Mapping[str, Tree]
    """Rows of the whole batch, by the name of the edge that brings them into a node of this rank."""
    targets: Mapping[str, tuple[Tree, ...]]
    """(y,) or (y, sample_weight) of the whole batch, by the loss node."""
    hyper: Mapping[str, NodeHyper]
    draws: Mapping[str, Draws]
    outputs: tuple[str, ...] = ()
    """Nodes of this rank whose outputs are wanted."""


@dataclass(frozen=True)
class StateOrder:
    """No step: the rank reports its state, after it has replaced what it is given."""

    write: Mapping[str, State] = field(default_factory=dict)
    """State to replace, by node."""
    read: bool = True
    """False to report nothing."""
    events: str = ""
    """Schedule whose measured times are wanted."""


@dataclass(frozen=True)
class StepReport:
    """What a rank says after a step."""

    losses: Mapping[str, Mapping[int, LossParts]] = field(default_factory=dict)
    """By loss node and micro-batch."""
    outputs: Mapping[str, Mapping[int, Tree]] = field(default_factory=dict)
    """Outputs on the host, by node and micro-batch."""
    skipped: bool = False
    """True if the step's numbers were not finite, and nothing was updated."""
    failed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By fleet: the members whose numbers were not finite, with their trouble (`frameworks.errors`)."""
    states: Mapping[str, State] = field(default_factory=dict)
    events: Sequence[Event] = ()
    peak_bytes: int | None = None
    """The most bytes of activations that the rank has held in a step; None if it has not counted them."""
