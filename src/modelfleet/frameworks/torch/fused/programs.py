"""Programs of a lane: its steps, traced once for each shape of batch and width, and compiled if it pays."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from modelfleet.frameworks.engine import Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.base import on_host
from modelfleet.frameworks.torch.compiling.compilable import compilable_seconds
from modelfleet.frameworks.torch.compiling.compiler import CHECK_SECONDS, Compiler
from modelfleet.frameworks.torch.compiling.decision import compile_mode, may_pay, time_ratio
from modelfleet.frameworks.torch.devices import hardware
from modelfleet.frameworks.torch.fused import packing
from modelfleet.frameworks.torch.fused.arguments import (
    APPLYING,
    TRAINING,
    Args,
    Key,
    family_of,
    rows_of,
    steady_inputs,
    width_of,
)
from modelfleet.frameworks.torch.fused.capture import Capture
from modelfleet.frameworks.torch.fused.other_sizes import from_other_sizes
from modelfleet.frameworks.torch.fused.runner import ByWidth, Runner, ShapeTimes, for_any_width
from modelfleet.frameworks.torch.fused.steps_protocol import FastPathError, How, LaneSteps, NoGradientError
from modelfleet.frameworks.torch.model_locks import lock_of, locked_in_mode
from modelfleet.frameworks.torch.modes import in_mode
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsBySlice
from modelfleet.frameworks.torch.optimizers.slices import Slice
from modelfleet.frameworks.torch.optimizers.update_loop import with_loop
from modelfleet.frameworks.torch.python_state.checks import StatefulError, refuse_unstackable
from modelfleet.frameworks.torch.python_state.snapshot import PythonSnapshot
from modelfleet.frameworks.torch.python_state.undo import restoring_python, restoring_tensors, undoing_side_effects
from modelfleet.frameworks.torch.tracing.parameters import NeedsGradientError
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, Program, TensorSpec, trace, untraced
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tree

MAX_KEPT = 16  # Python states of the model whose programs are kept
MAX_FORMS = 128  # kinds of steps and forms of batches whose programs are kept, for each of these states
Result = TypeVar("Result")
OwnSteps = TypeVar("OwnSteps", bound=LaneSteps)
Packed = tuple[State, list[Tensor]]
"""A state with the buffers of its tensors, and its leaves."""
# torch's messages for `view(-1)` of a transposed weight:
_NO_VIEW = ("view size is not compatible", "Cannot view a tensor")


class Programs(Generic[OwnSteps]):
    """Train, evaluate and predict for the lanes of one group.

    The Python of the steps' model is traced for all members. Its own weights are never touched. With `fused=False`
    a lane holds one member, and a step that can't be traced runs as plain Python.
    """

    def __init__(self, steps: OwnSteps, *, fused: bool) -> None:
        self.steps = steps
        self.fused = fused
        self.traces = 0  # how often a step was traced; tests check that a second epoch traces nothing
        self.untraced: str | None = None  # why a lane of one member runs its Python at every step, if it does
        self._snapshot: PythonSnapshot | None = None  # what the Python of the model and the task reads
        self._thoroughly = True  # compare large arrays, too, before the next step
        # By the snapshot's key: programs for what the Python read before are kept, too.
        self._kept: dict[Hashable, tuple[PythonSnapshot, dict[Key, ByWidth]]] = {}
        self._programs: dict[Key, ByWidth] = {}  # by kind and batch, then by width
        self._uses = 0  # how often a program was looked up
        self._any_compiled = False  # True once a whole step runs compiled
        self._next_request = 0.0  # when to ask again if a step is to be compiled, until then
        self._found: dict[Hashable, Any] = {}  # results of trials, for what the Python reads now
        self._flattened = threading.local()
        self._buffers = threading.local()
        self._shape_times = ShapeTimes()
        self._sliced = threading.local()

    @property
    def compiling(self) -> bool:
        """Return True if a program is being compiled beside the training."""
        return any(runner.compiler.busy for runner in self._all())

    @property
    def compiled(self) -> bool:
        """Return True if any program runs compiled."""
        return any(runner.program.compiled for runner in self._all())

    @property
    def uncompiled(self) -> str | None:
        """Return why a train step could not be compiled; None if it could, or if this has not been tried."""
        failures = (runner.compiler.failure for runner in self._all(*TRAINING))
        return next((failure for failure in failures if failure is not None), None)

    @property
    def counts_writes(self) -> bool:
        """Return True if the versions of tensors tell what the train steps have written to."""
        return all(runner.program.counts_writes for runner in self._all(*TRAINING))

    @property
    def description(self) -> str:
        """Return in a word how the train steps run."""
        programs = [runner.program for runner in self._all(*TRAINING)]
        if not programs:
            return "not traced yet"
        if any(program.compiled for program in programs):
            return "compiled"
        return "plain Python" if any(program.graph is None for program in programs) else "traced"

    @property
    def time_ratio(self) -> float:
        """Return how long the train steps of a run will take, relative to now: less if they will be compiled."""
        runners = list(self._all(*TRAINING))
        if not self.fused or any(runner.program.compiled for runner in runners):
            return 1.0
        own = runners[0].compiler.hardware if runners else None
        return time_ratio(max((runner.program.operations for runner in runners), default=0), own)

    @property
    def working_bytes(self) -> int | None:
        """Return the most memory that a train step takes beside the state, of those traced so far."""
        known = [runner.program.working_bytes for runner in self._all(*TRAINING)]
        return max((size for size in known if size is not None), default=None)

    def train(
        self, lead: Args, rest: Args, *, shared_data: bool, pace: Pace, capture: Capture | None = None
    ) -> tuple[Tensor, frozenset[str]]:
        """Take one step of every active member, in place. Return the losses, and the parameters that took no part.

        Args:
            lead: The first arguments of `Steps.train`: the state and the shared tensors.
            rest: The other arguments.
            shared_data: True if the data have no member axis.
            pace: The number of steps left of this kind, and the seconds per step.
            capture: Captures the steps of the lane, if its device can. The next step overwrites the losses.
        """
        self._look()
        lead, packed = self._at_once(lead, rest[0])
        args = (*lead, *rest)
        if packed is not None or len(rest[0]) > 1:
            runner = self._compiled("train", args, shared_data, pace)
            if runner is not None:
                return self._run(runner, lead, rest, pace[0], capture)[0], runner.program.unused
            if packed is not None:
                _, active, *batch = rest
                runner = self._runner("packed_gradients", (*lead, *batch, active), shared_data)
                if not runner.program.unused:
                    return self._train_packed(runner, packed, lead, rest, shared_data), frozenset()
            if len(rest[0]) > 1:
                return self._train_sliced(lead, rest, shared_data)
        runner = self._runner("train", args, shared_data)
        runner.compiler.consider(*pace)
        return self._run(runner, lead, rest, pace[0], capture)[0], runner.program.unused

    def ready_to_train(self, lead: Args, rest: Args, *, shared_data: bool) -> None:
        """Trace what `train` runs first for such a batch, if that has not been done."""
        coefficients, active, *batch = rest
        given = lead
        lead, packed = self._at_once(given, coefficients)
        if compile_mode() != "now":
            args = (*lead, *batch, active)
            if packed is not None and not self.program("packed_gradients", args, shared_data).program.unused:
                return
            if len(coefficients) > 1:
                self.program("gradients", (*lead, *batch), shared_data)
                return
        if self.program("train", (*lead, *rest), shared_data).program.unused and lead is not given:
            self.program("train", (*given, *rest), shared_data)  # some parameters are not updated

    def _train_sliced(self, lead: Args, rest: Args, shared_data: bool) -> tuple[Tensor, frozenset[str]]:
        """Take one step in parts: gradients of all members, then the update of each slice.

        So a program of an update does not depend on which other members take the step.
        """
        coefficients, active, *batch = rest
        program = self._runner("gradients", (*lead, *batch), shared_data).program
        found = program([*self._flat(lead), *leaves(batch)])
        return self.apply("apply", lead, (coefficients, active, found)), program.unused

    def _train_packed(self, runner: Runner, packed: Packed, lead: Args, rest: Args, shared_data: bool) -> Tensor:
        """Take one step in two parts: gradients, then an update of all members at once if all are fine."""
        coefficients, active, *batch = rest
        program, begun = runner.program, time.perf_counter()
        with torch.no_grad():
            values = program.run(*self._flat(lead), *leaves((*batch, active)), *program.outside)
            if bool(values[-1]):  # "fine" comes last
                self._apply_packed(runner, packed, coefficients, values)
                runner.shape = runner.shape or family_of("train", (*lead, *rest), shared_data)
                self._shape_times.add(runner.shape, time.perf_counter() - begun)
                return values[0]  # the losses come first
        found = program.result(values)
        gradients = packing.split(found.pop("gradient"), lead[0]["params"])
        del found["fine"]
        found.pop("norms", None)
        return self.apply("apply", lead, (coefficients, active, {**found, "gradients": gradients}))

    def _apply_packed(
        self,
        runner: Runner,
        packed: Packed,
        coefficients: CoefficientsBySlice,
        values: Sequence[Tensor],
    ) -> None:
        """Update all members, slice by slice, by the flat results of "packed_gradients"."""
        for own, numbers in coefficients.items():
            # The arguments of the second part follow from the first. To look them up again would take as long as a
            # few of its operations.
            key = own, tuple(numbers)
            follower = runner.followers.get(key)
            part = self._slice_of(own, own.packed, packed[0])
            if follower is None:
                found = runner.program.result(values)
                del found["fine"]
                args = (part, {}, {own.alone: numbers}, own.of(found))
                follower = runner.followers[key] = self._runner("packed_apply", args, False)
            follower.used = self._uses
            state, results = packed[1] if part is packed[0] else leaves(part), values[:-1]
            program = follower.program
            program.run(*state, *leaves(numbers), *own.of(list(results)), *program.outside)

    def _at_once(self, lead: Args, coefficients: CoefficientsBySlice) -> tuple[Args, Packed | None]:
        """Return a step's first arguments, and what updates all parameters at once in a second part of it.

        On an accelerator, the host would have to wait for the first part. There one masked program updates all,
        and the state that it is given has the buffers.
        """
        packed = self._packed(lead[0], coefficients)
        if packed is None or _on_cpu(lead[0]):
            return lead, packed
        return (lead if len(coefficients) > 1 else (packed[0], lead[1])), None

    def _packed(self, state: State, coefficients: CoefficientsBySlice) -> Packed | None:
        """Return a state with its buffers, and its leaves; None if a step can't update all at once."""
        known = getattr(self._buffers, "last", None)
        if known is None or known[0] is not state:
            buffers = packed = None
            if self.fused and not (_on_cpu(state) and "scale" in state["member"]):
                buffers = packing.buffers_of(state)
            if buffers is not None:
                parts = ("buffers", "member", "sums") if _on_cpu(state) else state
                packed = {"packed": buffers, **{part: state[part] for part in parts}}
            known = self._buffers.last = state, None if packed is None else (packed, leaves(packed))
        together = coefficients and all(len(own) == 1 for own in coefficients.values())
        return known[1] if together and not self.steps.unused else None

    def _slice_of(self, own: Slice, find: Callable[[State], State], state: State) -> State:
        """Return `find(state)`, the part of a state that belongs to a slice. Each thread finds it once."""
        known = getattr(self._sliced, "last", None)
        if known is None or known[0] is not state:
            known = self._sliced.last = state, {}
        if own not in known[1]:
            known[1][own] = find(state)
        return known[1][own]

    def _compiled(self, kind: str, args: Args, shared_data: bool, pace: Pace) -> Runner | None:
        """Return a program if it is compiled. It is traced to be compiled as soon as that may pay."""
        own = hardware(args[0]["member"]["seed"].device)
        if not self._any_compiled and compile_mode() == "auto":
            now = time.monotonic()
            if now < self._next_request:
                return None
            self._next_request = now + CHECK_SECONDS
        if not any(key[0] == kind for key in self._programs) and not may_pay(*pace, own):
            return None
        family, width = family_of(kind, args, shared_data), width_of(args)
        if width not in self._programs.get(family, ()) and not may_pay(*self._shape_times.of(family, pace), own):
            return None
        runner = self._runner(kind, args, shared_data, family)
        if runner.compiler.compilable_seconds is None:
            runner.compiler.compilable_seconds = self._compilable_seconds(args, shared_data)
        runner.compiler.consider(*pace)
        if not runner.program.compiled:
            return None
        self._any_compiled = True
        return runner

    def _compilable_seconds(self, args: Args, shared_data: bool) -> float | None:
        """Return how long a step spends in operations that a compiler can merge; None if that is not known yet."""
        state, shared, _, active, *batch = args
        args = (state, shared, *batch, active)
        if state["member"]["seed"].device.type != "cpu":
            return None  # an accelerator's operations run on after they have been called
        runner = self._programs.get(family_of("packed_gradients", args, shared_data), {}).get(width_of(args))
        if runner is None or runner.program.graph is None:
            return None
        # Its program writes to none of its inputs, and the update of all members, a loop of C, can't be merged.
        return compilable_seconds(runner.program.graph, [*leaves(args), *runner.program.outside])

    def row_gradients(self, lead: Args, rest: Args, *, shared_data: bool, pace: Pace) -> tuple[Tensor, Tensor]:
        """Compute the first half of a train step on some rows of a batch. Its results are summed over all rows."""
        self._look()
        runner = self._runner("row_gradients", (*lead, *rest), shared_data)
        runner.compiler.consider(*pace)
        flat, columns = self._run(runner, lead, rest)
        return flat, columns

    def _run(
        self, runner: Runner, lead: Args, rest: Args, steps_left: int = 0, capture: Capture | None = None
    ) -> Sequence[Tensor]:
        """Run a program, captured if the device can and it pays, and return its flat results."""
        program, state, given = runner.program, self._flat(lead), leaves(rest)
        with torch.no_grad():  # tensors outside of the step may take gradients
            if capture is not None:
                return capture.run(program, state, given, steps_left)
            return program.run(*state, *given, *program.outside)

    def gradients(self, lead: Args, rest: Args, *, shared_data: bool) -> dict[str, Tree]:
        """Return what `apply` needs of a batch."""
        args = (*lead, *rest)
        return self.program("gradients", args, shared_data).program(leaves(args))

    def apply(self, kind: str, lead: Args, rest: Args) -> Tensor:
        """Run the second part of a train step in place, and return the losses `(member,)`.

        It is "apply", or "row_apply" for rows on several devices.
        """
        # Never compiled: the devices of a group would compile it at different steps, and round differently.
        coefficients, *more = rest
        if not coefficients:  # a Keras optimizer keeps its numbers in the state
            program = self.program(kind, (*lead, *rest), False).program
            with torch.no_grad():  # tensors outside of the step may take gradients
                return program.run(*self._flat(lead), *leaves(rest), *program.outside)[0]
        losses = []
        for own, numbers in coefficients.items():
            state = self._slice_of(own, own.state, lead[0])
            args = (state, lead[1], {own.alone: numbers}, *own.of(tuple(more)))
            losses.append(self.program(kind, args, False).program(leaves(args)))
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def evaluate(self, args: Args, *, shared_data: bool) -> dict[str, Tensor]:
        """Return the sums `(member, …)` of the loss and the metrics over a batch."""
        return self.program("evaluate", args, shared_data).program(leaves(args))

    def predict(self, args: Args, *, shared_data: bool) -> Tree:
        """Return the outputs `(member, row, …)` on a batch of inputs, as NumPy arrays."""
        runner = self.program("predict", args, shared_data)
        begun = time.perf_counter()
        outputs = map_tree(on_host, runner.program(leaves(args)))
        runner.record(time.perf_counter() - begun)
        return outputs

    def _flat(self, lead: Args) -> list[Tensor]:
        # A lane's state has the same tensors at every step. Each thread flattens it once.
        known = getattr(self._flattened, "last", None)
        if known is None or any(a is not b for a, b in zip(known[0], lead, strict=True)):
            known = self._flattened.last = lead, leaves(lead)
        return known[1]

    def _all(self, *kinds: str) -> Iterator[Runner]:
        for _, family in list(self._kept.values()):
            for (kind, *_), programs in list(family.items()):
                if not kinds or kind in kinds:
                    yield from list(programs.values())

    def stop(self) -> None:
        """Stop every compiler that is still at work."""
        self._next_request = 0.0
        for runner in self._all():
            runner.compiler.stop()

    def forget_state(self) -> None:
        """Drop what this thread has kept of the last state that was stepped."""
        for kept in (self._flattened, self._buffers, self._sliced):
            vars(kept).clear()

    def look_again(self) -> None:
        """Before the next step, compare everything that the traced Python can read, large arrays too."""
        self._thoroughly = True

    def _look(self) -> None:
        """Find the programs for what the Python of the model, the loss and the metrics reads now."""
        if self._snapshot is not None and self._snapshot.same(thoroughly=self._thoroughly):
            self._thoroughly = False
            return
        with TRACE_LOCK, lock_of(self.steps.model):
            snapshot = PythonSnapshot(self.steps.roots())
            if self.fused:
                snapshot.refuse()
                refuse_unstackable(self.steps.model)
            # Floats that members differ in are no part of the programs: recordings tell programs for others apart.
            differ = getattr(self.steps, "members_differ", False)
            key = snapshot.key_without_floats if differ else snapshot.key
            kept = self._kept.pop((differ, key), None) or (snapshot, {})
            self._kept[differ, key] = kept  # the last one used is dropped last
            while len(self._kept) > MAX_KEPT:
                _, forgotten = self._kept.pop(next(iter(self._kept)))
                for runner in (runner for programs in forgotten.values() for runner in programs.values()):
                    runner.compiler.stop()
            self._programs, self._found = kept[1], {}
            # Only now, so that a refused model is refused again.
            self._snapshot, self._thoroughly = snapshot, False

    @contextmanager
    def trial(self, *, train: bool) -> Iterator[None]:
        """Context in which the model's Python can be tried without side effects."""
        with (
            lock_of(self.steps.model),
            undoing_side_effects(*self.steps.roots()),
            in_mode(self.steps.model, train=train, given=self.steps.modes),
        ):
            yield

    def found(self, trial: Hashable, run: Callable[[], Result]) -> Result:
        """Return a trial's result. It runs again only if the model's Python may read something else now."""
        if self._snapshot is None or not self._snapshot.same(thoroughly=False):
            return run()
        if trial not in self._found:
            self._found[trial] = run()
        return self._found[trial]

    def serve(self, model: nn.Module) -> None:
        """Trace this model from now on. It must have the structure that the programs are for."""
        if model is not self.steps.model:
            self.steps.model, self._snapshot = model, None

    def program(self, kind: str, args: Args, shared_data: bool) -> Runner:
        """Return the program for arguments of these shapes. It is traced if there is none yet."""
        self._look()
        return self._runner(kind, args, shared_data)

    def _runner(self, kind: str, args: Args, shared_data: bool, family: Key | None = None) -> Runner:
        """Return what `program` does, for what the Python was found to read."""
        family, width = family or family_of(kind, args, shared_data), width_of(args)
        if family not in self._programs:
            self._drop_unused()
        programs = self._programs.setdefault(family, {})
        if width not in programs:
            with TRACE_LOCK, lock_of(self.steps.model):
                if width not in programs:
                    if "params" in args[0]:
                        self.steps.refuse_other_parameters(args[0], args[1])
                    known = for_any_width(programs, width)
                    programs[width] = known or Runner(*self._make(kind, args, shared_data), programs)
        runner = programs[width]
        self._uses += 1
        runner.used = self._uses
        return runner

    def _drop_unused(self) -> None:
        """Drop the programs that were used longest ago, so that there is room for those of another form."""

        def last_used(family: Key) -> int:
            return max((runner.used for runner in self._programs[family].values()), default=self._uses)

        with TRACE_LOCK:
            while len(self._programs) >= MAX_FORMS:
                for runner in self._programs.pop(min(self._programs, key=last_used)).values():
                    runner.compiler.stop()

    def _make(self, kind: str, args: Args, shared_data: bool) -> tuple[Program, Compiler]:
        step: Callable[..., Tree] = getattr(self.steps, kind)
        rest = {
            "train": (True, True, not shared_data, True),
            "gradients": (not shared_data, True),
            "apply": (True, True, True),
            "packed_gradients": (not shared_data, True, True),
            "packed_apply": (True, True),
            "row_gradients": (not shared_data, True, False),
            "row_apply": (True, True, True, True),
            "evaluate": (not shared_data, True),
        }
        stacked = (True, False, *rest.get(kind, (not shared_data,)))

        def run(*args: Tree) -> Tree:
            with locked_in_mode(self.steps, train=kind in TRAINING):
                modes = {name: module.training for name, module in self.steps.model.named_modules()}
                result = step(*args, how=How(shared_data, self.fused))
                for name, module in self.steps.model.named_modules() if self.fused else ():
                    if module.training != modes.get(name):
                        raise CannotFuseError(
                            f"its forward switches {name or 'itself'} between train and eval mode"
                        )
                return result

        snapshot = self._snapshot
        assert snapshot is not None

        # The program outlives the lane that it was traced for, whose tensors it must not keep on the device.
        specs = map_tree(lambda tensor: TensorSpec.of(tensor, False), args)

        def at_width(width: int) -> Program:
            if not snapshot.same(thoroughly=True):
                raise CannotFuseError("what it reads has changed")
            examples = map_tree(TensorSpec.empty, specs)
            with restoring_python(snapshot):
                return trace(run, tuple(rows_of(examples, stacked, width)), stacked)

        sliced = kind == "train" and len(args[2]) > 1  # the slices have the width built in
        if self.fused:
            program = from_other_sizes(self._programs, self.steps, kind, args, stacked, shared_data, run, snapshot)
            if program is not None:
                self.steps.unused = program.unused
                return program, Compiler(program, at_width)
            self._try(kind, args, stacked, shared_data, snapshot)
        self.traces += 1
        try:
            with restoring_python(snapshot, strictly=self.fused, harmless=lambda: self._is_cache(kind, snapshot)):
                program = self._traced(run, args, stacked)
        except CannotFuseError as error:
            if self.fused:
                raise
            self.untraced = str(error)
            program = untraced(run, args, stacked)
        if kind == "packed_apply" and program.graph is not None:
            program.run = with_loop(program.graph, program.run)
        program.unused = self.steps.unused
        return program, Compiler(program, at_width if self.fused and not sliced else None)

    def _try(
        self, kind: str, args: Args, stacked: Sequence[bool], shared_data: bool, snapshot: PythonSnapshot
    ) -> None:
        """Run a step's Python once for the first member, to find the parameters that take part in the loss.

        Tracing will show anything else that is wrong with the step.

        Raises:
            StatefulError: The step changes Python state that its result depends on.
        """
        if kind in APPLYING:
            return
        harmless = partial(self._is_cache, kind, snapshot)
        with (
            restoring_python(snapshot, harmless=harmless),
            restoring_tensors(snapshot),
            locked_in_mode(self.steps, train=kind in TRAINING),
        ):
            try:
                if kind in TRAINING:
                    batch, weights = args[4:] if kind == "train" else args[2:4]
                    self.steps.find_unused(args[0], args[1], batch, weights, How(shared_data, fused=False))
                    return
                refuse_fast_path = getattr(self.steps, "refuse_fast_path", None)
                if refuse_fast_path is not None and kind in ("evaluate", "predict"):
                    refuse_fast_path(kind, args[0], args[1], args[2], How(shared_data, fused=False))
                one = [map_tree(torch.clone, arg) for arg in rows_of(args, stacked, 1)]
                step = partial(getattr(self.steps, kind), how=How(shared_data, fused=False))
                first = step(*map_tree(torch.clone, one))
                changed = snapshot.changed()
                if not changed:
                    return
                known = PythonSnapshot(self.steps.roots()).key
                again = step(*one)
            except (NoGradientError, FastPathError):
                raise
            except Exception:
                return
            if known != PythonSnapshot(self.steps.roots()).key or not _equal(first, again):
                raise StatefulError(f"running it changes {changed[0]}")

    def _is_cache(self, kind: str, snapshot: PythonSnapshot) -> bool:
        """Return True if the state that a forward in evaluation mode left is a cache that `model.train()` empties.

        timm's LeViT and others keep their attention biases this way. A program computes them for every batch.
        """
        if kind in TRAINING:
            return False
        model = self.steps.model
        model.train(True)
        after = PythonSnapshot(self.steps.roots()).key
        snapshot.restore()
        model.train(True)
        return after == PythonSnapshot(self.steps.roots()).key

    def _traced(self, run: Callable[..., Tree], args: Args, stacked: Sequence[bool]) -> Program:
        """Trace a step, and again with other settings if the model turns out to need them."""
        try:
            return trace(run, args, stacked, steady_inputs(args))
        except NeedsGradientError:
            self.steps.differentiates = True
        except CannotFuseError as error:
            if self.steps.contiguous or not any(said in str(error.__cause__) for said in _NO_VIEW):
                raise
            self.steps.contiguous = True
        return self._traced(run, args, stacked)


def _on_cpu(state: State) -> bool:
    return state["member"]["seed"].device.type == "cpu"


def _equal(tree: Tree, other: Tree) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(tree), leaves(other), strict=True))
