"""Names that a framework's adapter exports to the layers above.

An adapter is a package `modelfleet.frameworks.<name>` whose `__init__` exports the names of `Adapter`.
`modelfleet.testing.conformance` checks adapters. `frameworks/engine.py` describes the engines that they make.
"""
# ruff: noqa: N802  an adapter exports classes and constants, which a protocol declares as properties

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from modelfleet.devices import Device, Memory
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.lane_context import LaneContext, Task
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Json, Kind, Model, NativeDevice, Precision, Signature, Tensor, Tree


class Prepared(Protocol):
    """A recipe applied to members of one framework, in their order."""

    @property
    def tasks(self) -> Sequence[Task]:
        """Return the task of each member. Those that can be fused have the same object, or tasks of one family."""
        ...

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Return hyperparameters `(member,)` that are not part of the state; may be empty.

        NaN means that the member's optimizer does not have the hyperparameter.
        """
        ...

    @property
    def schedules(self) -> Sequence[Any]:
        """Return each member's compiled schedule, for `Adapter.Schedules`."""
        ...


class Schedules(Protocol):
    """Hyperparameters of a lane's members over the steps of a fit."""

    @property
    def by_step(self) -> bool:
        """Return True if the columns can change within an epoch."""
        ...

    def at(self, steps: np.ndarray, /) -> Mapping[str, np.ndarray]:
        """Return the columns for members that have taken `steps` steps, `(member,)`.

        As long as nothing changes, this is the same object.
        """
        ...

    def end_epoch(self, values: Sequence[Mapping[str, float]]) -> None:
        """Pass each member's metrics of an epoch to schedules that depend on them."""
        ...

    def state(self) -> Json:
        """Return the current position of the schedules."""
        ...

    def restore(self, state: Json, /) -> None:
        """Continue from what `state` returned."""
        ...


class Replica(Protocol):
    """One model that only predicts.

    On the CPU, its weights stay in memory that other processes may also read. A replica never writes to them.
    """

    pads: bool
    """True if batches should have few different sizes because each size is compiled."""

    def __call__(self, rows: Tree) -> Tree:
        """Return the model's outputs, a tree of NumPy arrays, for a tree of NumPy arrays `(row, …)`."""
        ...

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error of this replica means that the device is out of memory."""
        ...

    def broken(self, error: BaseException) -> bool:
        """Return True if after this error the process can't compute on the device any more."""
        ...

    def close(self) -> None:
        """Leave the model as it was."""
        ...


class Adapter(Protocol):
    """Names that a framework's package exports.

    Some names are optional:

    * `threads() -> int` and `use_threads(count)`, if steps on the CPU use the number of threads that is set for
      the calling thread. Logical CPU devices then have their own threads.
    * `ProcessGroup`, like that of `frameworks.torch.parallel.process_group`, if the engines implement
      `split_rows_over`.
    * `frozen(model)`, if models contain more than replicas need. Its result is sent to the replicas and given to
      `Replica` instead of the model.
    * `own_training`, a module like `frameworks.keras.own_training`, if models hold their optimizers themselves.
    * `settings()` and `using(settings)`, if a program can change a model's numbers by global settings such as a
      default dtype. Workers then compute with the settings of the process that started them.
    * `family(signature, task)`, if engines can run members of different structures or tasks as one lane. Members
      with equal families are tried in one lane; if the engine raises `CannotFuseError`, each variant gets its own.
    * `shapes(signature)`, if members of one family may have unequal sizes, which engines pad: the names and shapes
      of a model's tensors. The planner then decides which of them share a lane.
    * `ModelStamp(model)` and `ModelStamps(stamps)`, like those of `frameworks.torch.stamps`, if it is quicker to
      see that models have not changed than to read them again.
    * `numbers_of(model, task)` and `restore_numbers(model, task, numbers)`, like those of
      `frameworks.torch.member_numbers`, if callbacks may change numbers of a model. Checkpoints keep them.
    * `leaves_models_alone(task, programs)`, if lanes of one member may keep their state apart from the model. A
      trial then needs no copy of the model.
    * `COMPILES_FIRST = True`, if the first step of a lane compiles for long, without Python's lock.
    * `signatures(models)`, if it is quicker to find the structures of many models together.
    * `DirectModels`, like that of `frameworks.torch.direct`, if models on the CPU can answer without a lane.
    * `nodes`, a module like `frameworks.node_engine.Nodes`, if models can be nodes of chains and graphs.
    * `as_loader`, like `frameworks.keras.datasets.as_loader`, if there are loaders of the framework's own.
    * `weighted`, like `frameworks.keras.class_weights.weighted`, if `fit` takes `class_weight`.
    * `CLASS_AXIS`, the axis of the classes in an output `(row, …)`, if tasks add the loss of a lesson
      (`frameworks.lessons`) to a member's own.
    * `GOES_ON = True`, if with `steps_per_epoch` an epoch of arrays starts where the last one stopped.
    * `arrays.STRINGS = True`, if models take arrays of strings.
    * `score(model, output, target, loss, metrics) -> dict[str, float]`, if the outputs of an ensemble can be
      evaluated: the loss, if there is one, and the metrics, given as for `compile`, of outputs in NumPy. `model`
      is a member's.
    * `compiled(model)`, if models hold their loss and metrics themselves: it returns both.
    * `pieces(model, stages, example, train)`, if models can be cut: it returns `frameworks.pieces.Pieces`.
    * `version_note() -> str`, if `modelfleet doctor` should show more than the framework's version.
    * `accelerator_rows() -> list[Row]`, if `modelfleet doctor` should say more about this machine's accelerators.
    * `cache_folder() -> Path`, if compiled programs are kept there between runs. `modelfleet doctor` shows it.
    """

    @property
    def NAME(self) -> str:
        """Return the name of the package."""
        ...

    @property
    def arrays(self) -> Any:
        """Return a module with the functions of `feeds.ArrayOperations`, and `host(tensor)` for NumPy arrays."""
        ...

    @property
    def files(self) -> Any:
        """Return a module with the functions of `frameworks.torch.files`."""
        ...

    def make_engine(self, context: LaneContext[Any, Any]) -> Engine:
        """Return the engine of a lane."""
        ...

    @property
    def Schedules(self) -> Callable[..., Schedules]:
        """Return the class `Schedules(schedules, columns, tasks, per_epoch, epochs, *, names, initial_epoch)`.

        Schedules, columns and tasks are by member. `per_epoch` is None if the number of steps is not known.
        """
        ...

    @property
    def Replica(self) -> Callable[[Any, NativeDevice, Precision], Replica]:
        """Return the class `Replica(model, device, precision)`; `device` is a result of `native`."""
        ...

    @property
    def PRECISIONS(self) -> Collection[str]:
        """Return the precisions that `Replica` accepts."""
        ...

    def is_model(self, value: Any) -> bool:
        """Return True if this adapter accepts a value as a model. Its class belongs to the framework."""
        ...

    def inputs(self, batch: Tree) -> Tree:
        """Return the inputs of a batch: the x of (x, y), or the batch itself; like `Engine.inputs`."""
        ...

    def seeding(self, seed: int) -> AbstractContextManager[None]:
        """Seed the framework's global generators within a context, for a factory. Restore them at the end."""
        ...

    def check_model(self, model: Model, name: str) -> None:
        """Raise InputError if a model can't be a member, for example because it has no weights yet."""
        ...

    def copy_model(self, model: Model) -> Model:
        """Return an independent model with the same weights."""
        ...

    def compile(self, recipe: Recipe, members: Sequence[Member]) -> None:
        """Check a recipe for these members, and do what is needed only once (Keras: `model.compile`)."""
        ...

    def prepare(self, recipe: Recipe | None, members: Sequence[Member], kind: Kind) -> Prepared:
        """Return the tasks of members.

        Args:
            recipe: None if `Fleet.compile` was not called for them.
            members: Members of this framework.
            kind: The verb that the members are prepared for.

        Raises:
            InputError: The verb needs a recipe, and there is none.
        """
        ...

    def signature(self, model: Model) -> Hashable:
        """Return a model's structure, which is equal for models that can be fused."""
        ...

    def difference(self, a: Signature, b: Signature) -> str | None:
        """Return the first difference between two signatures, such as "features.3.stride is 2, not 1"."""
        ...

    def trained_twice(self, models: Sequence[Model]) -> tuple[int, int, str] | None:
        """Return the indices of two models that train the same variable, and its name; None if none do."""
        ...

    def accelerators(self) -> list[Device]:
        """Return every accelerator that the framework can use in this process."""
        ...

    def choose(self, wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
        """Return the devices to use, by `devices.chosen`. With None, the adapter chooses."""
        ...

    def native(self, device: Device) -> NativeDevice:
        """Return a device as the framework itself names it."""
        ...

    def memory(self, device: NativeDevice) -> Memory | None:
        """Return the memory of a device; None if the framework does not know it, as on the CPU."""
        ...

    def hardware(self, device: NativeDevice) -> str | None:
        """Return the name of an accelerator's model, to tell apart what was measured on it; None for the CPU."""
        ...

    def randomness(self) -> Tensor | None:
        """Return the state of the global generator that this framework's loaders shuffle with, if any."""
        ...

    def restore_randomness(self, state: Tensor) -> None:
        """Restore that generator."""
        ...

    def weight_bytes(self, model: Model) -> int:
        """Return the size of a model's weights in bytes."""
        ...

    def weights_key(self, model: Model) -> Hashable:
        """Return a key that is equal for models whose weights can be stacked in one file."""
        ...

    def stacked_weights(self, models: Sequence[Model]) -> Mapping[str, Tensor]:
        """Return the weights `(member, …)` of models of one key, for `files`."""
        ...

    def fill(self, model: Model, tensors: Mapping[str, Tensor]) -> str | None:
        """Copy one member's weights into a model. If something does not fit, return the first such problem."""
        ...
