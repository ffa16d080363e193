"""The engine of a lane whose steps are pure functions."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.explaining import batch_error
from modelfleet.frameworks.functional.contract import Backend, Definition, State
from modelfleet.frameworks.functional.padding import bears_padding, rows_apart
from modelfleet.frameworks.functional.programs import Programs
from modelfleet.frameworks.stacked import Positions, StackedState, fitting, stack
from modelfleet.frameworks.stacked_engine import StackedEngine
from modelfleet.joining import joined
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree

_READABLE = ("params", "buffers", "member")  # what a forward pass reads of a state
SEVERAL = 16  # steps a call: few enough to hear Ctrl-C soon, and enough that calling costs nothing beside them


class FunctionalEngine(StackedEngine):
    """The side of a lane that its framework knows (`engine.Engine`), of a definition and a backend.

    `definition` is for these members; `programs` are those of another engine of the same structure and task.
    """

    def __init__(
        self,
        members: Sequence[Member],
        definition: Definition,
        backend: Backend,
        *,
        fused: bool,
        programs: Programs | None = None,
    ) -> None:
        assert fused or len(members) == 1
        self.backend = backend
        self.device = backend.device
        self.programs = programs or Programs(definition, backend, fused=fused)
        self.several = SEVERAL
        self._definition = definition
        self._first = members[0]
        self._tried: Any = None  # the form of the batches that a member was tried on
        self._one = self.tensor(np.ones(1, dtype=bool))
        self._changed = False  # by evaluating or predicting
        arrays = stack([definition.state(member) for member in members], np.stack)
        arrays = {part: arrays.get(part, {}) for part in ("params", "buffers", "optimizer", "member")}
        arrays["member"] |= {name: np.zeros(len(members), dtype=np.int32) for name in ("step", "trouble")}
        self._parameters = sum(array[0].size for array in arrays["params"].values())
        self._row_bytes = sum(array.nbytes for array in leaves(arrays)) // len(members)
        parts = map_tree(self.tensor, {**arrays, "metrics": {}})
        self.stacked = StackedState(parts, len(members), _Tensors(self))

    @property
    def _width(self) -> int:
        return self.stacked.width

    @property
    def task(self) -> Any:
        """What the members are to do."""
        return self._definition.task

    @property
    def fused(self) -> bool:
        """Whether a step is one program for all members."""
        return self.programs.fused

    @property
    def parameters(self) -> int:
        """Trained numbers per member."""
        return self._parameters

    @property
    def bytes(self) -> int:
        """What the state takes on the device."""
        return self._row_bytes * self.stacked.rows

    @property
    def program(self) -> str:
        """How the train steps run."""
        if self.programs.untraced is not None:
            return "Python"
        return self.backend.name if self.several == 1 else f"{self.backend.name}, {self.several} steps a call"

    @property
    def untraced(self) -> str | None:
        """Why every step runs its Python, if it does."""
        return self.programs.untraced

    @property
    def prospect(self) -> float:
        """What is measured is compiled already."""
        return 1.0

    @property
    def compiling(self) -> bool:
        """Nothing is compiled beside the training."""
        return False

    def stop(self) -> None:
        """Nothing goes on beside the training."""

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(
        self,
        hyper: Any,
        active: Any,
        data: Any,
        weights: Any,
        *,
        shared: bool,
        pace: Any = None,
        steps: int | None = None,
    ) -> None:
        """One step of the active members, or `steps` of them on data (and weights) with a step axis."""
        if steps is None:
            self.state = self.programs.run("train", shared, self.state, hyper, active, data, weights)
            return
        # A program for each power of two serves any number of steps: what is beyond their count is not run.
        room = 1 << (steps - 1).bit_length()
        if room > steps:
            data, weights = self.backend.lengthened((data, weights), room)
        self.state = self.programs.run("several", shared, self.state, hyper, active, data, weights, steps)

    def gradients(self, data: Any, weights: Any = None, *, shared: bool) -> Any:
        """Return what a step of every member makes of a batch before its optimizer does."""
        return self.programs.run("gradients", shared, self.state, data, weights)

    def apply(self, hyper: Any, active: Any, gradients: Any) -> None:
        """Update the active members by what `gradients` returned."""
        self.state = self.programs.run("apply", True, self.state, hyper, active, gradients)

    def train_some(self, slots: np.ndarray, hyper: Any, data: Any, *, shared: bool, pace: Any = None) -> None:
        """One step of the members in some slots, on data cut for them.

        One by one: a program for each number of rows is few enough, for each number of members too it is not.
        """
        for place, slot in enumerate(slots):
            own = data if shared else map_tree(lambda leaf, place=place: leaf[place], data)
            self.state = self.programs.run("one", True, self.state, self._rows([slot]), hyper, self._one, own)

    def ready(self, kind: str, hyper: Any, active: Any, data: Any, *, shared: bool) -> None:
        """Have the program for batches like this one."""
        if kind == "predict":
            self.programs.ready(kind, shared, self._readable(self.state), self._all(), data)
            return
        if not self.state["metrics"]:
            self._open(data, shared)
        if kind == "train":
            if not self.state["params"]:
                raise InputError(
                    f"member {self._first.name!r} has no weights that are trained. Give it some, or leave it out."
                )
            self.programs.ready(kind, shared, self.state, hyper, active, data, None)
        else:
            state, totals = self._readable(self.state), self.state["metrics"]
            self.programs.ready(kind, shared, state, totals, self._all(), data, None)

    def epoch_values(self) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` since the last call; the next epoch begins at nothing."""
        values = self.values(self.state["metrics"])
        self.state = {**self.state, "metrics": self._fresh()}
        return values

    def evaluate(
        self, totals: Any, slots: Any, data: Any, weights: Any, counts: np.ndarray, size: int, *, shared: bool
    ) -> Any:
        """`totals` (None at first) with a batch added."""
        totals = self._fresh() if totals is None else totals
        if slots is None:
            there = self.tensor(np.asarray(counts) > 0)
            state = self._readable(self.state)
            totals, changed = self.programs.run("evaluate", shared, state, totals, there, data, weights)
            self._take_in(changed)
            return totals
        for place, slot in enumerate(slots):
            own = data if shared else map_tree(lambda leaf, place=place: leaf[place], data)
            rows, state = self._rows([slot]), self._readable(self.state)
            totals, changed = self.programs.run("evaluate_one", True, state, totals, rows, self._one, own)
            self._take_in(changed)
        return totals

    def values(self, totals: Any) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` of what `evaluate` added up."""
        if totals is None:
            totals = self._fresh()
        found = self.backend.host(self.programs.run("results", True, totals))
        return {name: np.asarray(found[name], dtype=np.float64) for name in self.programs.names}

    def predict(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """Return the outputs `(slot, row, …)` on a batch of inputs, on the host."""
        return self.backend.host(self.forward(data, shared=shared, counts=counts))

    def forward(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """Return the outputs `(slot, row, …)` on a batch of inputs, on the device."""
        size = leaves(data)[0].shape[0 if shared else 1]
        counts = np.full(self._width, size) if counts is None else np.asarray(counts)
        there = self.tensor(counts > 0)
        outputs, changed = self.programs.run("predict", shared, self._readable(self.state), there, data)
        if not leaves(changed) or ((counts == size) | (counts == 0)).all():
            self._take_in(changed)
            return outputs
        # What a model that changes as it predicts makes of padded rows is not its own: each member on its rows.
        found = map_tree(np.array, self.backend.host(outputs))
        for slot in np.flatnonzero(counts):
            own = map_tree(lambda leaf, slot=slot: leaf if shared else leaf[slot], data)
            own = map_tree(lambda leaf, count=counts[slot]: leaf[:count], own)
            rows, state = self._rows([slot]), self._readable(self.state)
            outputs, changed = self.programs.run("predict_one", True, state, rows, self._one, own)
            self._take_in(changed)
            for whole, part in zip(leaves(found), leaves(self.backend.host(outputs)), strict=True):
                whole[slot, : counts[slot]] = part[0]
        return found

    def predict_some(self, positions: Positions, data: Any, counts: np.ndarray) -> Any:
        """Return the outputs of some members, each on rows of its own, as NumPy arrays `(member, row, …)`."""
        positions, size = np.asarray(positions), leaves(data)[0].shape[1]
        state, there = self.read(positions, _READABLE), self.tensor(counts > 0)
        outputs, changed = self.programs.run("predict", False, state, there, data)
        found = self.backend.host(outputs)
        own = np.flatnonzero(counts)
        if leaves(changed) and (counts[own] != size).any():
            # A model that changes as it predicts must not see padding: each member on its own rows.
            found = map_tree(np.array, found)
            for row in own.tolist():
                rows = map_tree(lambda leaf, row=row: leaf[row : row + 1, : counts[row]], data)
                alone = self.predict_some(positions[[row]], rows, counts[[row]])
                for whole, part in zip(leaves(found), leaves(alone), strict=True):
                    whole[row, : counts[row]] = part[0]
        elif leaves(changed):
            self.write(positions[own], self.programs.take(changed, self._rows(own)))
            self._changed = True
        return found

    def inputs(self, data: Any) -> Any:
        """The inputs of a batch: the x of (x, y), or the batch itself."""
        return self._definition.inputs(data)

    def rows(self, outputs: Any, slot: int, count: int) -> Any:
        """One member's real rows of a batch of outputs."""
        return map_tree(lambda leaf: leaf[slot, :count], outputs)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Batches of rows as one array, or tree of arrays."""
        return joined(parts)

    # --- which rows count ----------------------------------------------------------------------------------------

    def maskable(self, batch: Any) -> bool:
        """Whether padded rows can be weighted out without being felt, found by trying on one member.

        BatchNorm, say, feels every row of a batch. So what a member's step on a padded batch makes of its running
        statistics and of its metrics is compared with a step on its own rows alone.
        """
        if not self.programs.definition.maskable:
            return False
        real = int(batch.counts[batch.counts > 0].min())
        key = (real, batch.size)
        known = self.programs.bears_padding
        if key not in known:
            data = batch.data
            if not batch.shared:
                slot = int(np.flatnonzero(batch.counts == real)[0])
                data = map_tree(lambda leaf: leaf[slot], data)
            one = map_tree(lambda t: t[0], self.state)
            definition = self.programs.definition
            known[key] = bears_padding(definition, self.backend, one, data, real, batch.size)
        return known[key]

    def rows_apart(self, inputs: Any) -> bool:
        """Return True if the output for a row depends on that row alone, as one member shows."""
        known, size = self.programs.rows_apart, len(leaves(inputs)[0])
        if size not in known:
            one = map_tree(lambda t: t[0], self._readable(self.state))
            known[size] = rows_apart(self.programs.definition, self.backend, one, inputs)
        return known[size]

    def row_weights(self, counts: np.ndarray, size: int) -> Any:
        """`(slot, row)`: 1 for a real row, 0 for padding."""
        return self.tensor((np.arange(size) < np.asarray(counts)[:, None]).astype(np.float32))

    def cut(self, data: Any, slots: np.ndarray, count: int, *, shared: bool) -> Any:
        """The first `count` rows of the members in some slots."""
        if shared:
            return map_tree(lambda leaf: leaf[:count], data)
        return map_tree(lambda leaf: leaf[:, :count], self.backend.take(data, self._rows(slots)))

    # --- state ---------------------------------------------------------------------------------------------------

    def tensor(self, array: np.ndarray) -> Any:
        """A host array on the device."""
        return self.backend.tensor(array)

    def trouble(self) -> np.ndarray:
        """`(slot,)`: what went wrong, by the codes of `errors.REASONS`; 0 where nothing did."""
        return np.asarray(self.backend.host(self.state["member"]["trouble"]))

    def steps_taken(self) -> np.ndarray:
        """`(slot,)`: the steps that changed each member's weights."""
        return np.asarray(self.backend.host(self.state["member"]["step"]))

    def clear_trouble(self) -> None:
        """Begin a fit with nobody in trouble."""
        fine = self.tensor(np.zeros(self._width, dtype=np.int32))
        self.state = {**self.state, "member": {**self.state["member"], "trouble": fine}}

    def adopt(self, position: int, other: Engine, source: int) -> None:
        """Take a member's optimizer state and step count over from another engine of the same optimizer.

        What was frozen or given another shape meanwhile begins at its initial state.
        """
        parts = {"optimizer": None, "member": ("step",)}
        self.write([position], fitting(other.read([source], parts), self.state, parts=parts))

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Nothing is shared between the members here: each has its own row of every tensor."""
        return True

    def gather(self, members: Sequence[Member]) -> State:
        """Return what the models of some members hold."""
        found = stack([self._definition.state(member) for member in members], np.stack)
        return {part: found[part] for part in self.held if part in found}

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state of some members into their models."""
        arrays = self.backend.exactly(self.stacked.read(positions, self.held, copy=False))
        for row, member in enumerate(members):
            self._definition.write_back(member, map_tree(lambda array, row=row: array[row], arrays))

    def write_changes(self, members: Sequence[Member]) -> bool:
        """Copy what evaluating and predicting have changed into the models. Return True if anything has."""
        changed, self._changed = self._changed, False
        if changed:
            self.scatter(self.stacked.positions, members)
        return changed

    def stream(self) -> AbstractContextManager[Any]:
        """Nothing of its own to step within: every call orders itself after those before it."""
        return nullcontext()

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error that a step raised says that the device is out of memory."""
        return self.backend.out_of_memory(error)

    # --- checks and costs ----------------------------------------------------------------------------------------

    def check(self, batch: Any, name: str) -> None:
        """Try one member on two rows, before anything is trained, and make room for the metrics it makes."""
        if self._tried != (form := _form(batch)):
            with self._trying(batch, batch.data, name):
                self._open(batch.data, batch.shared)
            self._tried = form

    def output_shape(self, batch: Any, name: str) -> tuple[int, ...] | None:
        """The shape `(row, …)` of a member's output for two rows of a batch; None if it is no single tensor."""
        known, form = self.programs.output_shapes, _form(batch)
        if form not in known:
            with self._trying(batch, self.inputs(batch.data), name) as few:
                state = map_tree(lambda t: t[0], self._readable(self.state))
                output, _ = self.backend.shapes(self.programs.definition.predict, state, few)
            known[form] = tuple(output.shape) if hasattr(output, "shape") else None
        return known[form]

    def check_targets(self, output_shape: tuple[int, ...] | None, target: Any, name: str | None) -> None:
        """Check all targets of a data set against the output, where the loss says what they must be."""
        if output_shape is not None:
            self._definition.check_targets(output_shape, target, name)

    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Any], None] | None:
        """A function that refuses a batch with targets out of range; None where there is nothing to check."""
        return None if output_shape is None else self._definition.label_check(output_shape)

    def working_bytes(self, batch: Any) -> int | None:
        """What a train step on a batch like this takes on the device beside the state; None if not known."""
        active = self.tensor(np.ones(self._width, dtype=bool))
        return self.programs.working_bytes(batch.shared, self.state, {}, active, batch.data, None)

    @contextmanager
    def _trying(self, batch: Any, data: Any, name: str) -> Iterator[Any]:
        """Two rows of one member's data to try it on, with a clear error for what does not fit."""
        few = _few(data, batch.shared)
        try:
            yield few
        except Exception as error:  # whatever a model, a loss or a metric may raise
            kind, memory = type(self._first.model).__name__, self.out_of_memory(error)
            raise batch_error(name, kind, _shapes(few), error, memory=memory) from error

    # --- helpers -------------------------------------------------------------------------------------------------

    def _open(self, data: Any, shared: bool) -> None:
        """Find out what there is to sum up, and make room for it."""
        one = map_tree(lambda t: t[0], self.state)
        self.programs.definition.try_out(one, _few(data, shared))
        if not self.state["metrics"]:
            self.state = {**self.state, "metrics": self._fresh()}

    def _fresh(self) -> dict[str, Any]:
        """New accumulators for every slot."""
        fresh = self.programs.definition.fresh_metrics()
        return map_tree(lambda a: self.tensor(np.stack([np.asarray(a)] * self._width)), fresh)

    def _all(self) -> Any:
        return self.tensor(np.ones(self._width, dtype=bool))

    def _take_in(self, changed: State) -> None:
        """Keep what evaluating or predicting has changed."""
        if leaves(changed):
            self.state = {**self.state, **{part: {**self.state[part], **own} for part, own in changed.items()}}
            self._changed = True

    def _rows(self, positions: Any) -> Any:
        return self.tensor(np.asarray(positions, dtype=np.int32))

    @staticmethod
    def _readable(state: State) -> State:
        return {part: state[part] for part in _READABLE}


class _Tensors:
    """Operations on the backend's tensors (see `stacked.Tensors`), compiled with an engine's programs."""

    def __init__(self, engine: FunctionalEngine) -> None:
        self._engine = weakref.proxy(engine)  # whose programs may be replaced

    def rows(self, numbers: np.ndarray) -> Any:
        return self._engine._rows(numbers)

    def take(self, tree: Any, rows: Any) -> Any:
        return self._engine.programs.take(tree, rows)

    def put(self, tree: Any, rows: Any, values: Any) -> Any:
        return self._engine.programs.put(tree, rows, values)

    def like(self, value: Any, tensor: Any) -> Any:
        return self.replace(tensor, value) if isinstance(value, np.ndarray) else value

    def replace(self, tensor: Any, value: Any) -> Any:
        return self._engine.backend.loaded(value, tensor)


def _form(batch: Any) -> Any:
    """What tells batches apart before a step: their tree, shapes and dtypes."""
    return str(map_tree(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), batch.data)), batch.shared


def _few(data: Any, shared: bool) -> Any:
    """Two rows of one member's data."""
    return map_tree(lambda leaf: leaf[:2] if shared else leaf[0, :2], data)


def _shapes(data: Any) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {getattr(leaf.dtype, 'name', leaf.dtype)}" for leaf in leaves(data))
