"""Interface of the steps of all lanes on torch, for torch modules and for Keras models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.lane_context import Task
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import BatchRows, Streams
from modelfleet.frameworks.torch.tracing.batching_rules import BatchingRules
from modelfleet.types import State, Tree

Tensors = dict[str, Tensor]


class NoGradientError(CannotFuseError):
    """Raised for a loss that depends on no parameter. Alone, torch refuses its backward pass."""


class FastPathError(CannotFuseError):
    """Raised for an evaluation that has other numbers on torch's fast path, which members alone take."""


class How(NamedTuple):
    """Way in which a step maps over the members of a lane."""

    shared_data: bool
    """True if the data have no member axis."""
    fused: bool
    """True to map one member's computation over the members; False to run a lane of one member as it is."""

    @property
    def axis(self) -> int | None:
        """Return the member axis of the data."""
        return None if self.shared_data else 0


ALONE = How(shared_data=True, fused=False)
"""One member, on rows without a member axis."""


class LaneSteps(Protocol):
    """Steps of a lane as functions of its stacked state, with what programs and engines need to know of them.

    `steps.Steps` also has `row_gradients` and `row_apply`: its rows can be split over devices.
    """

    model: nn.Module
    """Model whose Python runs for all members."""
    modes: dict[str, bool]
    """Modes in which the model is trained, by module."""
    layout: frozenset[str]
    """Parameters that are stored transposed."""
    unused: frozenset[str]
    """Parameters that take no part in the loss."""
    contiguous: bool
    """True if the model needs contiguous weights, for `weight.view(-1)`."""
    differentiates: bool
    """True if the objective takes gradients itself, and needs them to evaluate."""

    @property
    def task(self) -> Task:
        """Return the members' task."""
        ...

    @property
    def can_mask_rows(self) -> bool:
        """Return True if the loss and every metric can leave out padded rows by weights."""
        ...

    def find_unused(self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How) -> None:
        """Find the parameters that take no part in the loss, by one backward pass of the first member alone."""
        ...

    @property
    def train(self) -> Callable[..., Tensor]:
        """Return a function that takes one step of every active member, in place, like `steps.Steps.train`."""
        ...

    @property
    def gradients(self) -> Callable[..., Tree]:
        """Return a function that computes what `apply` needs of a batch, like `steps.Steps.gradients`."""
        ...

    @property
    def apply(self) -> Callable[..., Tensor]:
        """Return a function that updates every active member, in place, like `steps.Steps.apply`."""
        ...

    def evaluate(self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How) -> Tensors:
        """Return the sums `(member, …)` of the loss and the metrics over a batch."""
        ...

    def predict(self, state: State, shared: Tensors, data: Tree, how: How) -> Tree:
        """Return the outputs `(member, row, …)` on a batch of inputs."""
        ...

    def roots(self) -> list[tuple[str, object]]:
        """Return everything whose Python runs while a step is traced, by the names that messages use."""
        ...

    def refuse_other_parameters(self, state: State, shared: Tensors) -> None:
        """Raise `CannotFuseError` if a parameter was frozen or unfrozen since the state was stacked."""
        ...


@contextmanager
def drawing(
    member: Tensors, *, fused: bool, part: BatchRows | None = None, streams: Streams | None = None
) -> Iterator[None]:
    """Run a step in this context: its random operations draw from the members' own streams.

    Args:
        member: The numbers of the members, with their seeds and steps.
        fused: True if the step is mapped over the members.
        part: The place of the rows in their batch, if they are not all of it.
        streams: Other streams than the members' own, for trials.
    """
    # The same rules are used unfused, so that a member's numbers and draws do not depend on the strategy.
    seed, step = member["seed"], member["step"]
    if streams is None and part is None and not fused and not torch.compiler.is_compiling():
        # A trial draws as plain execution does.
        with BatchingRules(), EagerDraws(int(seed[0]), int(step[0])):
            yield
        return
    if streams is None:
        streams = Streams(seed, step, part) if fused else Streams(seed[0], step[0], part)
    with BatchingRules(), DrawFromStreams(streams):
        yield
