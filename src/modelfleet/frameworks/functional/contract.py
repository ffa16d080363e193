"""Parts of a functional engine: the `Definition` of one member's steps, and the `Backend` that runs it.

The state of a lane is

    params    trained weights
    buffers   everything else that the model owns: frozen weights, running statistics, seeds
    optimizer the optimizer's state, with its count of steps and its learning rate
    metrics   sums for the metrics of the current epoch
    member    scalars of each member: step, trouble, and what else a definition needs (a seed)
    numbers   what follows from the members' structures, such as their variant: never saved or restored

each a dict of tensors `(member, …)`. Tensors are never changed in place: a step returns a new state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Arrays, NativeDevice, State, Tensor, Tree

Function = Callable[..., Any]

PARTS = ("params", "buffers", "optimizer", "metrics")  # the parts of a member's state that a step may change


class Slice(NamedTuple):
    """Neighbouring slots whose members have the same kind of optimizer."""

    task: int
    """Number of their definition in `Definition.by_task`."""
    start: int
    stop: int

    def of(self, tree: Tree) -> Tree:
        """Return the slice's rows of every tensor `(slot, …)`."""
        return map_tree(lambda tensor: tensor[self.start : self.stop], tree)


class Definition(Protocol):
    """Steps of a lane's members, as pure functions of one member's state: tensors without a member axis.

    The state has the parts named above. "member" and "numbers" are only read: if they are returned, they are
    ignored. Inherit from this class for the methods that have a default.
    """

    task: Any  # the adapter's own `Task`
    variants: int = 1
    """Number of variants. If there are several, `state["numbers"]["variant"]` is the number of a member's own."""
    can_mask_rows: bool
    """True if a row of weight 0 has no influence on the loss and the metrics of `train` and `evaluate`. The engine
    tries out if it has an influence within the model, as with BatchNorm."""

    @property
    def first(self) -> "Definition":
        """Return the definition of the first variant. The results of all variants have the same shapes."""
        return self

    @property
    def by_task(self) -> Sequence["Definition"]:
        """Return a definition for each kind of optimizer in a lane. They differ in `apply` and `train` only.

        Each has the `state` of its own members. A lane whose members have one kind of optimizer has only this one.
        """
        return [self]

    def task_numbers(self, context: LaneContext[Any, Any]) -> np.ndarray:
        """Return `(member,)`: which of `by_task` each member of a lane has."""
        return np.zeros(len(context.members), np.int64)

    def state(self, member: Member) -> State:
        """Return a member's params, buffers and optimizer as NumPy arrays.

        There may also be "member" and "numbers" with scalars.
        """
        ...

    def try_out(self, state: State, batch: Tree) -> None:
        """Try a member on a few rows, and raise if they do not fit. `fresh_metrics` is known from then on."""
        ...

    def fresh_metrics(self) -> Arrays:
        """Return a member's metrics before the first batch, as NumPy arrays."""
        ...

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        """Return what `apply` needs to finish a step on a batch.

        Returns:
            The "loss", the "gradients" by the names of params, the new "metrics", and the "params" and "buffers"
            that the model has changed. Padding has an influence if it changes any of these.
        """
        ...

    def apply(
        self, state: State, hyper: Mapping[str, Tensor], found: dict[str, Tree]
    ) -> tuple[State, Tensor, Tensor]:
        """Return the state, its `PARTS`, after an update by what `gradients` returned.

        Also returns two scalars: the loss, and True if the gradient was finite.
        """
        ...

    def train(
        self, state: State, hyper: Mapping[str, Tensor], batch: Tree, weights: Tensor | None
    ) -> tuple[State, Tensor, Tensor]:
        """Return what `apply` returns after a whole step."""
        return self.apply(state, hyper, self.gradients(state, batch, weights))

    def evaluate(
        self, state: State, metrics: dict[str, Tensor], batch: Tree, weights: Tensor | None
    ) -> tuple[dict[str, Tensor], State]:
        """Return the metrics with a batch added, and the params and buffers that the model has changed.

        A model may change a counter or a seed as it evaluates. The state has no optimizer and no metrics.
        """
        ...

    def results(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of the loss and the metrics, as scalars."""
        ...

    def predict(self, state: State, x: Tree) -> tuple[Tree, State]:
        """Return the outputs `(row, …)` on inputs, and what the model has changed, as in `evaluate`."""
        ...

    def write_back(self, member: Member, state: State) -> None:
        """Copy a member's own NumPy arrays into its model."""
        ...

    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch: the x of (x, y), or the batch itself."""
        return batch_parts.inputs(data)

    def check_targets(self, output_shape: tuple[int, ...], target: Tree, name: str | None) -> None:
        """Raise InputError for targets of a whole data set that the loss can't take."""
        check = self.label_check(output_shape)
        if check is not None:
            check((None, target))

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with targets out of range; None if nothing can be checked."""
        return None


class Backend(Protocol):
    """Operations of a framework that the engine needs. None in a tree is not a tensor.

    Programs also call the methods marked * while they are traced.
    """

    device: NativeDevice

    @property
    def name(self) -> str:
        """Return the name of compiled programs: "jit", "tf.function"."""
        ...

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a copy of an array as a tensor on the device."""
        ...

    def host(self, tree: Tree) -> Tree:
        """Return a tree of tensors as NumPy arrays. Dtypes that NumPy lacks (bfloat16) become float32."""
        ...

    def exactly(self, tree: Tree) -> Tree:
        """Return a tree of tensors as NumPy arrays of the same dtypes, bfloat16 included."""
        ...

    def loaded(self, array: Tensor | np.ndarray, like: Tensor) -> Tensor:
        """Return a tensor, or an array that the adapter's `arrays.host` returned, like another tensor."""
        ...

    def map(self, function: Function, args: Sequence[Tree], mapped: Sequence[bool]) -> Tree:
        """* Return `function` of every member, with the member as the first axis.

        Each member gets its row of the arguments that are mapped, and the others whole.
        """
        ...

    def without_axis(self, tree: Tree) -> Tree:
        """* Return the tensors `(1, …)` of the only member without the member axis."""
        ...

    def with_axis(self, tree: Tree) -> Tree:
        """* Return the tensors of a member with a member axis, `(1, …)`."""
        ...

    def first(self, tree: Tree) -> Tree:
        """Return the first member's part of every tensor, as tensors or NumPy arrays, for a trial."""
        ...

    def where(self, chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """* Return `new` for the members `(member,)` that are chosen, and `old` for the others."""
        ...

    def is_finite(self, tensor: Tensor) -> Tensor:
        """* Return True for each number that is finite."""
        ...

    def take(self, tree: Tree, rows: Tensor) -> Tree:
        """* Return the rows `(n,)` of every tensor."""
        ...

    def put(self, tree: Tree, rows: Tensor, part: Tree) -> Tree:
        """* Return every tensor with some of its rows replaced."""
        ...

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """* Return tensors as one, along their first axis."""
        ...

    def lengthened(self, tree: Tree, length: int) -> Tree:
        """Return every tensor or NumPy array with a longer first axis. The new rows are never read."""
        ...

    def loop(self, step: Callable[[Tree, Tree, Tensor], Tree], state: Tree, xs: Tree, count: Tensor) -> Tree:
        """* Return the state after `count` times `state = step(state, x, number)`.

        `x` is the next slice of `xs`, and `number` counts from 0. `count` may be smaller than the number of
        slices. It is known only when the program runs.
        """
        ...

    def compile(self, function: Function, *, donate: bool = False) -> Function:
        """Return a program of a function of trees, compiled for every new set of shapes.

        With `donate`, the program may overwrite its first argument.
        """
        ...

    def within(self, program: Function, function: Function) -> Function:
        """Return the one of the two to call within another program.

        This is the program that `compile` made of the function, if it saves tracing the function again.
        """
        ...

    def trace(self, program: Function, args: Sequence[Tree]) -> None:
        """Trace a program of `compile` for these arguments. Raise if that is not possible."""
        ...

    def shapes(self, function: Function, *args: Tree) -> Tree:
        """Return the results of a function as a tree of objects with a `shape` and a `dtype`, at little cost."""
        ...

    def working_bytes(self, program: Function, args: Sequence[Tree]) -> int | None:
        """Return the memory that a program needs beside its arguments and results; None if not known."""
        ...

    def reason(self, error: Exception) -> str:
        """Return one line that says why a function could not be traced."""
        ...

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        ...
