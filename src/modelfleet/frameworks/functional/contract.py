"""What a functional engine is made of: a `Definition` of what one member does, a `Backend` that runs it for many.

The state of a lane is

    params    trained weights
    buffers   all else that the model owns: frozen weights, running statistics, seeds
    optimizer the optimizer's state, with its count of steps and its learning rate
    metrics   what the epoch's metrics have summed up so far
    member    per-member scalars: step, trouble, and what else a definition needs (a seed)

each a dict of tensors `(member, …)`. Tensors are never changed in place: a step gives a new state for the old.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from modelfleet.frameworks import batches
from modelfleet.members import Member
from modelfleet.types import State, Tensor, Tree

Function = Callable[..., Any]

PARTS = ("params", "buffers", "optimizer", "metrics")  # what a step may change of a member


class Definition(Protocol):
    """What the members of a lane do: pure functions of one member's state, its tensors without a member axis.

    The state has the parts named above; "member" is there to be read, and what is returned of it is ignored.
    Inherit from this class: what is not abstract here has a meaning already.
    """

    task: Any
    maskable: bool
    """Whether `train` and `evaluate` honour row weights `(row,)`: a row of weight 0 leaves no trace in the loss
    and the metrics. Whether it leaves one within the model, as with BatchNorm, is tried out."""

    def state(self, member: Member) -> State:
        """Return a member's params, buffers and optimizer as NumPy arrays, and perhaps "member" with scalars."""
        ...

    def try_out(self, state: State, batch: Any) -> None:
        """Try a member on a few rows, and raise what does not fit; `fresh_metrics` then knows what there is."""
        ...

    def fresh_metrics(self) -> dict[str, Any]:
        """A member's accumulators at the beginning of an epoch, as NumPy arrays."""
        ...

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        """Return what a step makes of a batch before its optimizer does.

        Returns:
            The "loss", the "gradients" by the names of params, the new "metrics", and the "params" and "buffers"
            that the model has changed. Whether padding is felt is judged by these.
        """
        ...

    def apply(
        self, state: State, hyper: Mapping[str, Tensor], found: dict[str, Tree]
    ) -> tuple[State, Tensor, Tensor]:
        """Return the state after an update by what `gradients` found (its `PARTS`).

        Also returns whether the loss and whether the gradient were finite, as scalars.
        """
        ...

    def train(
        self, state: State, hyper: Mapping[str, Tensor], batch: Tree, weights: Tensor | None
    ) -> tuple[State, Tensor, Tensor]:
        """Return what `apply` returns after a whole step."""
        return self.apply(state, hyper, self.gradients(state, batch, weights))

    def evaluate(
        self, state: State, metrics: dict[str, Any], batch: Any, weights: Any
    ) -> tuple[dict[str, Any], State]:
        """The accumulators with a batch added, and those of the params and buffers that the model has changed, as
        a counter or a seed may be; the state comes without optimizer and metrics."""
        ...

    def results(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The loss and the metrics, scalars each, from their accumulators."""
        ...

    def predict(self, state: State, x: Any) -> tuple[Any, State]:
        """The outputs `(row, …)` on inputs, and what the model has changed, as in `evaluate`."""
        ...

    def write_back(self, member: Member, state: State) -> None:
        """Put a member's own arrays, of NumPy, into its model."""
        ...

    def inputs(self, data: Any) -> Any:
        """The inputs of a batch: the x of (x, y), or the batch itself."""
        return batches.inputs(data)

    def check_targets(self, output_shape: tuple[int, ...], target: Any, name: str | None) -> None:
        """Refuse targets of a whole data set that the loss can't take; as a batch of them, if nothing else."""
        check = self.label_check(output_shape)
        if check is not None:
            check((None, target))

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Any], None] | None:
        """A function that refuses a batch with targets out of range; None where there is nothing to check."""
        return None


class Backend(Protocol):
    """What the engine asks of a framework. Trees are nested dicts, lists and tuples; None holds no tensor.

    Those marked * are used within programs, on what is being traced, as well as outside of them.
    """

    device: Any

    @property
    def name(self) -> str:
        """How compiled programs are called: "jit", "tf.function"."""
        ...

    def tensor(self, array: np.ndarray) -> Any:
        """An array as a tensor of its own on the device."""
        ...

    def host(self, tree: Any) -> Any:
        """A tree of tensors as NumPy arrays; what NumPy does not have (bfloat16) as float32."""
        ...

    def exactly(self, tree: Any) -> Any:
        """A tree of tensors as NumPy arrays of their own dtypes, bfloat16 among them."""
        ...

    def loaded(self, array: Any, like: Any) -> Any:
        """What the `host` of the adapter's arrays gave of a tensor (or the tensor) as one like another."""
        ...

    def map(self, function: Function, args: Sequence[Any], mapped: Sequence[bool]) -> Any:
        """* `function` of every member: over the first axis of the arguments that are mapped, and with the others
        as they are. What it gives has the member in front."""
        ...

    def where(self, chosen: Any, new: Any, old: Any) -> Any:
        """* `new` for the members `(member,)` that are chosen, `old` for the others; tensors `(member, …)`."""
        ...

    def take(self, tree: Any, rows: Any) -> Any:
        """* The rows `(n,)` of every tensor."""
        ...

    def put(self, tree: Any, rows: Any, part: Any) -> Any:
        """* Every tensor with some of its rows replaced."""
        ...

    def lengthened(self, tree: Any, length: int) -> Any:
        """Every tensor or NumPy array with a longer first axis; what is added is never read."""
        ...

    def loop(self, step: Callable[[Any, Any], Any], state: Any, xs: Any, count: Any) -> Any:
        """* The state after `count` times `state = step(state, x)`, where x are the slices of `xs` in turn.

        `count` may be less than there are slices, and is known only when the program runs.
        """
        ...

    def compile(self, function: Function, *, donate: bool = False) -> Function:
        """A program of a function of trees, made anew for every set of shapes; with `donate` it may write over its
        first argument."""
        ...

    def within(self, program: Function, function: Function) -> Function:
        """What to call within another program: the program that `compile` made of a function, if that spares
        tracing it again, or the function."""
        ...

    def trace(self, program: Function, args: Sequence[Any]) -> None:
        """Find out whether what `compile` gave can be made into a program for these arguments; raise if not."""
        ...

    def shapes(self, function: Function, *args: Any) -> Any:
        """What a function gives, as a tree of anything with a `shape` and a `dtype`, as cheaply as can be."""
        ...

    def working_bytes(self, program: Function, args: Sequence[Any]) -> int | None:
        """What a program takes on the device beside what goes in and comes out; None if that can't be known."""
        ...

    def reason(self, error: Exception) -> str:
        """Why a function could not be traced, in a line."""
        ...

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        ...
