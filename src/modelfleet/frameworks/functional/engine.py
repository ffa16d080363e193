"""Engine of a lane whose steps are pure functions."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.batch_errors import batch_error
from modelfleet.frameworks.engine import NOTHING_LEFT, Hyper, Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional.padding_trial import ignores_padding, rows_are_independent
from modelfleet.frameworks.functional.state import READABLE, FunctionalState
from modelfleet.frameworks.lane_context import Task
from modelfleet.frameworks.stacked import Positions
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Kind, State, Tensor, Tree


class FunctionalEngine(FunctionalState):
    """An engine that runs a `Definition` on a `Backend`."""

    @property
    def task(self) -> Task:
        """Return the task of the members."""
        return self._definition.task

    @property
    def fused(self) -> bool:
        """Return True if a step is one program for all members."""
        return self.programs.fused

    @property
    def program(self) -> str:
        """Return how train steps run."""
        if self.programs.untraced is not None:
            return "Python"
        name, steps = self.backend.name, self.steps_per_call
        return name if steps == 1 else f"{name}, {steps} steps a call"

    @property
    def untraced(self) -> str | None:
        """Return the reason why every step runs its Python code; None if steps are traced."""
        return self.programs.untraced

    @property
    def time_ratio(self) -> float:
        """Return 1: the programs that are measured are compiled already."""
        return 1.0

    @property
    def compiling(self) -> bool:
        """Return False: nothing is compiled during the training."""
        return False

    def stop(self) -> None:
        """Do nothing: no work runs during the training."""

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(self, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take the steps of a batch for the active members."""
        data, weights, steps = batch.data, batch.weights, batch.steps
        if steps is None:
            args = (self.state, hyper, active, data, weights)
            self._keep(
                self.programs.run("train", batch.shared, *args, *self._record_argument, slices=self._slices)
            )
            return
        # A program for each power of two serves any number of steps: the loop ends after `steps`.
        room = 1 << (steps - 1).bit_length()
        if room > steps:
            data, weights = self.backend.lengthened((data, weights), room)
        args = (self.state, hyper, active, data, weights, steps)
        losses = () if self.record is None else (self.tensor(np.zeros((room, self._width))),)
        self._keep(self.programs.run("several", batch.shared, *args, *losses, slices=self._slices), steps=steps)

    def train_some(self, hyper: Hyper, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take one step of the members that a batch is for.

        The members take turns. So programs are traced for each number of rows, but not for each number of members.
        """
        for slot, (rows, data) in zip(_slots(batch), self._by_slot(batch), strict=True):
            args = (self.state, rows, hyper, self._one, data)
            own = self._slices_of(self.slots[[slot]])
            found = self.programs.run("one", True, *args, *self._record_argument, slices=own)
            self._keep(found, slots=np.array([slot]))

    @property
    def _record_argument(self) -> tuple[tuple[()], ...]:
        """Return the argument that has a program return the losses, too, if they are recorded."""
        return () if self.record is None else ((),)

    def _keep(self, found: Tree, *, steps: int | None = None, slots: np.ndarray | None = None) -> None:
        """Keep the state that a program has returned, and record the losses if there are any."""
        if self.record is None:
            self.state = found
            return
        self.state, losses = found
        self.record(losses[:steps], slots)

    def gradients(self, batch: Batch) -> Tree:
        """Return what `apply` needs to finish a step of every member on a batch."""
        return self.programs.run("gradients", batch.shared, self.state, batch.data, batch.weights)

    def apply(self, hyper: Hyper, active: Tensor, gradients: Tree) -> None:
        """Update the active members by what `gradients` returned."""
        self.state = self.programs.run("apply", True, self.state, hyper, active, gradients, slices=self._slices)

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Prepare the program for batches like this one."""
        data, shared, state = batch.data, batch.shared, self._readable(self.state)
        if kind == "predict":
            self.programs.ready(kind, shared, state, self._all_slots(), data)
            return
        if not self.state["metrics"]:
            self._allocate_metrics(batch)
        if kind == "train":
            if not self.state["params"]:
                raise InputError(
                    f"member {self._first.name!r} has no weights that are trained. Give it some, or leave it out."
                )
            with self._apart_by_update():
                self.programs.ready(kind, shared, self.state, hyper, active, data, None, slices=self._slices)
        else:
            self.programs.ready(kind, shared, state, self.state["metrics"], self._all_slots(), data, None)

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""
        values = self.values(self.state["metrics"])
        self.state = {**self.state, "metrics": self._fresh_metrics()}
        return values

    def evaluate(self, totals: Tree | None, batch: Batch) -> Tree:
        """Return the totals of the loss and the metrics with a batch added."""
        totals = self._fresh_metrics() if totals is None else totals
        if batch.slots is None:
            state, present = self._readable(self.state), self.tensor(batch.counts > 0)
            args = (state, totals, present, batch.data, batch.weights)
            totals, changed = self.programs.run("evaluate", batch.shared, *args)
            self._keep_changes(changed)
            return totals
        for rows, data in self._by_slot(batch):
            state = self._readable(self.state)
            totals, changed = self.programs.run("evaluate_one", True, state, totals, rows, self._one, data)
            self._keep_changes(changed)
        return totals

    def _by_slot(self, batch: Batch) -> Iterator[tuple[Tensor, Tree]]:
        """Yield the slot of each member that a batch is for, as an index, and the member's rows."""
        for index, slot in enumerate(_slots(batch)):
            yield self.indices([slot]), batch.member(index)

    def values(self, totals: Tree | None) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` from the totals of `evaluate`."""
        if totals is None:
            totals = self._fresh_metrics()
        found = self.backend.host(self.programs.run("results", True, totals))
        return {name: np.asarray(found[name], dtype=np.float64) for name in self.programs.names}

    def predict(self, batch: Batch, positions: Positions | None = None) -> Tree:
        """Return the outputs of some members, or of all, as NumPy arrays `(member, row, …)`."""
        counts, own = batch.counts, np.flatnonzero(batch.counts)
        state = self._readable(self.state) if positions is None else self.read(positions, READABLE)
        present = self.tensor(counts > 0)
        outputs, changed = self.programs.run("predict", batch.shared, state, present, batch.data)
        if leaves(changed):
            positions = self.slots if positions is None else np.asarray(positions)
            if (counts[own] != batch.size).any():
                return self._predict_alone(outputs, batch, positions)
            self.write(positions[own], self.programs.take(changed, self.indices(own)))
            self.changed = True
        return self.backend.host(outputs)

    def _predict_alone(self, outputs: Tree, batch: Batch, positions: np.ndarray) -> Tree:
        """Return outputs in which every member has predicted its real rows alone.

        A model that changes as it predicts must not see padding.
        """
        found = map_tree(np.array, self.backend.host(outputs))
        for index in np.flatnonzero(batch.counts).tolist():
            count = int(batch.counts[index])
            rows = map_tree(lambda leaf, count=count: leaf[:count], batch.member(index))
            alone = self.predict(Batch(rows, True, np.array([count])), positions[[index]])
            for whole, part in zip(leaves(found), leaves(alone), strict=True):
                whole[index, :count] = part[0]
        return found

    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch's data: the x of (x, y), or the data themselves."""
        return self._definition.inputs(data)

    # --- padding -------------------------------------------------------------------------------------------------

    def can_mask_padding(self, batch: Batch) -> bool:
        """Return True if row weights can remove the influence of padding, by a trial on a member of each variant.

        BatchNorm, for example, depends on every row of a batch. So the trial compares a member's step on a padded
        batch with a step on its real rows alone, running statistics and metrics included.
        """
        definition, known = self.programs.definition, self.programs.ignores_padding
        if not definition.can_mask_rows:
            return False
        index, real = batch.fewest_rows()
        key = (real, batch.size)
        if key not in known:
            states = self._examples(self.state)
            known[key] = ignores_padding(definition, self.backend, states, batch.member(index), real, batch.size)
        return known[key]

    def rows_are_independent(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone, by a trial on members."""
        known, size = self.programs.independent_rows, len(leaves(inputs)[0])
        if size not in known:
            states = self._examples(self._readable(self.state))
            known[size] = rows_are_independent(self.programs.definition, self.backend, states, inputs)
        return known[size]

    def row_weights(self, counts: np.ndarray, size: int) -> Tensor:
        """Return `(slot, row)`: 1 for a real row, 0 for padding."""
        return self.tensor((np.arange(size) < np.asarray(counts)[:, None]).astype(np.float32))

    def first_rows(self, batch: Batch, slots: np.ndarray, count: int) -> Batch:
        """Return a batch of the first `count` rows of the members in some slots."""
        counts = np.full(len(slots), count)
        if batch.shared:
            return Batch(map_tree(lambda leaf: leaf[:count], batch.data), True, counts, slots=slots)
        own = self.backend.take(batch.data, self.indices(slots))
        return Batch(map_tree(lambda leaf: leaf[:, :count], own), False, counts, slots=slots)

    # --- device --------------------------------------------------------------------------------------------------

    def stream(self) -> AbstractContextManager[object]:
        """Return an empty context: the framework itself runs calls in their order."""
        return nullcontext()

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error of a step means that the device is out of memory."""
        return self.backend.out_of_memory(error)

    # --- checks and costs ----------------------------------------------------------------------------------------

    def check(self, batch: Batch, name: str) -> None:
        """Try one member on two rows before the training, and allocate its metrics."""
        if self._tried != (form := _form(batch)):
            with self._trying(batch, batch.data, name):
                self._allocate_metrics(batch)
            self._tried = form

    def output_shape(self, batch: Batch, name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of a member's output for two rows; None if it is not a single tensor."""
        known, form = self.programs.output_shapes, _form(batch)
        if form not in known:
            with self._trying(batch, self.inputs(batch.data), name) as few:
                state = self.backend.first(self._readable(self.state))
                output, _ = self.backend.shapes(self.programs.definition.first.predict, state, few)
            known[form] = tuple(output.shape) if hasattr(output, "shape") else None
        return known[form]

    def check_targets(self, output_shape: tuple[int, ...] | None, target: Tree, name: str | None) -> None:
        """Check all targets of a data set against the output, if the loss says what they must be."""
        if output_shape is not None:
            self._definition.check_targets(output_shape, target, name)

    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with targets out of range; None if nothing can be checked."""
        return None if output_shape is None else self._definition.label_check(output_shape)

    def working_bytes(self, batch: Batch) -> int | None:
        """Return the memory that a train step on such a batch needs beside the state; None if not known."""
        args = (self.state, {}, self._all_slots(), batch.data, None)
        return self.programs.working_bytes(batch.shared, *args, slices=self._slices)

    @contextmanager
    def _trying(self, batch: Batch, data: Tree, name: str) -> Iterator[Tree]:
        """Give two rows of one member's data for a trial, and explain what the trial raises."""
        few = _two_rows(data, batch.shared)
        try:
            yield few
        except CannotFuseError:
            raise
        except Exception as error:  # a model, a loss or a metric may raise anything
            kind, memory = type(self._first.model).__name__, self.out_of_memory(error)
            raise batch_error(name, kind, _shapes(few), error, memory=memory) from error

    # --- helpers -------------------------------------------------------------------------------------------------

    def _examples(self, state: State) -> list[State]:
        """Return the state of one member, without a member axis, as a member of each variant would have it."""
        one, variants = self.backend.first(state), self.programs.definition.variants
        if variants == 1:
            return [one]
        numbers = (self.tensor(np.array(number, np.int32)) for number in range(variants))
        return [{**one, "numbers": {"variant": number}} for number in numbers]

    def _allocate_metrics(self, batch: Batch) -> None:
        """Find out which metrics there are, by a trial on one member."""
        one = self.backend.first(self.state)
        self.programs.definition.try_out(one, _two_rows(batch.data, batch.shared))
        if not self.state["metrics"]:
            self.state = {**self.state, "metrics": self._fresh_metrics()}


def _slots(batch: Batch) -> list[int]:
    """Return the slots of the members that a batch is for."""
    assert batch.slots is not None
    return batch.slots.tolist()


def _form(batch: Batch) -> tuple[str, bool]:
    """Return the tree, the shapes and the dtypes of a batch."""
    return str(map_tree(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), batch.data)), batch.shared


def _two_rows(data: Tree, shared: bool) -> Tree:
    """Return two rows of one member's data."""
    return map_tree(lambda leaf: leaf[:2] if shared else leaf[0, :2], data)


def _shapes(data: Tree) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {getattr(leaf.dtype, 'name', leaf.dtype)}" for leaf in leaves(data))
