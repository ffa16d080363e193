"""Engine of a lane of JAX members."""

from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import NOTHING_LEFT, Hyper, Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import Definition, FunctionalEngine, MergedDefinition, Programs, Slice
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.definition import JaxDefinition
from modelfleet.frameworks.jax.models import Module, Pair
from modelfleet.frameworks.jax.structure import is_module, statics
from modelfleet.frameworks.jax.task import Task
from modelfleet.frameworks.jax.variants import Variants, definitions_of
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.python_snapshot import PythonSnapshot
from modelfleet.frameworks.stacked import Positions
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Kind, Tensor, Tree

_MAX_PROGRAMS = 64
_MAX_COMPARED = 256  # members of a lane whose modules are compared before each epoch
_programs: dict[Hashable, Programs] = {}  # the most recently used are at the end


class JaxEngine(FunctionalEngine):
    """Engine of a lane of JAX models (see `frameworks.engine.Engine`).

    There are no columns: each member's hyperparameters are in its state.

    A program is traced under the values that Python holds: globals, closures, attributes. The engine compares them
    before each call, and the slow ones (large arrays, members' attributes) before each epoch and verb. If a value
    has changed, the members are grouped into variants again, and another program is traced. Members whose calls
    change such values, or draw from Python's generators, are not traced: each runs its Python code alone.
    """

    def __init__(self, context: LaneContext[Task, Programs]) -> None:
        """Make the engine. Its programs are found by the structure of the members."""
        self._members = list(context.members)
        self._tasks = list(context.tasks)
        self._variants = Variants.of(self._members, self._tasks, context.variants)
        self._reads = _reads(self._variants)
        definition = self._variants.definition()
        found = _found(self._variants, definition, context.device, context.fused)
        self._unlike: str | None = None  # the difference between members of the lane, if there is one by now
        super().__init__(replace(context, programs=found), definition, found.backend)
        self._begun = False  # True if a step was taken since the members were last compared
        self._ready: set[Kind] = set()  # kinds of steps that are known to be traceable

    def hyperparameters_in(self, tensors: Collection[str]) -> dict[str, str]:
        """Return the hyperparameters that the optimizer's state has a tensor for (`optimizers._OwnState`)."""
        own = {name.partition(".")[2]: name for name in tensors}  # without the leaf's number
        optimizer = self._tasks[0].optimizer
        keys = () if optimizer is None else optimizer.own
        names = {"lr" if key == "learning_rate" else key: f"values.{key}" for key in keys}
        return {name: own[path] for name, path in names.items() if path in own}

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Prepare the program for batches like this one, or run Python if a call does more than compute."""
        self._look()
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        reads = _reads(self._variants)
        with reads.restoring():
            super().ready(kind, hyper, active, batch)
            definition = self.programs.definition
            if kind == "train" and isinstance(definition, MergedDefinition):
                definition.check_all(self.state, batch)
            changed = reads.changed(draws=True)
        forms = [definition.form for definition in self._shared]
        if changed is not None and forms[0].changes is None:
            forms[0].changes = changed
        for form in forms:
            if form.changes is not None and self.untraced is None:
                self.programs.refuse(kind, _changes(form))
        self._own_if_untraced()
        self._ready.add(kind)

    def train(self, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take the steps of a batch for the active members."""
        self._begin_as_one("train", hyper, batch)
        super().train(hyper, active, batch, pace)

    def gradients(self, batch: Batch) -> Tree:
        """Return what `apply` needs to finish a step of every member on a batch."""
        self._begin_as_one("train", {}, batch)
        return super().gradients(batch)

    def train_some(self, hyper: Hyper, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take one step of the members that a batch is for. A member that now differs has its own program."""
        self._begin("train", hyper, batch)
        if self._unlike is None:
            super().train_some(hyper, batch, pace)
            return
        assert batch.slots is not None
        for index, slot in enumerate(batch.slots.tolist()):
            with self._serving(slot):
                super().train_some(hyper, _for_one(batch, index, slot), pace)

    def evaluate(self, totals: Tree | None, batch: Batch) -> Tree:
        """Return the totals of the loss and the metrics with a batch added."""
        self._begun &= totals is not None
        self._begin("evaluate", {}, batch)
        if self._unlike is None:
            return super().evaluate(totals, batch)
        for index in np.flatnonzero(batch.counts).tolist():
            slot = index if batch.slots is None else int(batch.slots[index])
            with self._serving(slot):
                totals = super().evaluate(totals, _for_one(batch, index, slot))
        return totals

    def predict(self, batch: Batch, positions: Positions | None = None) -> Tree:
        """Return the outputs of some members, or of all, as NumPy arrays `(member, row, …)`."""
        self._begin_as_one("predict", {}, batch, some=positions is not None)
        return super().predict(batch, positions)

    @contextmanager
    def _serving(self, slot: int) -> Iterator[None]:
        """Use the programs of the member in a slot, which may differ from the first member."""
        position = self.slots[slot]
        member, usual = self._members[position], self.programs
        own = Variants.of([member], [self._tasks[position]], [0])
        if own.signatures == self._variants.signatures and own.tasks == self._variants.tasks:
            yield
            return
        self.programs = _found(own, own.definition(), self.device, fused=False)
        (definition,) = self._shared
        definition.go_on(self._own[self._variants.numbers[position]])
        definition.learn(member)
        try:
            yield
            if definition.form.changes is not None:
                raise self._too_late(member, _changes(definition.form))
        finally:
            self.programs = usual

    def _begin(self, kind: Kind, hyper: Hyper, batch: Batch, *, some: bool = False) -> None:
        """Find the programs for the current Python values, and find out if they can be traced.

        `some` is True if a batch without slots is not for all members.
        """
        if not self._begun or (self.untraced is None and self._reads.changed(thoroughly=False) is not None):
            self._look()
        self._begun = True
        if kind in self._ready or self.untraced is not None or self._unlike is not None:
            return
        example = batch if batch.steps is None else batch.step(0)
        if some or batch.slots is not None:
            example = replace(example, data=example.member(0), shared=True)
        try:
            self.ready(kind, hyper, self._all_slots(), example)
        except CannotFuseError as error:
            if any(definition.form.changes is not None for definition in self._shared):
                raise self._too_late(self._members[0], str(error)) from error
            if self._variants.count == 1:
                raise
            self._unlike = str(error)  # their numbers have changed, and one now computes something else
            self._slices = ()

    def _begin_as_one(self, kind: Kind, hyper: Hyper, batch: Batch, *, some: bool = False) -> None:
        """Begin a step of all members at once, or raise `CannotFuseError` if they differ by now."""
        self._begin(kind, hyper, batch, some=some)
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)

    @staticmethod
    def _too_late(member: Member, reason: str) -> StrategyError:
        return StrategyError(
            f"member {member.name!r} and those like it can't stay fused: {reason}. "
            f'Use strategy="interleaved", where each member runs its own model.'
        )

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""
        self._begun = False
        return super().epoch_values()

    def can_mask_padding(self, batch: Batch) -> bool:
        """Return True if row weights can remove the influence of padding."""
        if not self._begun or self._reads.changed(thoroughly=False) is not None:
            self._look()
        with self._trial():
            return self.untraced is None and super().can_mask_padding(batch)

    def rows_are_independent(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone."""
        with self._trial():
            return self.untraced is None and super().rows_are_independent(inputs)

    def working_bytes(self, batch: Batch) -> int | None:
        """Return the memory that a train step on such a batch needs beside the state; None if not known."""
        with self._trial():
            return super().working_bytes(batch)

    @contextmanager
    def _trying(self, batch: Batch, data: Tree, name: str) -> Iterator[Tree]:
        with self._trial(), super()._trying(batch, data, name) as few:
            yield few

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Undo all changes of Python values and of the form at the end of this context."""
        forms = [definition.form for definition in self._shared]
        kept = [form.keep for form in forms]
        for form in forms:
            form.keep = False
        try:
            with _reads(self._variants).restoring():
                yield
        finally:
            for form, keep in zip(forms, kept, strict=True):
                form.keep = keep

    @property
    def _shared(self) -> list[JaxDefinition]:
        """Return the definitions of the variants that the programs have."""
        return definitions_of(self.programs.definition)

    @property
    def _own(self) -> list[JaxDefinition]:
        """Return the definitions of the variants of this lane's own members."""
        return definitions_of(self._definition)

    def _look(self) -> None:
        """Take other programs if the Python values that they were traced under have changed."""
        if self.untraced is not None:
            self._own[0].form.take(self._members[0].model)
            return
        if self._reads.changed() is None and self._variants.still_hold(self._members[:_MAX_COMPARED]):
            return
        self._ready.clear()
        before, shared, numbers = self._own, self._shared, self._variants.numbers
        self._variants = Variants.found(self._members, self._tasks)
        self._unlike = self._variants.unlike()
        if self._unlike is not None:
            self._variants = self._variants.first()
        self._reads = _reads(self._variants)
        self._definition = self._variants.definition()
        self.programs = _found(self._variants, self._definition, self.device, self.fused)
        for definitions in (self._own, self._shared):
            for definition, position in zip(definitions, self._variants.firsts, strict=True):
                definition.go_on(shared[numbers[position]])
                definition.go_on(before[numbers[position]])
                definition.learn(self._members[position])
        own = np.asarray(self._variants.numbers, np.int32)
        self.stacked.write(range(len(own)), {"numbers": {"variant": own}})
        self._slices = self._slices_of(self.slots)

    def _definition_of(self, position: int) -> Definition:
        # Of members that differ by now, there is only the definition of the first.
        return self._definition if self._unlike is not None else super()._definition_of(position)

    def _slices_of(self, positions: np.ndarray) -> tuple[Slice, ...]:
        # Members that differ by now take their steps one after the other, each by its own definition.
        return () if self._unlike is not None else super()._slices_of(positions)

    def _own_if_untraced(self) -> None:
        """Run Python with the member's own form, so that changes by its calls stay its own."""
        if self.untraced is not None and self.programs.definition is not self._definition:
            own = Programs(self._definition, self.backend, fused=False)
            self._own[0].go_on(self._shared[0])
            own.refuse("train", self.untraced)
            self.programs = own
        if self.untraced is not None:
            self._own[0].form.keep = True


def _changes(form: Module | Pair) -> str:
    return f"a call changes what Python holds ({form.changes})"


def _for_one(batch: Batch, index: int, slot: int) -> Batch:
    """Return the real rows of one member of a batch, as a batch for its slot."""
    count = int(batch.counts[index])
    rows = map_tree(lambda leaf: leaf[:count], batch.member(index))
    return Batch(rows, True, batch.counts[[index]], slots=np.array([slot]))


def _reads(variants: Variants) -> PythonSnapshot:
    """Return the Python values that the code of models and of their tasks may read."""
    roots: dict[str, object] = {}
    for number, (member, task) in enumerate(zip(variants.members, variants.tasks, strict=True)):
        optimizer, model = task.optimizer, member.model
        found: dict[str, object] = {
            "the objective": task.objective,
            "the loss": None if task.loss is None else task.loss.rows,
            "the metrics": task.metrics,
            "the optimizer": None if optimizer is None else (optimizer.make, optimizer.fixed),
            **(dict(statics(model)) if is_module(model) else {"apply": model[1]}),
        }
        roots |= {name if number == 0 else f"{name} of {member.name!r}": value for name, value in found.items()}
    return PythonSnapshot(roots)


def _found(variants: Variants, definition: Definition, device: jax.Device, fused: bool) -> Programs:
    """Return the process's programs of structures and tasks; new ones if Python values have changed."""
    key = (variants.signatures, variants.tasks, device, fused)
    known = _programs.pop(key, None)
    if known is None or known.untraced is not None or known.reads.changed() is not None:
        known = Programs(definition, JaxBackend(device), fused=fused)
        known.reads = _reads(variants)
    _programs[key] = known
    while len(_programs) > _MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)))
    return known


def make_engine(context: LaneContext[Task, Programs]) -> JaxEngine:
    """Return the engine of a lane."""
    return JaxEngine(context)
