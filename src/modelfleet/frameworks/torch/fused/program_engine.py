"""Engine of a lane whose stacked state is stepped by traced programs: torch modules, and Keras models on torch."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import NOTHING_LEFT, Hyper, Pace
from modelfleet.frameworks.stacked import Given, Positions
from modelfleet.frameworks.stacked_engine import StackedEngine
from modelfleet.frameworks.torch.base import TorchEngine, explained
from modelfleet.frameworks.torch.cpu import malloc
from modelfleet.frameworks.torch.cpu.thread_choice import ThreadChoice
from modelfleet.frameworks.torch.devices import restoring_generators
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.frameworks.torch.fused.programs import OwnSteps, Programs
from modelfleet.frameworks.torch.fused.stepping import Stepper, batch_form
from modelfleet.frameworks.torch.fused.steps_protocol import ALONE
from modelfleet.trees import leaves, map_tree, paths
from modelfleet.types import State, Tree


class RowTrials(NamedTuple):
    """Trials of one member, which show if the rows of a batch influence each other."""

    ignores_padding: Callable[[State, Tree, int], bool]
    """`ignores_padding(one, data, real)`: True if a step on the first `real` rows equals one on all rows, with the
    others at weight 0."""
    rows_are_independent: Callable[[State, Tree], bool]
    """`rows_are_independent(one, inputs)`: True if the output for a row depends on that row alone."""


class ProgramEngine(TorchEngine, StackedEngine, Generic[OwnSteps]):
    """Engine that holds a stacked state, the programs, and a stepper (see `frameworks.engine.Engine`)."""

    steps_per_call = 1

    def __init__(
        self, programs: Programs[OwnSteps], stepper: Stepper[OwnSteps], trials: RowTrials, device: torch.device
    ) -> None:
        """Put an engine together. What is left is `stacked`, the members' state.

        Args:
            programs: The programs of the members' structure and task.
            stepper: Takes the train steps.
            trials: Find out how rows influence each other.
            device: The device of the lane.
        """
        malloc.keep_pages_for(device)
        self.device = device
        self.programs = programs
        self.stepper = stepper
        self.shared = stepper.shared
        self._trials = trials
        self._threads = ThreadChoice()
        self._ignores_padding: dict[tuple[int, int], bool] = {}  # by real rows and rows of a batch
        self._independent_rows: dict[int, bool] = {}  # by the size of a batch

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
    def uncompiled(self) -> str | None:
        """Return why the steps could not be compiled; None if they could, or if this has not been tried."""
        return self.programs.uncompiled

    @property
    def uncaptured(self) -> str | None:
        """Return why the steps could not be captured; None if they could, or if this has not been tried."""
        return None if self.stepper.capture is None else self.stepper.capture.failure

    @property
    def compiling(self) -> bool:
        """Return True if a program is being compiled beside the training."""
        return self.programs.compiling

    @property
    def time_ratio(self) -> float:
        """Return how long the steps of a run will take, relative to now: less if they will be compiled."""
        return self.programs.time_ratio

    def stop(self) -> None:
        """Stop every compiler that is still at work, and give up the memory of captured steps."""
        self.programs.stop()
        if self.stepper.capture is not None:
            self.stepper.capture.forget()

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(self, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take the steps of a batch for the active members."""
        with self._threads(batch.steps or 1):
            steps = self.stepper.train(self.state, hyper, active, batch, pace)
            keep = self.record is not None and self.stepper.capture is not None
            losses = [loss.clone() if keep else loss for loss in steps]
        if self.record is not None:
            for loss in losses:
                self.record(loss, None)

    def train_some(self, hyper: Hyper, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take one step of the members in the slots that a batch is for."""
        loss = self.stepper.train_some(self.state, hyper, batch, pace)
        if self.record is not None:
            self.record(loss, batch.slots)

    def gradients(self, batch: Batch) -> dict[str, Tree]:
        """Return what `apply` needs of a batch."""
        return self.stepper.gradients(self.state, batch)

    def apply(self, hyper: Hyper, active: Tensor, gradients: dict[str, Tree]) -> None:
        """Update the active members by what `gradients` returned."""
        self.stepper.apply(self.state, hyper, active, gradients)

    def park(self) -> None:
        """Move the state to the host. Everything but stepping works on it there."""
        if self.device.type == "cpu":
            return
        self.device = torch.device("cpu")
        self.stacked = self.stacked.moved(Tensor.cpu, states.Rows(self.device))
        self.stepper.coefficients.forget()
        self.programs.forget_state()
        if self.stepper.capture is not None:
            self.stepper.capture.forget()

    def stamp(self) -> Hashable:
        """Return the versions of the state's tensors; None on the host, or if programs write without counting."""
        if self.device.type == "cpu" or not self.programs.counts_writes:
            return None
        return tuple((id(tensor), tensor._version) for tensor in states.tensors(self.state))

    def look_again(self) -> None:
        """Compare everything that the models' Python can read, large arrays too, before the next call."""
        self.programs.look_again()

    # --- rows ----------------------------------------------------------------------------------------------------

    def can_mask_padding(self, batch: Batch) -> bool:
        """Return True if padded rows can be weighted out without changing the result.

        BatchNorm, for example, depends on every row of a batch. So for one member, a step on a padded batch is
        compared with a step on the real rows alone.
        """
        if not self.programs.steps.can_mask_rows:
            return False
        index, real = batch.fewest_rows()
        key = (real, batch.size)
        if key not in self._ignores_padding:
            self._ignores_padding[key] = self._trials.ignores_padding(self._one(index), batch.member(index), real)
        return self._ignores_padding[key]

    def rows_are_independent(self, inputs: Tree) -> bool:
        """Return True if one member's output for a row depends on that row alone."""
        size = len(leaves(inputs)[0])
        if size not in self._independent_rows:
            self._independent_rows[size] = self._trials.rows_are_independent(self._one(0), inputs)
        return self._independent_rows[size]

    def _one(self, slot: int) -> State:
        """Return a copy of one member's state, `(1, …)`."""
        return states.select(self.state, self.tensor(np.array([slot])))

    # --- state ---------------------------------------------------------------------------------------------------

    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members from now on. The others rest."""
        super().give_slots(positions)
        self.stepper.coefficients.give_slots(self.slots)

    def write(self, positions: Positions, state: Given) -> None:
        """Replace the state of some members by part and name."""
        super().write(positions, state)
        self.stepper.coefficients.forget()

    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: the trouble of each member by the codes of `errors.REASONS`, 0 for none."""
        return self.state["member"]["trouble"].cpu().numpy()

    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the number of steps that changed each member's weights."""
        return self.state["member"]["step"].cpu().numpy()

    def clear_trouble(self) -> None:
        """Clear every member's trouble at the start of a fit."""
        self.state["member"]["trouble"].zero_()
        self.stepper.coefficients.forget()
        self.stepper.checked = False  # a callback may change numbers before the first step

    def objects(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the modules of the model that is traced for all members."""
        return self.programs.steps.model.named_modules()

    # --- checks --------------------------------------------------------------------------------------------------

    def output_shape(self, batch: Batch, name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of a member's output for a batch, or None if it is no single tensor.

        Raises:
            InputError: The model can't take the batch.
        """
        batch = replace(batch, data=self.inputs(batch.data))

        def shape() -> tuple[int, ...] | None:
            with self._trying(batch, name) as (one, few):
                output = self.programs.steps.predict(one, self.shared, few, ALONE)
            return tuple(output.shape[1:]) if isinstance(output, Tensor) else None

        return self.programs.found(("shape", *batch_layout(batch)), shape)

    @contextmanager
    def _trying(self, batch: Batch, name: str) -> Iterator[tuple[State, Tree]]:
        """Yield one member's state and a copy of its rows to try it on. Raise InputError for what does not fit."""
        rows, model = batch.member(0), self.programs.steps.model
        few = map_tree(torch.clone, rows)  # a forward may write to its input
        with explained(name, model, rows), self.programs.trial(train=False), restoring_generators(self.device):
            yield self._one(0), few

    def working_bytes(self, batch: Batch) -> int | None:
        """Return the memory that a train step takes beside the state, by the tensors that live at once in it."""
        return self.programs.working_bytes


def batch_layout(batch: Batch) -> tuple[Hashable, ...]:
    """Return all that a model's Python can see of a batch without its values: the form, and the leaves' paths."""
    return tuple(path for path, _ in paths(batch.data)), batch_form(batch)
