"""The programs of a lane: its steps traced once for each shape of batch and width, and compiled where it pays."""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.compiling.compiler import SAVED_FRACTION, Compiler, compile_mode
from modelfleet.frameworks.torch.modes import in_mode
from modelfleet.frameworks.torch.python_state.checks import StatefulError, refuse_unstackable
from modelfleet.frameworks.torch.python_state.snapshot import PythonSnapshot
from modelfleet.frameworks.torch.python_state.undo import restoring_python, restoring_tensors, undoing_side_effects
from modelfleet.frameworks.torch.steps import Steps
from modelfleet.frameworks.torch.task import Task
from modelfleet.frameworks.torch.tracing.parameters import NeedsGradientError
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, Program, trace, untraced
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State

Key = tuple[Any, ...]
# A whole step; its parts; and the parts of a step whose rows are on several devices.
TRAINING = ("train", "gradients", "apply", "row_gradients", "row_apply")
APPLYING = ("apply", "row_apply")
MOST_KEPT = 16  # states of the model's Python whose programs are kept
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
        self._watch: PythonSnapshot | None = None  # what the Python of the model and the task reads
        self._thoroughly = True
        self._kept: dict[
            Hashable, tuple[PythonSnapshot, dict[Key, ByWidth]]
        ] = {}  # the programs of what it read before, too
        self._programs: dict[Key, ByWidth] = {}  # by kind and batch, then by width
        self._found: dict[Hashable, Any] = {}  # what trials found, for what the Python reads now
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
        return 1.0 if self.compiled or not self.fused or compile_mode() == "never" else 1.0 - SAVED_FRACTION

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

    def row_gradients(
        self, lead: Sequence[Any], rest: Sequence[Any], *, shared_data: bool, pace: tuple[int, float | None]
    ) -> tuple[Tensor, Tensor]:
        """The first half of a train step, on some rows of a batch; what it gives is to be summed over all rows."""
        program, compiler = self.program("row_gradients", (*lead, *rest), shared_data)
        compiler.consider(*pace)
        with torch.no_grad():
            flat, columns = program.run(*self._flat(lead), *leaves(rest), *program.outside)
        return flat, columns

    def gradients(self, lead: Sequence[Any], rest: Sequence[Any], *, shared_data: bool) -> dict[str, Any]:
        """Return what a step makes of a batch before its optimizer does."""
        args = (*lead, *rest)
        with torch.no_grad():
            return self.program("gradients", args, shared_data)[0](leaves(args))

    def apply(self, kind: str, lead: Sequence[Any], rest: Sequence[Any]) -> None:
        """Run the second part of a train step in place: "apply", or "row_apply" for rows on several devices."""
        # Never compiled: the devices of a group would have it compiled at different steps, and round differently.
        program, _ = self.program(kind, (*lead, *rest), False)
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
        for _, family in list(self._kept.values()):
            for (kind, *_), programs in list(family.items()):
                if not kinds or kind in kinds:
                    yield from list(programs.values())

    def stop(self) -> None:
        """End every compiler that is still at work."""
        for _, compiler in self._all():
            compiler.stop()

    def look_again(self) -> None:
        """Compare all that the traced Python could read before the next step, large arrays too."""
        self._thoroughly = True

    def _look(self) -> None:
        """Find the programs for what the Python of the model, the loss and the metrics would read now."""
        if self._watch is not None and self._watch.same(thoroughly=self._thoroughly):
            self._thoroughly = False
            return
        with TRACE_LOCK, held(self.steps.model):
            watch = PythonSnapshot(self._roots())
            if self.fused:
                watch.refuse()
                refuse_unstackable(self.steps.model)
            kept = self._kept.pop(watch.key, None) or (watch, {})
            self._kept[watch.key] = kept  # the last one used is the last one to go
            while len(self._kept) > MOST_KEPT:
                _, forgotten = self._kept.pop(next(iter(self._kept)))
                for _, compiler in (pair for programs in forgotten.values() for pair in programs.values()):
                    compiler.stop()
            self._programs, self._found = kept[1], {}
            # Only now: what was refused is refused again.
            self._watch, self._thoroughly = watch, False

    def _roots(self) -> list[tuple[str, Any]]:
        """What runs while a step is traced, as a reader knows it."""
        task = self.task
        roots: list[tuple[str, Any]] = [("self", self.steps.model), ("the objective", task.objective)]
        if task.loss is not None:
            roots.append(("the loss", task.loss.plain))
        return roots + [(f"the metric {metric.name}", metric.sums) for metric in task.metrics]

    @contextmanager
    def trial(self, *, train: bool) -> Iterator[None]:
        """Run the model's Python to see what it says, and leave nothing of it behind."""
        with (
            held(self.steps.model),
            undoing_side_effects(*self._roots()),
            in_mode(self.steps.model, train=train, given=self.steps.modes),
        ):
            yield

    def found(self, trial: Hashable, run: Callable[[], Any]) -> Any:
        """What a trial gives: run again only if the model's Python may read something else than the last time."""
        if self._watch is None or not self._watch.same(thoroughly=False):
            return run()
        if trial not in self._found:
            self._found[trial] = run()
        return self._found[trial]

    def serve(self, model: nn.Module) -> None:
        """Trace this model from now on; it is of the structure that the programs are for."""
        if model is not self.steps.model:
            self.steps.model, self._watch = model, None

    def program(self, kind: str, args: tuple[Any, ...], shared_data: bool) -> tuple[Program, Compiler]:
        """The program for arguments of these shapes; traced if there is none yet."""
        self._look()
        # What is left out, the weights and the numbers per member, follows from the structure and the width.
        data = _key(args[-2:] if kind == "train" else args[2:], 0 if shared_data else 1)
        # Neither does what is shared follow from the structure, nor which parameters have counted the same steps.
        counted = tuple(args[2]) if kind in ("train", *APPLYING) else ()
        family = (kind, shared_data, tuple(args[1]), counted, data)
        width = len(args[0]["member"]["seed"])
        programs = self._programs.setdefault(family, {})
        if width not in programs:
            with TRACE_LOCK, held(self.steps.model):
                if width not in programs:
                    self._refuse_other_parameters(kind, args)
                    programs[width] = self._for_any(programs, width) or self._make(kind, args, shared_data)
        return programs[width]

    def _for_any(self, programs: ByWidth, width: int) -> tuple[Program, Compiler] | None:
        """A program that was compiled for any width, if there is one."""
        return next((pair for pair in programs.values() if pair[0].any_width and width > 1), None)

    def _make(self, kind: str, args: tuple[Any, ...], shared_data: bool) -> tuple[Program, Compiler]:
        step: Callable[..., Any] = getattr(self.steps, kind)
        data = {
            "train": (True, True, not shared_data, True),
            "gradients": (not shared_data, True),
            "apply": (True, True, True),
            "row_gradients": (not shared_data, True, False),
            "row_apply": (True, True, True, True),
            "evaluate": (not shared_data, True),
        }
        stacked = (True, False, *data.get(kind, (not shared_data,)))

        def run(*args: Any) -> Any:
            with borrowed(self.steps, train=kind in TRAINING):
                modes = {name: module.training for name, module in self.steps.model.named_modules()}
                result = step(*args, shared_data=shared_data, fused=self.fused)
                for name, module in self.steps.model.named_modules() if self.fused else ():
                    if module.training != modes.get(name):
                        raise CannotFuseError(
                            f"its forward switches {name or 'itself'} between train and eval mode"
                        )
                return result

        watch = self._watch
        assert watch is not None

        def at_width(width: int) -> Program:
            if not watch.same(thoroughly=True):
                raise CannotFuseError("what it reads has changed")
            with restoring_python(watch):
                return trace(run, tuple(rows_of(args, stacked, width)), stacked)

        if self.fused:
            self._try(kind, args, stacked, shared_data, watch)
        self.traces += 1
        try:
            with restoring_python(watch, strictly=self.fused, harmless=lambda: self._is_cache(kind, watch)):
                program = self._traced(run, args, stacked)
        except CannotFuseError as error:
            if self.fused:
                raise
            self.untraced = str(error)
            program = untraced(run, args, stacked)
        program.unused = self.steps.unused
        return program, Compiler(program, at_width if self.fused else None)

    def _try(
        self, kind: str, args: tuple[Any, ...], stacked: Sequence[bool], shared_data: bool, watch: PythonSnapshot
    ) -> None:
        """Run a step's Python once as it is, for the first member: to see what it draws, and which parameters take
        part in the loss. What else is wrong with it, tracing will tell."""
        if kind in APPLYING:
            return
        harmless = partial(self._is_cache, kind, watch)
        with (
            restoring_python(watch, harmless=harmless),
            restoring_tensors(watch),
            borrowed(self.steps, train=kind in TRAINING),
        ):
            try:
                if kind in TRAINING:
                    batch, weights = args[4:] if kind == "train" else args[2:4]
                    self.steps.find_unused(args[0], args[1], batch, weights, shared_data=shared_data)
                    return
                one = [map_tree(torch.clone, arg) for arg in rows_of(args, stacked, 1)]
                step = partial(getattr(self.steps, kind), shared_data=shared_data, fused=False)
                first = step(*map_tree(torch.clone, one))
                changed = watch.changed()
                if not changed:
                    return
                known = PythonSnapshot(self._roots()).key
                again = step(*one)
            except Exception:
                return
            if known != PythonSnapshot(self._roots()).key or not _equal(first, again):
                raise StatefulError(f"running it changes {changed[0]}")

    def _is_cache(self, kind: str, watch: PythonSnapshot) -> bool:
        """Whether what a forward in evaluation in_mode has left is a cache that `model.train()` empties.

        timm's LeViT and others keep their attention biases so. A program computes them anew at every batch.
        """
        if kind in TRAINING:
            return False
        model = self.steps.model
        model.train(True)
        after = PythonSnapshot(self._roots()).key
        watch.restore()
        model.train(True)
        return after == PythonSnapshot(self._roots()).key

    def _refuse_other_parameters(self, kind: str, args: tuple[Any, ...]) -> None:
        """Raise `CannotFuseError` if a parameter was frozen or unfrozen since the state was stacked."""
        state, shared = args[:2]
        for name, parameter in self.steps.model.named_parameters():
            if name not in shared and parameter.requires_grad != (name in state["params"]):
                done = "unfrozen" if parameter.requires_grad else "frozen"
                raise StatefulError(f"its parameter {name} was {done} meanwhile")

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


def rows_of(args: Sequence[Any], stacked: Sequence[bool], width: int) -> Iterator[Any]:
    """The arguments of a step for so many members: the first ones, over and over."""
    seeds = args[0]["member"]["seed"]
    rows = torch.arange(width, device=seeds.device) % len(seeds)
    for arg, axis in zip(args, stacked, strict=True):
        yield map_tree(lambda t: t.index_select(0, rows), arg) if axis else arg


def _equal(tree: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(tree), leaves(other), strict=True))


_HELD: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_HOLDING = threading.Lock()


def held(model: nn.Module) -> AbstractContextManager[Any]:
    """To have a model to oneself: while its Python runs for a member, that member's weights are in it, and all
    lanes of a group run the same one."""
    with _HOLDING:
        return _HELD.setdefault(model, threading.RLock())


@contextmanager
def borrowed(steps: Steps, *, train: bool) -> Iterator[None]:
    """Have a model to oneself, in training or evaluation in_mode, to run its Python with some member's weights."""
    with held(steps.model), in_mode(steps.model, train=train, given=steps.modes):
        yield


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
