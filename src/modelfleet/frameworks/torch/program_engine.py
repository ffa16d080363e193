"""Engine of a lane whose stacked state is stepped by traced programs: torch modules, and Keras models on torch."""

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import StrategyError
from modelfleet.frameworks import batches
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.stacked import Given, Positions
from modelfleet.frameworks.stacked_engine import StackedEngine
from modelfleet.frameworks.torch import malloc, row_sums
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.base import Batch, TorchEngine, explained
from modelfleet.frameworks.torch.counting import Coefficients, CoefficientsAhead
from modelfleet.frameworks.torch.fused_parallel import RowDivision
from modelfleet.frameworks.torch.model_locks import borrowed
from modelfleet.frameworks.torch.process_group import ProcessGroup
from modelfleet.frameworks.torch.programs import Programs
from modelfleet.frameworks.torch.python_state.checks import DivergenceCheck, StatefulError
from modelfleet.frameworks.torch.task import Task
from modelfleet.trees import leaves, map_tree, paths
from modelfleet.types import Kind, State, Tree

Pace = tuple[int, float | None]
"""Number of steps left, and seconds per step so far."""


class ProgramEngine(TorchEngine, StackedEngine):
    """Engine that holds a stacked state and steps it by programs (see `frameworks.engine.Engine`)."""

    def __init__(
        self,
        first: str,
        programs: Programs,
        device: torch.device,
        *,
        divergence: DivergenceCheck | None = None,
    ) -> None:
        """Prepare everything but the members' tensors, which a subclass puts into `stacked` and `shared`.

        Args:
            first: The name of the first member, for messages.
            programs: The programs of the members' structure and task.
            device: The device of the lane.
            divergence: A check that the Python of all members still does the same. None if there is nothing to
                compare.
        """
        malloc.keep_pages_for(device)
        self.device = device
        self.programs = programs
        self.layout = programs.steps.layout
        self.shared: dict[str, Tensor] = {}
        self.steps_per_call = 1
        self._first = first
        self._divergence = divergence
        self._coefficients = CoefficientsAhead(programs.task)
        self._checked = False  # True once the members were checked in this epoch
        self._ignores_padding: dict[tuple[int, int], bool] = {}  # by real rows and rows of a batch
        self._independent_rows: dict[int, bool] = {}  # by the size of a batch
        self._group: ProcessGroup | None = None
        self._division = RowDivision(device)
        self._unfusable: dict[Hashable, CannotFuseError] = {}  # by kind and form of a batch

    @property
    def parameters(self) -> int:
        """Return the number of trained numbers per member."""
        return sum(tensor[0].numel() for tensor in self.state["params"].values())

    @property
    def bytes(self) -> int:
        """Return the size of the state on the device."""
        own = sum(tensor.nbytes for tensor in states.tensors(self.state))
        return own + sum(tensor.nbytes for tensor in self.shared.values())

    @property
    def task(self) -> Task:
        """Return the members' task."""
        return self.programs.task

    @property
    def fused(self) -> bool:
        """Return True if a step is one program for all members."""
        return self.programs.fused

    @property
    def program(self) -> str:
        """Return in a word how the train steps run."""
        return self.programs.description

    @property
    def untraced(self) -> str | None:
        """Return why every step runs its Python, or None if the steps are traced."""
        return self.programs.untraced

    @property
    def compiling(self) -> bool:
        """Return True if a program is being compiled beside the training."""
        return self.programs.compiling

    @property
    def prospect(self) -> float:
        """Return the fraction of a step's time that is left after compiling, 1 if nothing will be compiled."""
        return self.programs.prospect

    def stop(self) -> None:
        """Stop every compiler that is still at work."""
        self.programs.stop()

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(
        self,
        hyper: Mapping[str, Tensor],
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
        *,
        shared: bool,
        pace: Pace,
        steps: int | None = None,
    ) -> None:
        """Take one step of the active members, or several on data with a step axis."""
        for step in range(steps or 0):
            self.train(
                hyper, active, map_tree(lambda t, step=step: t[step], data), weights, shared=shared, pace=pace
            )
        if steps is not None:
            return
        rest = (self._next_coefficients(hyper, active), active, data, weights)
        self._step(self.state, rest, shared=shared, pace=pace)

    def gradients(self, data: Tree, weights: Tensor | None = None, *, shared: bool) -> dict[str, Tree]:
        """Return what `apply` needs of a batch."""
        with self._refusing_state():
            return self.programs.gradients((self.state, self.shared), (data, weights), shared_data=shared)

    def apply(self, hyper: Mapping[str, Tensor], active: Tensor, gradients: dict[str, Tree]) -> None:
        """Update the active members by what `gradients` returned."""
        rest = (self._next_coefficients(hyper, active), active, gradients)
        with self._refusing_state():
            self.programs.apply("apply", (self.state, self.shared), rest)
        self._coefficients.stepped(None)

    def train_some(
        self, slots: np.ndarray, hyper: Mapping[str, Tensor], data: Tree, *, shared: bool, pace: Pace
    ) -> None:
        """Take one step of the members in some slots, on data that `cut` returned for them."""
        rows = self.tensor(slots)
        part = states.select(self.state, rows)
        some = {name: column.index_select(0, rows) for name, column in hyper.items()}
        active = torch.ones(len(slots), dtype=torch.bool, device=self.device)
        self._coefficients.forget()
        rest = (self._coefficients_for(part, some), active, data, None)
        self._step(part, rest, shared=shared, pace=pace)
        states.put(self.state, rows, part)

    def _next_coefficients(self, hyper: Mapping[str, Tensor], active: Tensor) -> Coefficients:
        """Return the optimizer's numbers for the next step of all members."""
        return self._coefficients.next(self.state, hyper, active)

    def _coefficients_for(self, state: State, hyper: Mapping[str, Tensor]) -> Coefficients:
        """Return the optimizer's numbers for one step of some members."""
        return self._coefficients.one(state, hyper)

    def _step(
        self, state: State, rest: tuple[Coefficients, Tensor, Tree, Tensor | None], *, shared: bool, pace: Pace
    ) -> None:
        """Take one train step of a state, alone or together with the other ranks.

        Raises:
            CannotFuseError: A batch of this form can't be fused, and it is for more than one member.
        """
        if not self._checked:
            with self._refusing_state():
                self._check_members()
        if self._group is not None:
            self._step_with_group(self._group, state, rest, shared=shared, pace=pace)
            return
        lead, data = (state, self.shared), rest[2]
        try:
            self._refuse_unfusable("train", data, shared=shared)
            with self._refusing_state():
                unused = self.programs.train(lead, rest, shared_data=shared, pace=pace)
            self._coefficients.stepped(unused if self.fused else None)
            return
        except CannotFuseError as error:
            self._unfusable["train", batch_form(data, shared)] = error
            if len(state["member"]["seed"]) > 1:
                raise
        steps = self.programs.steps
        with borrowed(steps, train=True):
            steps.train(*lead, *rest, shared_data=shared, fused=False)
        self._coefficients.stepped(None)

    def _step_with_group(
        self,
        group: ProcessGroup,
        state: State,
        rest: tuple[Coefficients, Tensor, Tree, Tensor | None],
        *,
        shared: bool,
        pace: Pace,
    ) -> None:
        """Take one train step of which this rank computes its own rows."""
        lead, (coefficients, active, data, weights) = (state, self.shared), rest
        self._check_divisible(data, shared=shared)
        part = self._division.own_rows(group, data, weights, shared=shared)
        if part is None:
            numbers, columns = row_sums.zeros(state)
        else:
            numbers, columns = self.programs.row_gradients(lead, part, shared_data=shared, pace=pace)
        group.sum([numbers, columns])
        self.programs.apply("row_apply", lead, (coefficients, active, numbers, columns))
        self._coefficients.stepped(None)

    def _refuse_unfusable(self, kind: Kind, data: Tree, *, shared: bool) -> None:
        """Raise CannotFuseError again for batches of a form that could not be fused. They are not traced again."""
        known = self._unfusable.get((kind, batch_form(data, shared))) if self._unfusable else None
        if known is not None:
            raise known

    @contextmanager
    def _refusing_state(self) -> Iterator[None]:
        """Raise StrategyError for Python state that shows only now: no member may run another's Python."""
        try:
            yield
        except StatefulError as error:
            raise StrategyError(
                f"member {self._first!r} and those like it can't go on as one: {error}. "
                f'Use strategy="interleaved", where each member runs its own model.'
            ) from error

    def _check_members(self) -> None:
        """Check that the members' Python still does what it did when the last epoch or verb began."""
        self._checked = True
        self.programs.look_again()
        if self._divergence is not None:
            self._divergence.check()

    # --- rows ----------------------------------------------------------------------------------------------------

    def spread(self, group: ProcessGroup | None) -> None:
        """Compute only this rank's rows of every train batch from now on, together with the group's other ranks.

        Each rank is given the whole batch and takes the same steps. Evaluating and predicting stay whole on every
        rank. A loss that is not computed row by row (a function, an objective, the output's own `.loss`) must be
        the mean over the rows it sees. `ready` and the first step raise `StrategyError` for a model that can't be
        divided by rows. None for whole batches again.
        """
        self._group = group

    def indivisible(self, data: Tree, *, shared: bool) -> str | None:
        """Return why the rows of batches like this one can't be computed on several devices, and what to do.

        Returns None if they can.
        """
        rows = data if shared else map_tree(lambda leaf: leaf[0], data)
        return self._division.reason_against(
            self.programs.steps, self.state, self.shared, rows, batches.weighted_inputs(rows)
        )

    def _check_divisible(self, data: Tree, *, shared: bool) -> None:
        reason = self.indivisible(data, shared=shared)
        if reason is not None:
            raise StrategyError(f"member {self._first!r} can't be spread over several devices: {reason}.")

    def rows_apart(self, inputs: Tree) -> bool:
        """Return True if one member's output for a row depends on that row alone."""
        size = len(leaves(inputs)[0])
        if size not in self._independent_rows:
            self._independent_rows[size] = self._rows_are_independent(inputs)
        return self._independent_rows[size]

    @abstractmethod
    def _rows_are_independent(self, inputs: Tree) -> bool: ...

    # --- state ---------------------------------------------------------------------------------------------------

    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members from now on. The others rest."""
        super().give_slots(positions)
        self._coefficients.forget()

    def write(self, positions: Positions, state: Given) -> None:
        """Replace the state of some members by part and name."""
        super().write(positions, state)
        self._coefficients.forget()

    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: the trouble of each member by the codes of `errors.REASONS`, 0 for none."""
        return self.state["member"]["trouble"].cpu().numpy()

    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the number of steps that changed each member's weights."""
        return self.state["member"]["step"].cpu().numpy()

    def clear_trouble(self) -> None:
        """Clear every member's trouble at the start of a fit."""
        self.state["member"]["trouble"].zero_()
        self._coefficients.forget()

    def objects(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the modules of the model that is traced for all members."""
        return self.programs.steps.model.named_modules()

    # --- checks --------------------------------------------------------------------------------------------------

    def output_shape(self, batch: Batch, name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of a member's output for a batch, or None if it is no single tensor.

        Raises:
            InputError: The model can't take the batch.
        """
        data = self.inputs(batch.data)

        def shape() -> tuple[int, ...] | None:
            with self._trying(batch, data, name) as (one, few):
                output = self.programs.steps.predict(one, self.shared, few, shared_data=True, fused=False)
            return tuple(output.shape[1:]) if isinstance(output, Tensor) else None

        return self.programs.found(("shape", *batch_layout(data, batch.shared)), shape)

    @contextmanager
    def _trying(self, batch: Batch, data: Tree, name: str) -> Iterator[tuple[State, Tree]]:
        """Yield one member's state and a copy of its data to try it on. Raise InputError for what does not fit."""
        data = data if batch.shared else map_tree(lambda leaf: leaf[0], data)
        few = map_tree(torch.clone, data)  # a forward may write to its input
        model = self.programs.steps.model
        one = states.select(self.state, torch.zeros(1, dtype=torch.int64, device=self.device))
        with explained(name, model, data), self.programs.trial(train=False), torch.random.fork_rng(devices=[]):
            yield one, few

    def working_bytes(self, batch: Batch) -> int | None:
        """Return the memory that a train step takes beside the state, by the tensors that live at once in it."""
        return self.programs.working_bytes


def batch_layout(data: Tree, shared: bool) -> tuple[Hashable, ...]:
    """Return all that a model's Python can see of a batch without its values: the form, and the leaves' paths."""
    return tuple(path for path, _ in paths(data)), batch_form(data, shared)


def batch_form(data: Tree, shared: bool) -> tuple[Hashable, ...]:
    """Return the shapes and dtypes of a member's batch."""
    return tuple((leaf.shape[0 if shared else 1 :], leaf.dtype) for leaf in leaves(data))
