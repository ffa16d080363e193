"""The programs of a lane: its steps traced once for each shape of batch and width, and compiled where it pays."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from modelfleet.frameworks.protocol import CannotFuseError
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.asking import NeedsGradientError
from modelfleet.frameworks.torch.compiling import SAVING, Compiler
from modelfleet.frameworks.torch.compiling import mode as mode_of_compiling
from modelfleet.frameworks.torch.state import State
from modelfleet.frameworks.torch.steps import Steps
from modelfleet.frameworks.torch.task import Task
from modelfleet.frameworks.torch.tracing import TRACING, Program, plain, trace
from modelfleet.trees import leaves, map_tree

Key = tuple[Any, ...]
TRAINING = ("train", "gradients", "update")  # whole, or the two halves of a step whose rows are on several devices
ByWidth = dict[int, tuple[Program, Compiler]]
_NO_VIEW = (
    "view size is not compatible",
    "Cannot view a tensor",
)  # what torch says of a transposed weight's view(-1)


class Programs:
    """Train, evaluate and predict for the lanes of one group.

    `model` stands for the structure: its Python is traced, its own weights are never touched. With `fused=False`
    the lanes hold one member each, and a step that can't be traced runs as the plain Python it is.
    """

    def __init__(self, model: nn.Module, task: Task, *, fused: bool) -> None:
        self.steps = Steps(model, task, states.transposed(model))
        self.fused = fused
        self.traces = 0  # how often a step was traced: a test's proof that a second epoch traces nothing
        self.untraced: str | None = None  # why a lane of one runs its Python at every step, if it does
        self._programs: dict[Key, ByWidth] = {}  # by kind and batch, then by width
        self._listed = threading.local()

    @property
    def task(self) -> Task:
        """What the members are to do."""
        return self.steps.task

    @property
    def compiling(self) -> bool:
        """Whether a program is being compiled beside the training now."""
        return any(compiler.busy for _, compiler in self._all())

    @property
    def compiled(self) -> bool:
        """Whether any program runs compiled."""
        return any(program.compiled for program, _ in self._all())

    @property
    def description(self) -> str:
        """How the train steps run, in a word."""
        programs = [program for program, _ in self._all(*TRAINING)]
        if not programs:
            return "not traced yet"
        if any(program.compiled for program in programs):
            return "compiled"
        return "plain Python" if any(program.graph is None for program in programs) else "traced"

    @property
    def prospect(self) -> float:
        """What compiling will leave of a step's time, if it is still to come."""
        return 1.0 if self.compiled or not self.fused or mode_of_compiling() == "never" else 1.0 - SAVING

    @property
    def working_bytes(self) -> int | None:
        """The most that a train step takes beside the state, of those traced so far."""
        known = [program.working_bytes for program, _ in self._all(*TRAINING)]
        return max((size for size in known if size is not None), default=None)

    def train(
        self, lead: Sequence[Any], rest: Sequence[Any], *, shared_data: bool, pace: tuple[int, float | None]
    ) -> frozenset[str]:
        """One step of every active member, in place. `pace`: steps left of this kind, and seconds per step.

        `lead` are the first arguments of `Steps.train`, the state and what is shared; `rest` are the others. Gives
        the parameters that took no part in it.
        """
        program, compiler = self.program("train", (*lead, *rest), shared_data)
        compiler.consider(*pace)
        with torch.no_grad():  # what is outside may take gradients
            program.run(*self._flat(lead), *leaves(rest), *program.outside)
        return program.unused

    def gradients(
        self, lead: Sequence[Any], rest: Sequence[Any], *, shared_data: bool, pace: tuple[int, float | None]
    ) -> tuple[Tensor, Tensor]:
        """The first half of a train step, on some rows of a batch; what it gives is to be summed over all rows."""
        program, compiler = self.program("gradients", (*lead, *rest), shared_data)
        compiler.consider(*pace)
        with torch.no_grad():
            flat, columns = program.run(*self._flat(lead), *leaves(rest), *program.outside)
        return flat, columns

    def update(self, lead: Sequence[Any], rest: Sequence[Any]) -> None:
        """The second half of a train step, in place."""
        # Never compiled: the devices of a group would have it compiled at different steps, and round differently.
        program, _ = self.program("update", (*lead, *rest), False)
        with torch.no_grad():  # what is outside may take gradients
            program.run(*self._flat(lead), *leaves(rest), *program.outside)

    def evaluate(self, args: tuple[Any, ...], *, shared_data: bool) -> dict[str, Tensor]:
        """The sums `(member,)` of the loss and the metrics over a batch."""
        args = (readable(args[0]), *args[1:])
        return self.program("evaluate", args, shared_data)[0](leaves(args))

    def predict(self, args: tuple[Any, ...], *, shared_data: bool) -> Any:
        """The outputs `(member, row, …)` on a batch of inputs."""
        args = (readable(args[0]), *args[1:])
        return self.program("predict", args, shared_data)[0](leaves(args))

    def _flat(self, lead: Sequence[Any]) -> list[Tensor]:
        # A lane's state is the same tensors from step to step: they are listed once, by each thread for its own.
        listed = getattr(self._listed, "last", None)
        if listed is None or any(a is not b for a, b in zip(listed[0], lead, strict=True)):
            listed = self._listed.last = tuple(lead), leaves(lead)
        return listed[1]

    def _all(self, *kinds: str) -> Iterator[tuple[Program, Compiler]]:
        for (kind, *_), programs in self._programs.items():
            if not kinds or kind in kinds:
                yield from programs.values()

    def stop(self) -> None:
        """End every compiler that is still at work."""
        for _, compiler in self._all():
            compiler.stop()

    def program(self, kind: str, args: tuple[Any, ...], shared_data: bool) -> tuple[Program, Compiler]:
        """The program for arguments of these shapes; traced if there is none yet."""
        # What is left out, the weights and the numbers per member, follows from the structure and the width.
        data = _key(args[-2:] if kind == "train" else args[2:], 0 if shared_data else 1)
        # Neither does what is shared follow from the structure, nor which parameters have counted the same steps.
        counted = tuple(args[2]) if kind in ("train", "update") else ()
        family = (kind, shared_data, tuple(args[1]), counted, data)
        width = len(args[0]["member"]["seed"])
        programs = self._programs.setdefault(family, {})
        if width not in programs:
            with TRACING:
                if width not in programs:
                    programs[width] = self._for_any(programs, width) or self._make(kind, args, shared_data)
        return programs[width]

    def _for_any(self, programs: ByWidth, width: int) -> tuple[Program, Compiler] | None:
        """A program that was compiled for any width, if there is one."""
        return next((pair for pair in programs.values() if pair[0].any_width and width > 1), None)

    def _make(self, kind: str, args: tuple[Any, ...], shared_data: bool) -> tuple[Program, Compiler]:
        step: Callable[..., Any] = getattr(self.steps, kind)
        data = {
            "train": (True, True, not shared_data, True),
            "gradients": (not shared_data, True, False),
            "update": (True, True, True, True),
            "evaluate": (not shared_data, True),
        }
        stacked = (True, False, *data.get(kind, (not shared_data,)))

        def run(*args: Any) -> Any:
            with borrowed(self.steps.model, train=kind in TRAINING):
                return step(*args, shared_data=shared_data, fused=self.fused)

        def at_width(width: int) -> Program:
            seeds = args[0]["member"]["seed"]
            rows = torch.arange(width, device=seeds.device) % len(seeds)
            few = (
                map_tree(lambda t: t.index_select(0, rows), arg) if axis else arg
                for arg, axis in zip(args, stacked, strict=True)
            )
            return trace(run, tuple(few), stacked)

        if kind in ("train", "gradients") and self.fused:
            state, shared = args[:2]
            batch, weights = args[4:] if kind == "train" else args[2:4]
            with suppress(Exception), borrowed(self.steps.model, train=True):  # tracing will tell what is wrong
                self.steps.find_unused(state, shared, batch, weights, shared_data=shared_data)

        self.traces += 1
        try:
            program = self._traced(run, args, stacked)
        except CannotFuseError as error:
            if self.fused:
                raise
            self.untraced = str(error)
            program = plain(run, args, stacked)
        program.unused = self.steps.unused
        return program, Compiler(program, at_width if self.fused else None)

    def _traced(self, run: Callable[..., Any], args: tuple[Any, ...], stacked: Sequence[bool]) -> Program:
        """Trace a step; once more, otherwise, if the model turns out to need it."""
        try:
            return trace(run, args, stacked)
        except NeedsGradientError:
            self.steps.differentiates = True
        except CannotFuseError as error:
            if self.steps.contiguous or not any(said in str(error.__cause__) for said in _NO_VIEW):
                raise
            self.steps.contiguous = True
        return self._traced(run, args, stacked)


_HELD: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_HOLDING = threading.Lock()


def held(model: nn.Module) -> AbstractContextManager[Any]:
    """To have a model to oneself: while its Python runs for a member, that member's weights are in it, and all
    lanes of a group run the same one."""
    with _HOLDING:
        return _HELD.setdefault(model, threading.RLock())


@contextmanager
def borrowed(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Have a model to oneself, in training or evaluation mode, to run its Python with some member's weights."""
    with held(model), mode(model, train=train):
        yield


@contextmanager
def mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode for a while.

    A model given in training mode is trained as it was given, with those of its parts that were set to evaluation
    left so (a frozen BatchNorm, say); one given in evaluation mode is trained as after `model.train()`.
    """
    before = [(module, module.training) for module in model.modules()]
    if not train or not model.training:
        model.train(train)
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def readable(state: State) -> State:
    """What a forward pass reads of a state."""
    member = {name: state["member"][name] for name in ("seed", "step")}
    return {
        "params": state["params"],
        "frozen": state["frozen"],
        "buffers": state["buffers"],
        "member": member,
    }


def _key(args: Any, first: int) -> Key:
    # Without the member axis, where there is one: the width is kept apart.
    return tuple((leaf.shape[first:], leaf.dtype, leaf.stride()[first:]) for leaf in leaves(args))
