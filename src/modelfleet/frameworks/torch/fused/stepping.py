"""Train steps of a lane on its stacked state, by programs."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol

import numpy as np
import torch
from torch import Tensor

from modelfleet.errors import StrategyError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Hyper, Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.stacked import Positions
from modelfleet.frameworks.torch.fused import packing
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.frameworks.torch.fused.capture import Capture
from modelfleet.frameworks.torch.fused.programs import OwnSteps, Programs
from modelfleet.frameworks.torch.fused.steps_protocol import How, LaneSteps, Tensors
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsBySlice
from modelfleet.frameworks.torch.parallel.fused import RowDivision
from modelfleet.frameworks.torch.python_state.checks import StatefulError
from modelfleet.trees import leaves
from modelfleet.types import Kind, State, Tree


class CoefficientSource(Protocol):
    """Source of the optimizer's numbers for the next steps, like `counting.CoefficientsAhead`."""

    def next(self, state: State, hyper: Hyper, active: Tensor) -> CoefficientsBySlice:
        """Return the numbers of the next step of these members."""
        ...

    def one(self, state: State, hyper: Hyper, slots: np.ndarray | None = None) -> CoefficientsBySlice:
        """Return the numbers of one step of a state of the members in some slots; None for all."""
        ...

    def stepped(self, unused: frozenset[str] | None) -> None:
        """Record a step, and the parameters that took no part in it; None if they are not known."""
        ...

    def forget(self) -> None:
        """Read the state again before the next step, because it may have been changed."""
        ...

    def give_slots(self, positions: Positions) -> None:
        """Return the numbers of these members from now on, in this order."""
        ...


class NumberSource(Protocol):
    """Source of the numbers in which the members of a lane differ, like `variants.Variants`."""

    slots: np.ndarray
    """Position of the member in each slot."""

    def given(
        self,
        kind: str,
        state: State,
        data: Tree,
        weights: Tensor | None,
        positions: np.ndarray | None = None,
        *,
        shared: bool,
    ) -> State:
        """Return a state with the numbers that a step on such a batch computes with."""
        ...

    def check(self) -> None:
        """Read the members' numbers again if their Python has changed."""
        ...

    def steps_of(self, position: int) -> LaneSteps:
        """Return the steps that run the Python of a member, or of one with the same numbers."""
        ...

    def cut(self, state: State, position: int) -> State:
        """Return the state of a member in its own shapes, for `steps_of`."""
        ...


class Stepper(Generic[OwnSteps]):
    """Takes the train steps of a lane.

    Args:
        first: The name of the first member, for messages.
        programs: The programs of the members' structure and task.
        shared: The tensors that all members share.
        coefficients: The optimizer's numbers.
        division: Divides the rows of a batch over the ranks of a group. None if that is not possible.
        variants: The members by what their Python computes with. None if it is the same for all.
        capture: Captures the steps. None if the device can't.
    """

    def __init__(
        self,
        first: str,
        programs: Programs[OwnSteps],
        shared: Tensors,
        coefficients: CoefficientSource,
        *,
        division: RowDivision | None = None,
        variants: NumberSource | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.shared = shared
        self.capture = capture
        self.coefficients = coefficients
        self.checked = False  # True once the members were checked in this epoch
        self._first = first
        self._programs = programs
        self._division = division
        self._variants = variants
        self._unfusable: dict[Hashable, CannotFuseError] = {}  # by kind and form of a batch

    def train(self, state: State, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace) -> Iterator[Tensor]:
        """Take the steps of a batch for the active members, in place. Yield the losses `(slot,)` of each step.

        The next step may overwrite them.
        """
        for number in range(batch.steps or 1):
            step = batch if batch.steps is None else batch.step(number)
            coefficients = self.coefficients.next(state, hyper, active)
            yield self._step(state, coefficients, active, step, pace, capture=self.capture)

    def train_some(self, state: State, hyper: Hyper, batch: Batch, pace: Pace) -> Tensor:
        """Take one step of the members in the slots that a batch is for, and return their losses."""
        assert batch.slots is not None
        rows = torch.from_numpy(batch.slots).to(state["member"]["seed"].device)
        part = states.select(state, rows)
        if packing.buffers_of(state) is not None:
            part = packing.pack(part)
        some = {name: column.index_select(0, rows) for name, column in hyper.items()}
        active = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        self.coefficients.forget()
        positions = None if self._variants is None else self._variants.slots[batch.slots]
        numbers = self.coefficients.one(part, some, batch.slots)
        loss = self._step(part, numbers, active, batch, pace, positions)
        states.put(state, rows, part)
        return loss

    def gradients(self, state: State, batch: Batch) -> dict[str, Tree]:
        """Return what `apply` needs of a batch."""
        with self.refusing_state():
            state = self.with_numbers("train", state, batch, batch.weights)
            lead, rest = (state, self.shared), (batch.data, batch.weights)
            return self._programs.gradients(lead, rest, shared_data=batch.shared)

    def apply(self, state: State, hyper: Hyper, active: Tensor, gradients: dict[str, Tree]) -> None:
        """Update the active members by what `gradients` returned."""
        rest = (self.coefficients.next(state, hyper, active), active, gradients)
        with self.refusing_state():
            self._programs.apply("apply", (state, self.shared), rest)
        self.coefficients.stepped(None)

    def _step(
        self,
        state: State,
        coefficients: CoefficientsBySlice,
        active: Tensor,
        batch: Batch,
        pace: Pace,
        positions: np.ndarray | None = None,
        capture: Capture | None = None,
    ) -> Tensor:
        """Take one train step of a state, alone or together with the other ranks. Return the losses.

        Raises:
            CannotFuseError: A batch of this form can't be fused, and it is for more than one member.
        """
        if not self.checked:
            with self.refusing_state():
                self.check_members()
        lead, rest = (state, self.shared), (coefficients, active, batch.data, batch.weights)
        if self._division is not None and self._division.group is not None:
            loss = self._division.step(lead, coefficients, active, batch, pace)
            self.coefficients.stepped(None)
            return loss
        try:
            self.refuse_unfusable("train", batch)
            with self.refusing_state():
                lead = self.with_numbers("train", state, batch, batch.weights, positions), self.shared
                loss, unused = self._programs.train(
                    lead, rest, shared_data=batch.shared, pace=pace, capture=capture
                )
            self.coefficients.stepped(unused if self._programs.fused else None)
            return loss
        except CannotFuseError as error:
            self.remember_unfusable("train", batch, error)
            if len(state["member"]["seed"]) > 1:
                raise
        steps: LaneSteps = self._programs.steps
        if self._variants is not None:
            position = (self._variants.slots if positions is None else positions)[0]
            steps, state = self._variants.steps_of(position), self._variants.cut(state, position)
        with locked_in_mode(steps, train=True):
            loss = steps.train(state, self.shared, *rest, How(batch.shared, fused=False))
        self.coefficients.stepped(None)
        return loss

    def refuse_unfusable(self, kind: Kind, batch: Batch) -> None:
        """Raise the same CannotFuseError for batches of a form that could not be fused, without tracing them."""
        known = self._unfusable.get((kind, batch_form(batch))) if self._unfusable else None
        if known is not None:
            raise known

    def remember_unfusable(self, kind: Kind, batch: Batch, error: CannotFuseError) -> None:
        """Refuse batches like this one from now on."""
        self._unfusable[kind, batch_form(batch)] = error

    @contextmanager
    def refusing_state(self) -> Iterator[None]:
        """Raise StrategyError for Python state that shows only now: no member may run another's Python."""
        try:
            yield
        except StatefulError as error:
            raise StrategyError(
                f"member {self._first!r} and those like it can't stay fused: {error}. "
                f'Use strategy="interleaved", where each member runs its own model.'
            ) from error

    def check_members(self) -> None:
        """Check that the members' Python still does what it did when the last epoch or verb began."""
        self.checked = True
        self._programs.look_again()
        if self._variants is not None:
            self._variants.check()

    def with_numbers(
        self, kind: str, state: State, batch: Batch, weights: Tensor | None, positions: np.ndarray | None = None
    ) -> State:
        """Return a state with the numbers that a step on a batch computes with, if members differ in them.

        Args:
            kind: The step.
            state: The state of all slots, or of some members.
            batch: The batch.
            weights: The weights of its rows.
            positions: The positions of the members; None for those in the slots.

        Raises:
            CannotFuseError: The members differ in more than numbers.
        """
        if self._variants is None:
            return state
        return self._variants.given(kind, state, batch.data, weights, positions, shared=batch.shared)


def batch_form(batch: Batch) -> tuple[Hashable, ...]:
    """Return the shapes and dtypes of a member's batch."""
    return tuple((leaf.shape[0 if batch.shared else 1 :], leaf.dtype) for leaf in leaves(batch.data))
