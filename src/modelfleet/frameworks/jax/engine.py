"""Engine of a lane of JAX members."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.frameworks.engine import Hyper, Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import FunctionalEngine, Programs
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.definition import JaxDefinition
from modelfleet.frameworks.jax.models import Module, Pair
from modelfleet.frameworks.jax.structure import difference, is_module, signature, statics
from modelfleet.frameworks.jax.task import Task
from modelfleet.frameworks.python_snapshot import PythonSnapshot
from modelfleet.frameworks.stacked import Positions
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Kind, Model, Tensor, Tree

if TYPE_CHECKING:
    from modelfleet.feeds import Batch


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

    def __init__(
        self,
        members: Sequence[Member],
        task: Task,
        device: jax.Device,
        *,
        fused: bool,
    ) -> None:
        self._members = list(members)
        self._reads = _reads(members[0].model, task)
        self._signature = signature(members[0].model)
        definition = JaxDefinition(members[0].model, task)
        found = _found(self._signature, definition, device, fused)
        super().__init__(members, definition, found.backend, fused=fused, programs=found)
        self._begun = False  # True if a step was taken since the members were last compared
        self._ready: set[Kind] = set()  # kinds of steps that are known to be traceable
        self._unlike: str | None = None  # the difference between members of the lane, if there is one by now

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, data: Tree, *, shared: bool) -> None:
        """Prepare the program for batches like this one, or run Python if a call does more than compute."""
        self._look()
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        reads = _reads(self._members[0].model, self.task)
        with reads.restoring():
            super().ready(kind, hyper, active, data, shared=shared)
            changed = reads.changed(draws=True)
        form = self._shared_definition.form
        if changed is not None and form.changes is None:
            form.changes = changed
        if form.changes is not None and self.untraced is None:
            self.programs.refuse(kind, _changes(form))
        self._own_if_untraced()
        self._ready.add(kind)

    def train(
        self,
        hyper: Hyper,
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
        *,
        shared: bool,
        pace: Pace | None = None,
        steps: int | None = None,
    ) -> None:
        """Take one step of the active members, or `steps` steps on data and weights with a step axis."""
        one = data if steps is None else map_tree(lambda leaf: leaf[0], data)
        self._begin("train", hyper, one, shared=shared)
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        super().train(hyper, active, data, weights, shared=shared, pace=pace, steps=steps)

    def gradients(self, data: Tree, weights: Tensor | None = None, *, shared: bool) -> Tree:
        """Return what `apply` needs to finish a step of every member on a batch."""
        self._begin("train", {}, data, shared=shared)
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        return super().gradients(data, weights, shared=shared)

    def train_some(
        self, slots: np.ndarray, hyper: Hyper, data: Tree, *, shared: bool, pace: Pace | None = None
    ) -> None:
        """Take one step of the members in some slots. A member that now differs has its own program."""
        self._begin("train", hyper, data if shared else _first(data), shared=True)
        if self._unlike is None:
            super().train_some(slots, hyper, data, shared=shared, pace=pace)
            return
        for index, slot in enumerate(slots):
            own = data if shared else map_tree(lambda leaf, index=index: leaf[index : index + 1], data)
            with self._serving(slot):
                super().train_some(np.array([slot]), hyper, own, shared=shared, pace=pace)

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
        """Return the totals of the loss and the metrics with a batch added."""
        self._begun &= totals is not None
        few = data if slots is None or shared else _first(data)
        self._begin("evaluate", {}, few, shared=shared or slots is not None)
        if self._unlike is None:
            return super().evaluate(totals, slots, data, weights, counts, size, shared=shared)
        for index, slot in enumerate((np.flatnonzero(counts) if slots is None else slots).tolist()):
            rows = np.array([slot if slots is None else index])
            own = self.cut(data, rows, int(counts[slot]), shared=shared)
            with self._serving(slot):
                totals = super().evaluate(totals, np.array([slot]), own, None, counts, size, shared=shared)
        return totals

    def forward(self, data: Tree, *, shared: bool, counts: np.ndarray | None = None) -> Tree:
        """Return the outputs `(slot, row, …)` on a batch of inputs, on the device."""
        self._begin("predict", {}, data, shared=shared)
        if self._unlike is not None:  # since the verb began
            raise CannotFuseError(self._unlike)
        return super().forward(data, shared=shared, counts=counts)

    def predict_some(self, positions: Positions, data: Tree, counts: np.ndarray) -> Tree:
        """Return the outputs of some members, each on its own rows, as NumPy arrays `(member, row, …)`."""
        self._begin("predict", {}, _first(data), shared=True)
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        return super().predict_some(positions, data, counts)

    @contextmanager
    def _serving(self, slot: int) -> Iterator[None]:
        """Use the programs of the member in a slot, which may differ from the first member."""
        member = self._members[self.slots[slot]]
        structure, usual = signature(member.model), self.programs
        if structure == self._signature:
            yield
            return
        definition = JaxDefinition(member.model, self.task)
        self.programs = _found(structure, definition, self.device, fused=False)
        self._shared_definition.go_on(self._own_form)
        try:
            yield
            if self._shared_definition.form.changes is not None:
                raise self._too_late(member, _changes(self._shared_definition.form))
        finally:
            self.programs = usual

    def _begin(self, kind: Kind, hyper: Hyper, data: Tree, *, shared: bool) -> None:
        """Find the programs for the current Python values, and find out if they can be traced."""
        if not self._begun or (self.untraced is None and self._reads.changed(thoroughly=False) is not None):
            self._look()
        self._begun = True
        if kind in self._ready or self.untraced is not None or self._unlike is not None:
            return
        try:
            self.ready(kind, hyper, self._all_slots(), data, shared=shared)
        except CannotFuseError as error:
            if self._shared_definition.form.changes is not None:
                raise self._too_late(self._members[0], str(error)) from error
            raise

    @staticmethod
    def _too_late(member: Member, reason: str) -> StrategyError:
        return StrategyError(
            f"member {member.name!r} and those like it can't go on as one: {reason}. "
            f'Use strategy="interleaved", where each member runs its own model.'
        )

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""
        self._begun = False
        return super().epoch_values()

    def maskable(self, batch: "Batch") -> bool:
        """Return True if row weights can remove the influence of padding."""
        if not self._begun or self._reads.changed(thoroughly=False) is not None:
            self._look()
        with self._trial():
            return self.untraced is None and super().maskable(batch)

    def rows_apart(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone."""
        with self._trial():
            return self.untraced is None and super().rows_apart(inputs)

    def working_bytes(self, batch: "Batch") -> int | None:
        """Return the memory that a train step on such a batch needs beside the state; None if not known."""
        with self._trial():
            return super().working_bytes(batch)

    @contextmanager
    def _trying(self, batch: "Batch", data: Tree, name: str) -> Iterator[Tree]:
        with self._trial(), super()._trying(batch, data, name) as few:
            yield few

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Undo all changes of Python values and of the form at the end of this context."""
        form = self._shared_definition.form
        kept, form.keep = form.keep, False
        try:
            with _reads(self._members[0].model, self.task).restoring():
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
                self._unlike = f"{member.name!r} has become unlike {self._members[0].name!r}: {what}"
        self._ready.clear()
        before = self._shared_definition
        self._reads, self._signature = _reads(models[0], self.task), signatures[0]
        self._definition = JaxDefinition(models[0], self.task)
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


def _first(data: Tree) -> Tree:
    """Return the rows of the first of several members."""
    return map_tree(lambda leaf: leaf[0], data)


def _reads(model: Model, task: Task) -> PythonSnapshot:
    """Return the Python values that the code of a model and of its task may read."""
    optimizer = task.optimizer
    roots: dict[str, Any] = {
        "the objective": task.objective,
        "the loss": None if task.loss is None else task.loss.rows,
        "the metrics": task.metrics,
        "the optimizer": None if optimizer is None else (optimizer.make, optimizer.fixed),
    }
    if is_module(model):
        return PythonSnapshot({**roots, **dict(statics(model))})
    return PythonSnapshot({**roots, "apply": model[1]})


def _found(structure: Hashable, definition: JaxDefinition, device: jax.Device, fused: bool) -> Programs:
    """Return the process's programs of a structure and a task; new ones if Python values have changed."""
    key = (structure, definition.task, device, fused)
    known = _programs.pop(key, None)
    if known is None or known.untraced is not None or known.reads.changed() is not None:
        known = Programs(definition, JaxBackend(device), fused=fused)
        known.reads = _reads(definition.model, definition.task)
    _programs[key] = known
    while len(_programs) > _MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)))
    return known


def make_engine(
    members: Sequence[Member],
    task: Task,
    columns: Mapping[str, np.ndarray],
    device: jax.Device,
    *,
    fused: bool,
    programs: Programs | None = None,
) -> JaxEngine:
    """Return the engine of a lane. Programs are found by the structure of the members."""
    return JaxEngine(members, task, device, fused=fused)
