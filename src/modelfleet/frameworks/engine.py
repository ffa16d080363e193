"""Engines: the framework's side of a lane.

An engine holds the stacked state of a lane's members on a device and runs the lane's steps.
`modelfleet.testing.engines` checks engines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.frameworks.stacked import WEIGHTS, Given, Positions
from modelfleet.members import Member
from modelfleet.types import Kind, NativeDevice, State, Tensor, Tree

if TYPE_CHECKING:
    from modelfleet.feeds import Batch

Hyper = Mapping[str, Tensor]
"""Hyperparameters `(slot,)` by name, on the device."""
Pace = tuple[int, float | None]
"""Number of steps that are left, and the seconds per step so far."""


class Engine(ABC):
    """Stacked state of a lane's members, and the programs that step it.

    Slots are the rows of the stacked state. "Tensors" are the framework's own. A feed makes batches with the
    adapter's `arrays`: trees whose leaves are `(slot, row, …)`, or `(row, …)` if `shared`. With `steps`, the
    leaves have one more axis in front: `(step, …)`.
    """

    device: NativeDevice
    programs: Any
    """Everything that was traced and compiled, for another engine of the same structure and task."""
    undoes_steps: bool = False
    """True if a step that raises leaves the state as it was before, also when memory runs out."""
    checks_targets: bool = True
    """True if the targets of (x, y) can be compared with the model's output on x."""
    steps_per_call: int
    """Best number of steps for one call of `train`; 1 if more steps gain nothing."""
    held: Collection[str] = WEIGHTS
    """Parts of the state that the members' models contain themselves: `gather` and `scatter` move these."""
    changed: bool = False
    """True if evaluating or predicting has changed the state since the last `scatter` of all members."""

    @property
    @abstractmethod
    def task(self) -> Any:
        """Return the adapter's `Task` of the members."""

    @property
    @abstractmethod
    def fused(self) -> bool:
        """Return True if a step is one program for all members."""

    @property
    @abstractmethod
    def prospect(self) -> float:
        """Return the part of a step's present time that it will take once compiled; 1 if that is done."""

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
    @abstractmethod
    def compiling(self) -> bool:
        """Return True if something is being compiled during the training."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the work that runs during the training, such as compiling."""

    # --- steps. `train` is `apply` of `gradients`, traced and compiled as one.

    @abstractmethod
    def train(
        self,
        hyper: Hyper,
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
        *,
        shared: bool,
        pace: Pace,
        steps: int | None = None,
    ) -> None:
        """Take one step of the active members, or several.

        A member whose loss or gradient is not finite keeps its last good state, and `trouble` has the reason.

        Args:
            hyper: Hyperparameters `(slot,)`.
            active: `(slot,)` bool: the members that take a step.
            data: A batch.
            weights: None, or a result of `row_weights`.
            shared: True if the leaves of the data have no slot axis.
            pace: The number of steps that are left, and the seconds per step so far.
            steps: The number of steps if data and weights have a step axis.
        """

    @abstractmethod
    def gradients(self, data: Tree, weights: Tensor | None = None, *, shared: bool) -> Tree:
        """Return what `apply` needs to finish a step of every member on a batch.

        The state stays as it is. Call `ready` for "train" with a batch like this one first.

        Args:
            data: A batch, as for `train`.
            weights: None, or a result of `row_weights`.
            shared: True if the leaves of the data have no slot axis.

        Raises:
            StrategyError: The member's train step can't be taken in parts.
        """

    @abstractmethod
    def apply(self, hyper: Hyper, active: Tensor, gradients: Tree) -> None:
        """Update the active members by what `gradients` returned.

        A member whose loss or gradient is not finite keeps its state, and `trouble` has the reason.
        """

    @abstractmethod
    def train_some(self, slots: np.ndarray, hyper: Hyper, data: Tree, *, shared: bool, pace: Pace) -> None:
        """Take one step of the members in some slots, on data `cut` for them."""

    def spread(self, group: Any) -> None:
        """Compute only this rank's rows of every train batch from now on, and sum over the ranks of a group.

        Every rank is a process with the same lane. `ready` and the first step raise `StrategyError` for members
        whose rows depend on each other.

        Args:
            group: An instance of the adapter's `Group`. None to compute whole batches again.
        """
        if group is not None:
            raise StrategyError(f"a {type(self).__name__} can't spread the rows of a batch over devices.")

    def indivisible(self, data: Tree, *, shared: bool) -> str | None:
        """Return why the rows of such batches can't be spread over devices, and what to do; None if they can."""
        return "its framework can't spread the rows of a batch over devices"

    @abstractmethod
    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, data: Tree, *, shared: bool) -> None:
        """Prepare the program for batches like this one. For "predict", `data` are the inputs.

        Raises:
            CannotFuseError: The lane is fused, and one program can't step its members.
        """

    @abstractmethod
    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""

    @abstractmethod
    def evaluate(
        self,
        totals: Tree | None,
        slots: np.ndarray | None,
        data: Tree,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> Tree:
        """Return the totals of the loss and the metrics with a batch added.

        Args:
            totals: The result of the call before, or None.
            slots: None for all members, or the slots that `data` was `cut` for.
            data: A batch.
            weights: None, or a result of `row_weights`.
            counts: The number of real rows of each member. A member with 0 adds nothing.
            size: The number of rows of the batch, padding included.
            shared: True if the leaves of the data have no slot axis.
        """

    @abstractmethod
    def values(self, totals: Tree) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` from the totals of `evaluate`."""

    @abstractmethod
    def predict(self, data: Tree, *, shared: bool, counts: np.ndarray | None = None) -> Tree:
        """Return the outputs `(slot, row, …)` on a batch of inputs.

        A model may change as it predicts, for example a counter. Only the real rows change it. A member without
        real rows stays as it is.

        Args:
            data: A batch of inputs.
            shared: True if the leaves of the data have no slot axis.
            counts: The number of real rows of each member, as in a `Batch`. None if all rows are real.
        """

    def forward(self, data: Tree, *, shared: bool, counts: np.ndarray | None = None) -> Tree:
        """Return the outputs `(slot, row, …)` on a batch of inputs like `predict`, but on the device."""
        return self.predict(data, shared=shared, counts=counts)

    @abstractmethod
    def predict_some(self, positions: Positions, data: Tree, counts: np.ndarray) -> Tree:
        """Return the outputs of some members, each on its own rows, as NumPy arrays `(member, row, …)`.

        Args:
            positions: The members' positions in the lane. A member may be repeated with a count of 0, so that the
                call has a number of members that was traced before.
            data: Inputs `(member, row, …)`, in the order of `positions`.
            counts: The number of real rows of each member. The others are padding.
        """

    @abstractmethod
    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch: the x of (x, y), or the batch itself."""

    @abstractmethod
    def rows(self, outputs: Tree, slot: int, count: int) -> Tree:
        """Return one member's real rows of a batch of outputs, on the host."""

    @abstractmethod
    def concatenate(self, parts: Sequence[Tree]) -> Tree:
        """Return batches of rows as one NumPy array, or as one tree of NumPy arrays."""

    # --- padding

    @abstractmethod
    def maskable(self, batch: "Batch") -> bool:
        """Return True if row weights can remove the influence of a batch's padding."""

    @abstractmethod
    def rows_apart(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone, for this many inputs `(row, …)`."""

    @abstractmethod
    def row_weights(self, counts: np.ndarray, size: int) -> Tensor:
        """Return `(slot, row)`: 1 for a real row, 0 for padding."""

    @abstractmethod
    def cut(self, data: Tree, slots: np.ndarray, count: int, *, shared: bool) -> Tree:
        """Return the first `count` rows of the members in some slots."""

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
                None for all: everything that a run needs to go on.

        Returns:
            Tensors `(member, …)` in the order of `positions`, as the engine stores them.
        """

    @abstractmethod
    def write(self, positions: Positions, state: Given) -> None:
        """Replace the state of some members by what `read` returned, or by NumPy arrays of it.

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
        """Give slots to these members from now on, in this order. The others rest until they are given one."""

    @abstractmethod
    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if the tensors that all members shared are still the same in all of them."""

    def objects(self) -> Iterable[tuple[str, Any]]:
        """Return the objects, by name, whose mode a step changes for a while. Other models may hold them."""
        return ()

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """Return a context for steps in the lane's own thread: on accelerators, the lane's own stream."""

    @abstractmethod
    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error of a step means that the device is out of memory."""

    # --- checks and costs

    @abstractmethod
    def check(self, batch: "Batch", name: str) -> None:
        """Try one member on two rows before the training, and allocate its metrics.

        Raises:
            InputError: The batch does not fit. The message has the shapes and the model's own error.
        """

    @abstractmethod
    def output_shape(self, batch: "Batch", name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of a member's output for two rows; None if it is not a single tensor."""

    @abstractmethod
    def check_targets(self, output_shape: tuple[int, ...] | None, target: Tree, name: str | None) -> None:
        """Check all targets of a data set against the output, if the loss says what they must be."""

    @abstractmethod
    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with targets out of range; None if nothing can be checked."""

    @abstractmethod
    def working_bytes(self, batch: "Batch") -> int | None:
        """Return the memory that a train step on such a batch needs beside the state; None if not known."""
