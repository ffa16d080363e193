"""Engine of a lane of JAX members."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import NOTHING_LEFT, Hyper, Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import FunctionalEngine, Programs
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.definition import JaxDefinition
from modelfleet.frameworks.jax.models import Module, Pair
from modelfleet.frameworks.jax.structure import difference, is_module, signature, statics
from modelfleet.frameworks.jax.task import Task
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.python_snapshot import PythonSnapshot
from modelfleet.frameworks.stacked import Positions
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Kind, Model, Tensor, Tree

_MAX_PROGRAMS = 64
_MAX_COMPARED = 256  # members of a lane whose modules are compared before each epoch
_programs: dict[Hashable, Programs] = {}  # the most recently used are at the end


class JaxEngine(FunctionalEngine):
    """Engine of a lane of JAX models (see `frameworks.engine.Engine`).

    There are no columns: each member's hyperparameters are in its state.

    A program is traced under the values that Python holds: globals, closures, attributes. The engine compares them
    before each call, and the slow ones (large arrays, members' attributes) before each epoch and verb. If a value
    has changed, another program is traced. Members whose calls change such values, or draw from Python's
    generators, are not traced: each runs its Python code alone.
    """

    def __init__(self, context: LaneContext[Task, Programs]) -> None:
        """Make the engine. Its programs are found by the structure of the members."""
        self._members = list(context.members)
        self._tasks_of_lane = context.different_tasks
        model = self._members[0].model
        self._reads = _reads(model, self._tasks_of_lane)
        self._signature = signature(model)
        definition = JaxDefinition(model, self._tasks_of_lane)
        found = _found(self._signature, definition, context.device, context.fused)
        super().__init__(replace(context, programs=found), definition, found.backend)
        self._begun = False  # True if a step was taken since the members were last compared
        self._ready: set[Kind] = set()  # kinds of steps that are known to be traceable
        self._unlike: str | None = None  # the difference between members of the lane, if there is one by now

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Prepare the program for batches like this one, or run Python if a call does more than compute."""
        self._look()
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        reads = _reads(self._members[0].model, self._tasks_of_lane)
        with reads.restoring():
            super().ready(kind, hyper, active, batch)
            changed = reads.changed(draws=True)
        form = self._shared_definition.form
        if changed is not None and form.changes is None:
            form.changes = changed
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
        member = self._members[self.slots[slot]]
        structure, usual = signature(member.model), self.programs
        if structure == self._signature:
            yield
            return
        definition = JaxDefinition(member.model, self._tasks_of_lane)
        self.programs = _found(structure, definition, self.device, fused=False)
        self._shared_definition.go_on(self._own_form)
        try:
            yield
            if self._shared_definition.form.changes is not None:
                raise self._too_late(member, _changes(self._shared_definition.form))
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
            if self._shared_definition.form.changes is not None:
                raise self._too_late(self._members[0], str(error)) from error
            raise

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
        form = self._shared_definition.form
        kept, form.keep = form.keep, False
        try:
            with _reads(self._members[0].model, self._tasks_of_lane).restoring():
                yield
        finally:
            form.keep = kept

    @property
    def _shared_definition(self) -> JaxDefinition:
        found = self.programs.definition
        assert isinstance(found, JaxDefinition)
        return found

    def _look(self) -> None:
        """Take other programs if the Python values that they were traced under have changed."""
        if self.untraced is not None:
            self._own_form.form.take(self._members[0].model)
            return
        models = [member.model for member in self._members[:_MAX_COMPARED]]
        signatures = [signature(model) for model in models] if is_module(models[0]) else [signature(models[0])]
        if self._reads.changed() is None and all(found == self._signature for found in signatures):
            return
        self._unlike = None
        for member, found in zip(self._members, signatures, strict=False):
            what = difference(found, signatures[0])
            if what is not None:
                self._unlike = f"{member.name!r} now differs from {self._members[0].name!r}: {what}"
        self._ready.clear()
        before = self._shared_definition
        self._reads, self._signature = _reads(models[0], self._tasks_of_lane), signatures[0]
        self._definition = JaxDefinition(models[0], self._tasks_of_lane)
        self._definition.go_on(before)
        self.programs = _found(self._signature, self._definition, self.device, self.fused)
        self._shared_definition.go_on(before)

    def _own_if_untraced(self) -> None:
        """Run Python with the member's own form, so that changes by its calls stay its own."""
        if self.untraced is not None and self.programs.definition is not self._definition:
            own = Programs(self._definition, self.backend, fused=False)
            self._own_form.go_on(self._shared_definition)
            own.refuse("train", self.untraced)
            self.programs = own
        if self.untraced is not None:
            self._own_form.form.keep = True

    @property
    def _own_form(self) -> JaxDefinition:
        assert isinstance(self._definition, JaxDefinition)
        return self._definition


def _changes(form: Module | Pair) -> str:
    return f"a call changes what Python holds ({form.changes})"


def _for_one(batch: Batch, index: int, slot: int) -> Batch:
    """Return the real rows of one member of a batch, as a batch for its slot."""
    count = int(batch.counts[index])
    rows = map_tree(lambda leaf: leaf[:count], batch.member(index))
    return Batch(rows, True, batch.counts[[index]], slots=np.array([slot]))


def _reads(model: Model, tasks: Sequence[Task]) -> PythonSnapshot:
    """Return the Python values that the code of a model and of its lane's tasks may read."""
    task, optimizers = tasks[0], [task.optimizer for task in tasks if task.optimizer is not None]
    roots: dict[str, object] = {
        "the objective": task.objective,
        "the loss": None if task.loss is None else task.loss.rows,
        "the metrics": task.metrics,
        "the optimizer": [(optimizer.make, optimizer.fixed) for optimizer in optimizers],
    }
    if is_module(model):
        return PythonSnapshot({**roots, **dict(statics(model))})
    return PythonSnapshot({**roots, "apply": model[1]})


def _found(structure: Hashable, definition: JaxDefinition, device: jax.Device, fused: bool) -> Programs:
    """Return the process's programs of a structure and a task; new ones if Python values have changed."""
    key = (structure, definition.tasks, device, fused)
    known = _programs.pop(key, None)
    if known is None or known.untraced is not None or known.reads.changed() is not None:
        known = Programs(definition, JaxBackend(device), fused=fused)
        known.reads = _reads(definition.model, definition.tasks)
    _programs[key] = known
    while len(_programs) > _MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)))
    return known


def make_engine(context: LaneContext[Task, Programs]) -> JaxEngine:
    """Return the engine of a lane."""
    return JaxEngine(context)
