"""Engines: the framework's side of a lane.

An engine holds the stacked state of a lane's members on a device and runs the lane's steps.
`modelfleet.testing.engines` checks engines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.lane_context import Task
from modelfleet.frameworks.stacked import WEIGHTS, Given, Positions
from modelfleet.members import Member
from modelfleet.types import Kind, NativeDevice, State, Tensor, Tree

Hyper = Mapping[str, Tensor]
"""Hyperparameters `(slot,)` by name, on the device."""
Pace = tuple[int, float | None]
"""Number of steps that are left, and the seconds per step so far."""
NOTHING_LEFT: Pace = (0, None)
Record = Callable[[Tensor | np.ndarray, np.ndarray | None], None]
"""Takes the losses `(slot,)` of a step or `(step, slot)` of several, and their slots; None for all slots."""
ProcessGroup: TypeAlias = Any
"""Processes that compute the rows of a batch together: an instance of the adapter's `ProcessGroup`."""


class Engine(ABC):
    """Stacked state of a lane's members, and the programs that step it.

    Slots are the rows of the stacked state. "Tensors" are the framework's own. A feed makes batches with the
    adapter's `arrays`.
    """

    device: NativeDevice
    programs: Any
    """Everything that was traced and compiled, for another engine of the same structure and task."""
    undoes_steps: bool = False
    """True if a step that raises leaves the state as it was before, even if memory runs out."""
    checks_targets: bool = True
    """True if the targets of (x, y) can be compared with the model's output on x."""
    steps_per_call: int
    """Best number of steps for one call of `train`; 1 if more steps gain nothing."""
    parts_in_models: Collection[str] = WEIGHTS
    """Parts of the state that the members' models contain themselves: `gather` and `scatter` move these."""
    transposed: Collection[str] = ()
    """Weights that the state holds with their last two axes exchanged."""
    record: Record | None = None
    """Called after every call of `train` and `train_some` with the losses. None if nobody wants them."""
    looks_ahead: bool = False
    """True if it is worth while to give `upcoming` the hyperparameters of the next steps."""
    changed: bool = False
    """True if evaluating or predicting has changed the state since the last `scatter` of all members."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """Return the task of the members; of the first, if they have several of one family."""

    @property
    @abstractmethod
    def fused(self) -> bool:
        """Return True if a step is one program for all members."""

    @property
    @abstractmethod
    def time_ratio(self) -> float:
        """Return how long the steps of a run will take, relative to now: less if they will be compiled."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Return the number of trained numbers per member."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Return the size of the state on the device."""

    @property
    @abstractmethod
    def program(self) -> str:
        """Return how train steps run, in a few words: "traced", "compiled", "jit, 16 steps a call", …"""

    @property
    @abstractmethod
    def untraced(self) -> str | None:
        """Return the reason why every step runs its Python code; None if steps are traced."""

    @property
    def uncompiled(self) -> str | None:
        """Return the reason why steps could not be compiled; None if they could, or if this was not tried."""
        return None

    @property
    def uncaptured(self) -> str | None:
        """Return the reason why steps could not be captured as graphs; None if they could, or if not tried."""
        return None

    @property
    @abstractmethod
    def compiling(self) -> bool:
        """Return True if something is being compiled during the training."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the work that runs during the training, such as compiling."""

    def finish(self, positions: Positions) -> None:  # noqa: B027  most engines have nothing to do
        """End the training of some members as their framework does. It may average their weights, for example."""

    # --- steps. `train` is `apply` of `gradients`, traced and compiled as one.

    @abstractmethod
    def train(self, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take the steps of a batch for the active members.

        A member whose loss or gradient is not finite keeps its last good state, and `trouble` has the reason.

        Args:
            hyper: Hyperparameters `(slot,)`.
            active: `(slot,)` bool: the members that take a step.
            batch: Rows for all slots.
            pace: The number of steps that are left, and the seconds per step so far.
        """

    def upcoming(self, columns: Sequence[Mapping[str, np.ndarray]]) -> list[Hyper]:
        """Return the hyperparameters `(slot,)` of the next steps as tensors, in their order.

        Steps whose columns are the same object have the same tensors, too.
        """
        raise NotImplementedError

    @abstractmethod
    def train_some(self, hyper: Hyper, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take one step of the members in the slots that a batch is for: a result of `first_rows`."""

    @abstractmethod
    def gradients(self, batch: Batch) -> Tree:
        """Return what `apply` needs to finish a step of every member on a batch.

        The state stays as it is. Call `ready` for "train" with a batch like this one first.

        Raises:
            StrategyError: The member's train step can't be taken in parts.
        """

    @abstractmethod
    def apply(self, hyper: Hyper, active: Tensor, gradients: Tree) -> None:
        """Update the active members by what `gradients` returned.

        A member whose loss or gradient is not finite keeps its state, and `trouble` has the reason.
        """

    def split_rows_over(self, group: ProcessGroup | None) -> None:
        """Compute only this rank's rows of every train batch from now on, and sum over the ranks of a group.

        Every rank is a process with the same lane. `ready` and the first step raise `StrategyError` for members
        whose rows depend on each other.

        Args:
            group: The group, or None to compute whole batches again.
        """
        if group is not None:
            raise StrategyError(f"a {type(self).__name__} can't split the rows of a batch over devices.")

    def why_rows_stay_together(self, batch: Batch) -> str | None:
        """Return why the rows of such batches can't be split over devices, and what to do; None if they can."""
        return "its framework can't split the rows of a batch over devices"

    @abstractmethod
    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Prepare the program for batches like this one. For "predict", the batch holds inputs.

        Raises:
            CannotFuseError: The lane is fused, and one program can't step its members.
        """

    @abstractmethod
    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""

    @abstractmethod
    def evaluate(self, totals: Tree | None, batch: Batch) -> Tree:
        """Return the totals of the loss and the metrics with a batch added.

        Args:
            totals: The result of the call before, or None.
            batch: Rows for all slots, or for some. A member without real rows adds nothing.
        """

    @abstractmethod
    def values(self, totals: Tree) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` from the totals of `evaluate`."""

    @abstractmethod
    def predict(self, batch: Batch, positions: Positions | None = None) -> Tree:
        """Return the outputs of some members, or of all, as NumPy arrays `(member, row, …)`.

        A model may change as it predicts, for example a counter. Only the real rows change it. A member without
        real rows stays as it is.

        Args:
            batch: Inputs, for each member its own or the same for all.
            positions: The positions in the lane of the batch's members. A member may be repeated with a count of
                0, so that the call has a number of members that was traced before. None for all slots.
        """

    def look_again(self) -> None:  # noqa: B027  most engines look at every step
        """Compare everything that the models' Python can read, large arrays too, before the next call."""

    @abstractmethod
    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch's data: the x of (x, y), or the data themselves."""

    # --- padding

    @abstractmethod
    def can_mask_padding(self, batch: Batch) -> bool:
        """Return True if row weights can remove the influence of a batch's padding."""

    @abstractmethod
    def rows_are_independent(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone, for this many inputs `(row, …)`."""

    @abstractmethod
    def row_weights(self, counts: np.ndarray, size: int) -> Tensor:
        """Return `(slot, row)`: 1 for a real row, 0 for padding."""

    @abstractmethod
    def first_rows(self, batch: Batch, slots: np.ndarray, count: int) -> Batch:
        """Return a batch of the first `count` rows of the members in some slots."""

    # --- state

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a host array on the device."""

    @abstractmethod
    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: why each member was set aside, by the codes of `errors.REASONS`; 0 for FINE."""

    @abstractmethod
    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the number of steps that changed each member's weights."""

    @abstractmethod
    def clear_trouble(self) -> None:
        """Mark every member as fine, at the start of a fit."""

    @property
    @abstractmethod
    def slots(self) -> np.ndarray:
        """Return `(slot,)`: the position of the member in each slot."""

    @abstractmethod
    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state of some members, by part and name.

        Args:
            positions: The members' positions in the lane. A member may have a slot or rest.
            parts: The parts to read, such as `stacked.WEIGHTS`. Parts that the engine does not have are left out.
                None for all: everything that a run needs to continue.

        Returns:
            Tensors `(member, …)` in the order of `positions`, as the engine stores them.
        """

    def by_width(self, positions: Positions) -> list[list[int]]:
        """Return the rows of some positions by the shapes of the members' tensors. Mostly all are equal."""
        return [list(range(len(positions)))]

    def read_apart(
        self, positions: Positions, parts: Collection[str] | None = None
    ) -> list[tuple[list[int], State]]:
        """Return a copy of the state of some members for another lane, or for a file.

        A lane may hold members of unequal widths, padded to the widest. Here each has its own shapes.

        Returns:
            States `(member, …)` as of `read`, each with the rows of `positions` that it is for.
        """
        return [(list(range(len(positions))), self.read(positions, parts))]

    @abstractmethod
    def write(self, positions: Positions, state: Given) -> None:
        """Replace the state of some members by what `read` or `read_apart` returned, or by NumPy arrays of it.

        Args:
            positions: The members' positions in the lane. A member may have a slot or rest.
            state: Tensors `(member, …)` by part and name. Everything else stays as it is.
        """

    @abstractmethod
    def gather(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state that the models of some members hold into the state here.

        Args:
            positions: The members' positions in the lane. A member may have a slot or rest.
            members: The members, in the order of `positions`.
        """

    @abstractmethod
    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state of some members into their models. Undoes `gather`."""

    def optimizer_tensors(self, position: int) -> Collection[str] | None:
        """Return the names of the tensors in the part `optimizer` that a member's own optimizer has.

        None for all. Members of one lane may have different optimizers; the state has the tensors of all of them.
        """
        return None

    def hyperparameters_in(self, tensors: Collection[str]) -> dict[str, str]:
        """Return the hyperparameters that are tensors of the part `optimizer`: each with the tensor's name.

        Args:
            tensors: The names of a member's tensors. Other hyperparameters are columns of the lane.
        """
        return {}

    @abstractmethod
    def adopt(self, positions: Positions, other: "Engine", sources: Positions) -> None:
        """Copy from another engine what the models of some members do not hold: optimizer state and step counts.

        The structure of a model may have changed in between. What has another shape now is left as it is here.

        Args:
            positions: The members' positions here.
            other: An engine of the same optimizer.
            sources: The members' positions there.
        """

    @abstractmethod
    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members from now on, in this order. The others have none until the next call."""

    @abstractmethod
    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if the tensors that all members shared are still the same in all of them."""

    def objects(self) -> Iterable[tuple[str, object]]:
        """Return the objects, by name, whose mode a step changes while it runs. Other models may hold them."""
        return ()

    def undoing_changes(self) -> AbstractContextManager[None]:
        """Return a context that undoes what evaluating changes in a model that is trained in place."""
        return nullcontext()

    @abstractmethod
    def stream(self) -> AbstractContextManager[object]:
        """Return a context for work in the lane's own thread: on accelerators, the engine's own stream.

        What the caller's stream was given before is done first. What it is given later waits for the context's.
        """

    def park(self) -> None:
        """Move the state off the device, if that has memory of its own. The lane takes no more steps."""
        return

    def stamp(self) -> Hashable:
        """Return a value that is equal later if no step has written to the state in between; None if unknown."""
        return None

    @abstractmethod
    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error of a step means that the device is out of memory."""

    # --- checks and costs

    @abstractmethod
    def check(self, batch: Batch, name: str) -> None:
        """Try one member on two rows before the training, and allocate its metrics.

        Raises:
            InputError: The batch does not fit. The message has the shapes and the model's own error.
        """

    @abstractmethod
    def output_shape(self, batch: Batch, name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of a member's output for two rows; None if it is not a single tensor."""

    @abstractmethod
    def check_targets(self, output_shape: tuple[int, ...] | None, target: Tree, name: str | None) -> None:
        """Check all targets of a data set against the output, if the loss says what they must be."""

    @abstractmethod
    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with targets out of range; None if nothing can be checked."""

    @abstractmethod
    def working_bytes(self, batch: Batch) -> int | None:
        """Return the memory that a train step on such a batch needs beside the state; None if not known."""
