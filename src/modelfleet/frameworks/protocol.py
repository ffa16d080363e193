"""What the layers above ask of a framework's adapter, and of the engine that it gives a lane.

An adapter is a package `modelfleet.frameworks.<name>` whose `__init__` exports the names of `Adapter`. An engine
holds the stacked state of a lane's members on a device and runs the lane's steps. `modelfleet.testing.conformance`
checks both.
"""
# ruff: noqa: N802  an adapter exports classes and constants, and a protocol says so by properties

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from modelfleet.devices import Device, Memory
from modelfleet.errors import FleetError, StrategyError
from modelfleet.frameworks.stacked import PARTS, WEIGHTS, Positions, StackedState, by_part, by_path
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import NativeDevice, State, Tensor, Tree

# Reasons a member was set aside, as an engine's `trouble` tells them.
FINE, LOSS, GRADIENT, SCALE = 0, 1, 2, 3
REASONS = {
    LOSS: "its loss became NaN or infinite",
    GRADIENT: "its gradient became NaN or infinite",
    SCALE: "its float16 gradients overflowed at every loss scale",
}


class CannotFuseError(FleetError):
    """A step can't be run for several members at once; says which operation is in the way.

    `shared`: what is in the way is state that members which take turns would share, too.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class StepError(FleetError):
    """The steps of some members raised. Those of the others were taken; theirs are as they were before.

    `causes` has what each raised, by slot.
    """

    def __init__(self, causes: Mapping[int, Exception]) -> None:
        super().__init__("; ".join(f"slot {slot}: {type(e).__name__}: {e}" for slot, e in causes.items()))
        self.causes = dict(causes)


class Task(Protocol):
    """What the members of one lane have in common beside their structure. Equal tasks may be fused."""

    @property
    def summary(self) -> str:
        """The task in a line, for checkpoints: what must be the same for a run to go on."""
        ...


class Prepared(Protocol):
    """A recipe for the members of one framework, in their order."""

    @property
    def tasks(self) -> Sequence[Task]:
        """The task of each; the same object for members that may be fused."""
        ...

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Hyperparameters `(member,)` that are no part of the state; may be empty."""
        ...

    @property
    def schedules(self) -> Sequence[Any]:
        """What each member's schedule was compiled as; for `Adapter.Schedules`."""
        ...


class Schedules(Protocol):
    """The hyperparameters of a lane's members over the steps of a fit."""

    @property
    def by_step(self) -> bool:
        """Whether the columns may change from one step to the next, not only from epoch to epoch."""
        ...

    def at(self, steps: np.ndarray, /) -> Mapping[str, np.ndarray]:
        """The columns for members that have taken so many steps; the same object as long as nothing changes."""
        ...

    def end_epoch(self, values: Sequence[Mapping[str, float]]) -> None:
        """Tell every member's metrics of an epoch, for schedules that go by them."""
        ...

    def state(self) -> Any:
        """Where they are, in JSON's terms."""
        ...

    def restore(self, state: Any, /) -> None:
        """Take up what `state` gave."""
        ...


class Adapter(Protocol):
    """The names that a framework's package exports."""

    @property
    def NAME(self) -> str:
        """What the package is called."""
        ...

    @property
    def arrays(self) -> Any:
        """A module of the form `feeds.ArrayOperations`, and with `host(tensor)`: its numbers in NumPy."""
        ...

    @property
    def files(self) -> Any:
        """A module with `save(tensors, path)` and the reading functions of `frameworks.torch.files`."""
        ...

    def make_engine(
        self,
        members: Sequence[Member],
        task: Any,
        columns: Mapping[str, np.ndarray],
        device: NativeDevice,
        *,
        fused: bool,
        programs: Any = None,
    ) -> "Engine":
        """Return the engine of a lane.

        Args:
            members: The lane's members, of one structure and task.
            task: The `Task` that the members have in common.
            columns: Hyperparameters `(member,)` that are no part of the state.
            device: The device, as `native` gave it.
            fused: True if a step is to be one program for all members.
            programs: The `.programs` of another engine of the same structure and task, so that nothing is traced
                again.
        """
        ...

    @property
    def Schedules(self) -> Callable[..., Schedules]:
        """`Schedules(schedules, columns, task, per_epoch, epochs, *, names)` of a lane's members.

        `per_epoch` is None where nobody knows how long an epoch is.
        """
        ...

    @property
    def Replica(self) -> Callable[[Any, Any, str], "Replica"]:
        """`Replica(model, device, precision)`; `device` is what `native` gave."""
        ...

    @property
    def PRECISIONS(self) -> Collection[str]:
        """Those that `Replica` takes."""
        ...

    def is_model(self, value: Any) -> bool:
        """Whether this adapter takes it as a model. Called for values whose class is of the framework."""
        ...

    def inputs(self, batch: Any) -> Any:
        """The inputs of a batch: the x of (x, y), or the batch itself; as `Engine.inputs`."""
        ...

    def seeding(self, seed: int) -> AbstractContextManager[None]:
        """Seed the framework's global generators for a while, for a factory to run in; then they are as before."""
        ...

    def check_model(self, model: Any, name: str) -> None:
        """Refuse a model that can't be a member, such as one whose weights are not there yet."""
        ...

    def copy_model(self, model: Any) -> Any:
        """A model of its own with the same weights."""
        ...

    def compile(self, recipe: Recipe, members: Sequence[Member]) -> None:
        """Check a recipe for these members, and do once what must be done once (Keras: `model.compile`)."""
        ...

    def prepare(self, recipe: Recipe | None, members: Sequence[Member], kind: str) -> Prepared:
        """The tasks of members; `recipe` is None if `Fleet.compile` was not called for them. `kind` is "train",
        "evaluate" or "predict": what is to be done. Raises `InputError` if that needs a recipe."""
        ...

    def signature(self, model: Any) -> Hashable:
        """A model's structure: equal for models that may be fused."""
        ...

    def difference(self, a: Any, b: Any) -> str | None:
        """Say where two signatures first differ, as in "features.3.stride is 2, not 1"."""
        ...

    def trained_twice(self, models: Sequence[Any]) -> tuple[int, int, str] | None:
        """Two models that would train the very same variable, and its name; None if there are none."""
        ...

    def accelerators(self) -> list[Device]:
        """Every accelerator that the framework can use in this process."""
        ...

    def choose(self, wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
        """The devices to use, by `devices.chosen`; None: choose."""
        ...

    def native(self, device: Device) -> Any:
        """The framework's own device."""
        ...

    # An adapter whose steps on the CPU take as many threads as the calling thread was told to may also have
    # `threads() -> int` and `use_threads(count)`: then logical CPU devices have threads of their own.

    # An adapter whose engines can `spread` also has `Group`, as in `frameworks.torch.parallel`. One whose models
    # are more than replicas need may have `frozen(model)`: that is sent to them, and given to `Replica`, instead.
    # One in which a program can set what changes a model's numbers, such as a default dtype, has `settings()` and
    # `using(settings)`: so workers compute with what their owner has set.

    def memory(self, device: Any) -> Memory | None:
        """The memory of one of the framework's own devices; None if it does not tell, as of the CPU."""
        ...

    def randomness(self) -> Any:
        """The state of the global generator that this framework's loaders shuffle with, as a tensor; or None."""
        ...

    def restore_randomness(self, state: Any) -> None:
        """Put that generator back into a state."""
        ...

    def weight_bytes(self, model: Any) -> int:
        """What a model's weights take."""
        ...

    def weights_key(self, model: Any) -> Hashable:
        """What models must have in common for their weights to be stacked in one file."""
        ...

    def stacked_weights(self, models: Sequence[Any]) -> Mapping[str, Any]:
        """The weights of models of one key, `(member, …)` each, for `files`."""
        ...

    def fill(self, model: Any, tensors: Mapping[str, Any]) -> str | None:
        """Copy one member's weights into a model; gives the first thing that does not fit instead."""
        ...


class Replica(Protocol):
    """A model as it is, to be asked only.

    On the CPU its weights stay where they are, in memory that others may read, too: nothing is ever written there.
    """

    pads: bool
    """Whether it is best asked for batches of few sizes, as each is a program to compile."""

    def __call__(self, rows: Any) -> Any:
        """The model's outputs on a tree of NumPy arrays `(row, …)`, as one."""
        ...

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error that it raised says that the device is out of memory."""
        ...

    def broken(self, error: BaseException) -> bool:
        """Whether, after an error that it raised, this process can compute nothing more on the device."""
        ...

    def close(self) -> None:
        """Leave the model as it was."""
        ...


class Engine(ABC):
    """A lane's framework side: the stacked state of its members, and the programs that step it.

    Inherit from it: an engine that lacks a method can't be made. `modelfleet.testing.engines` checks what they do.

    Slots are the rows of the stacked state. "Tensors" are the framework's own. Batches come as the feed made them
    from the adapter's `arrays`: trees whose leaves are `(slot, row, …)`, or `(row, …)` if `shared`; with `steps`
    they have one more axis in front, `(step, …)`.
    """

    device: Any
    programs: Any
    """What was traced and compiled, to be handed to another engine of the same structure and task."""
    undoes_steps: bool = False
    """Whether a step that raises, for want of memory too, leaves the state as it was before."""
    checks_targets: bool = True
    """Whether the targets of (x, y) can be told to fit the model's output on x."""
    several: int
    """How many steps a call of `train` best takes; 1 if there is nothing to win."""

    @property
    @abstractmethod
    def task(self) -> Any:
        """What the members are to do: a `Task` of the adapter's."""

    @property
    @abstractmethod
    def fused(self) -> bool:
        """Whether a step is one program for all members."""

    @property
    @abstractmethod
    def prospect(self) -> float:
        """The part of a step's present time that it will take once all is compiled; 1 if nothing is to come."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Trained numbers per member."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """What the state takes on the device."""

    @property
    @abstractmethod
    def program(self) -> str:
        """How the train steps run, in a few words: "traced", "compiled", "jit, 16 steps a call", …"""

    @property
    @abstractmethod
    def untraced(self) -> str | None:
        """Why every step runs its Python, if it does."""

    @property
    @abstractmethod
    def compiling(self) -> bool:
        """Whether something is being compiled beside the training now."""

    @abstractmethod
    def stop(self) -> None:
        """End what goes on beside the training."""

    # --- steps

    @abstractmethod
    def train(
        self,
        hyper: Any,
        active: Any,
        data: Any,
        weights: Any,
        *,
        shared: bool,
        pace: tuple[int, float | None],
        steps: int | None = None,
    ) -> None:
        """One step of the active members, or `steps` of them on data with a step axis.

        `hyper` and `active` are tensors of the columns and of `(slot,)` bool. `weights` is None or what
        `row_weights` gave. `pace` is the number of steps left and the seconds per step so far. A member whose loss
        or gradient is not finite keeps its last good state, and its trouble is noted.
        """

    # A step in parts: `train` is `apply` of `gradients`, traced and compiled as one.

    def forward(self, data: Tree, *, shared: bool, counts: np.ndarray | None = None) -> Tree:
        """Return the outputs `(slot, row, …)` on a batch of inputs as `predict` does, but on the device."""
        return self.predict(data, shared=shared, counts=counts)

    @abstractmethod
    def gradients(self, data: Tree, weights: Tensor | None = None, *, shared: bool) -> Any:
        """Return what a step of every member makes of a batch before its optimizer does: a tree for `apply`.

        The state stays as it is. Call `ready` for "train" with a batch like this one first.

        Args:
            data: A batch, as for `train`.
            weights: None, or what `row_weights` gave.
            shared: True if the leaves of the data have no slot axis.

        Raises:
            StrategyError: The member's train step can't be taken in parts.
        """

    @abstractmethod
    def apply(self, hyper: Any, active: Tensor, gradients: Any) -> None:
        """Update the active members by what `gradients` returned.

        A member whose loss or gradient is not finite keeps its state, and its trouble is noted.
        """

    @abstractmethod
    def train_some(self, slots: np.ndarray, hyper: Any, data: Any, *, shared: bool, pace: Any) -> None:
        """One step of the members in some slots, on data `cut` for them."""

    def spread(self, group: Any) -> None:
        """Compute only this rank's rows of every train batch from now on, and sum over the ranks of a group, each
        a process with the very same lane (None: whole batches again). `ready` and the first step raise
        `StrategyError` for members whose rows can't be told apart."""
        if group is not None:
            raise StrategyError(f"a {type(self).__name__} can't spread the rows of a batch over devices.")

    def indivisible(self, data: Any, *, shared: bool) -> str | None:
        """Why the rows of batches like this one can't be spread over devices, and what to do; None if they can."""
        return "its framework can't spread the rows of a batch over devices"

    @abstractmethod
    def ready(self, kind: str, hyper: Any, active: Any, data: Any, *, shared: bool) -> None:
        """Have the program for batches like this one ("train", "evaluate", "predict"; for "predict" `data` are the
        inputs). Raises `CannotFuseError` if a fused lane can't have it."""

    @abstractmethod
    def epoch_values(self) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` since the last call; the next epoch begins at nothing."""

    @abstractmethod
    def evaluate(
        self, totals: Any, slots: Any, data: Any, weights: Any, counts: np.ndarray, size: int, *, shared: bool
    ) -> Any:
        """`totals` (None at first) with a batch added. `slots` is None for all, or those that `data` was cut for;
        members whose count is 0 add nothing."""

    @abstractmethod
    def values(self, totals: Any) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` of what `evaluate` added up."""

    @abstractmethod
    def predict(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """The outputs `(slot, row, …)` on a batch of inputs.

        `counts` says how many rows are each member's own, as in a `Batch`; None: all are. What a model changes as
        it predicts, as a counter, is changed by these rows alone, and stays as it is for a member without rows.
        """

    @abstractmethod
    def predict_some(self, positions: Positions, data: Tree, counts: np.ndarray) -> Tree:
        """Return the outputs of some members, each on rows of its own, as NumPy arrays `(member, row, …)`.

        Args:
            positions: The members' positions in the lane. A member that fills up a call to a size that was traced
                before comes a second time, with a count of 0.
            data: Inputs `(member, row, …)`, in the order of `positions`.
            counts: How many rows are each member's own. The others are padding.
        """

    @abstractmethod
    def inputs(self, data: Any) -> Any:
        """The inputs of a batch: the x of (x, y), or the batch itself."""

    @abstractmethod
    def rows(self, outputs: Any, slot: int, count: int) -> Any:
        """One member's real rows of a batch of outputs, on the host."""

    @abstractmethod
    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Batches of rows as one array (or tree of arrays) of NumPy."""

    # --- which rows count

    @abstractmethod
    def maskable(self, batch: Any) -> bool:
        """Whether padded rows can be weighted out of a batch without being felt."""

    @abstractmethod
    def rows_apart(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone, for this many inputs `(row, …)`."""

    @abstractmethod
    def row_weights(self, counts: np.ndarray, size: int) -> Any:
        """`(slot, row)`: 1 for a real row, 0 for padding."""

    @abstractmethod
    def cut(self, data: Any, slots: np.ndarray, count: int, *, shared: bool) -> Any:
        """The first `count` rows of the members in some slots."""

    # --- state

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Any:
        """A host array on the device."""

    @abstractmethod
    def trouble(self) -> np.ndarray:
        """`(slot,)`: what went wrong, by the codes of `REASONS`; 0 where nothing did."""

    @abstractmethod
    def steps_taken(self) -> np.ndarray:
        """`(slot,)`: the steps that changed each member's weights."""

    @abstractmethod
    def forgive(self) -> None:
        """Begin a fit with nobody in trouble."""

    held: Collection[str] = WEIGHTS
    """The parts of a state that members' models hold themselves."""

    @property
    @abstractmethod
    def positions(self) -> np.ndarray:
        """The positions of all members."""

    @property
    @abstractmethod
    def slots(self) -> np.ndarray:
        """`(slot,)`: the position of the member in each slot."""

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
    def write(self, positions: Positions, state: State) -> None:
        """Replace the state of some members by what `read` returned, or by NumPy arrays of it.

        Args:
            positions: The members' positions in the lane. A member may have a slot or rest.
            state: Tensors `(member, …)` by part and name. What is not in it stays as it is.
        """

    @abstractmethod
    def gather(self, members: Sequence[Member]) -> State:
        """Return what the models of some members hold, for `write`: the parts `held`."""

    @abstractmethod
    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state of the members at some positions into their models."""

    def refresh(self, positions: Positions, members: Sequence[Member]) -> None:
        """Replace the state of the members at some positions by what their models hold."""
        self.write(positions, self.gather(members))

    @abstractmethod
    def narrow(self, positions: np.ndarray) -> None:
        """Give slots only to these members from now on, in this order. The others rest."""

    @abstractmethod
    def widen(self) -> None:
        """Give every member its slot again."""

    @abstractmethod
    def adopt(self, position: int, other: "Engine", source: int) -> None:
        """Write what still fits of the optimizer state and the step count that a member has in another engine.

        Args:
            position: The member's position here.
            other: An engine of the same optimizer.
            source: The member's position there.
        """

    @abstractmethod
    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if the tensors that all members shared are still the same in all of them."""

    def objects(self) -> Iterable[tuple[str, Any]]:
        """Return the objects, by name, whose mode a step changes for a while. Other models may hold them."""
        return ()

    def write_changes(self, members: Sequence[Member]) -> bool:
        """Copy what evaluating and predicting have changed into the models. Return True if anything has."""
        return False

    def write_back(self, members: Sequence[Member]) -> None:
        """Copy every member's state into its own model."""
        self.scatter(self.positions, members)

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of the whole state by path: `params/0.weight`."""
        return by_path(self.read(self.positions))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the whole state by what `tensors` returned, or by NumPy arrays of it."""
        self.write(self.positions, {**{part: {} for part in PARTS}, **by_part(tensors)})

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """To step within, in a thread of the lane's own: on accelerators a stream of its own."""

    @abstractmethod
    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error that a step raised says that the device is out of memory."""

    # --- checks and costs

    @abstractmethod
    def check(self, batch: Any, name: str) -> None:
        """Try one member on two rows, before anything is trained, and make room for the metrics it makes.

        What does not fit raises `InputError`, with the shapes that came and what the model said of them."""

    @abstractmethod
    def output_shape(self, batch: Any, name: str) -> tuple[int, ...] | None:
        """The shape `(row, …)` of a member's output for two rows of a batch; None if it is no single tensor."""

    @abstractmethod
    def check_targets(self, output_shape: tuple[int, ...] | None, target: Any, name: str | None) -> None:
        """Check all targets of a data set against the output, where the loss says what they must be."""

    @abstractmethod
    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Any], None] | None:
        """A function that refuses a batch with targets out of range; None where there is nothing to check."""

    @abstractmethod
    def working_bytes(self, batch: Any) -> int | None:
        """What a train step on a batch like this takes on the device beside the state; None if not known."""


class StackedEngine(Engine):
    """An engine whose members' tensors are stacked: it moves state as `StackedState` does."""

    stacked: StackedState

    @property
    def state(self) -> State:
        """The working state: the tensors that programs step, `(slot, …)`."""
        return self.stacked.parts

    @state.setter
    def state(self, parts: State) -> None:
        self.stacked.parts = parts

    @property
    def positions(self) -> np.ndarray:
        """The positions of all members."""
        return self.stacked.positions

    @property
    def slots(self) -> np.ndarray:
        """`(slot,)`: the position of the member in each slot."""
        return self.stacked.slots

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state of some members, by part and name."""
        return self.stacked.read(positions, parts)

    def write(self, positions: Positions, state: State) -> None:
        """Replace the state of some members by part and name."""
        self.stacked.write(positions, state)

    def narrow(self, positions: np.ndarray) -> None:
        """Give slots only to these members from now on. The others rest."""
        self.stacked.narrow(positions)

    def widen(self) -> None:
        """Give every member its slot again."""
        self.stacked.widen()
