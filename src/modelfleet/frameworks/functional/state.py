"""Stacked state of a functional engine: how it is made, and how it moves between the device and the models."""

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional.contract import Backend, Definition, Slice, State
from modelfleet.frameworks.functional.programs import Programs
from modelfleet.frameworks.lane_context import LaneContext, OwnTask
from modelfleet.frameworks.stacked import Positions, StackedState, runs, stack, with_all_names
from modelfleet.frameworks.stacked_engine import StackedEngine
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tensor, Tree

READABLE = ("params", "buffers", "member", "numbers")  # the parts of a state that a forward pass reads
STEPS_PER_CALL = 16  # few enough that Ctrl-C acts soon, and so many that the cost of a call does not matter


class FunctionalState(StackedEngine):
    """Part of a functional engine that keeps its state.

    Args:
        context: The lane's members, and the programs of another engine of the same structure and task.
        definition: The steps of these members.
        backend: The framework on the lane's device.
    """

    def __init__(self, context: LaneContext[OwnTask, Programs], definition: Definition, backend: Backend) -> None:
        members = context.members
        assert context.fused or len(members) == 1
        self.backend = backend
        self.device = backend.device
        self.programs = context.programs or Programs(definition, backend, fused=context.fused)
        self.steps_per_call = STEPS_PER_CALL
        self._definition = definition
        self._first = members[0]
        self._tried: tuple[str, bool] | None = None  # the form of the batches that a member was tried on
        self._one = self.tensor(np.ones(1, dtype=bool))
        self._updates = definition.task_numbers(context)
        self._variants_by_update = _variants_by_update(self._updates, context.variants)
        by_task = definition.by_task
        with self._apart_by_update():
            states = [by_task[own].state(member) for own, member in zip(self._updates, members, strict=True)]
            self._optimizer_names = {
                own: frozenset(state.get("optimizer", ()))
                for own, state in zip(self._updates.tolist(), states, strict=True)
            }
            arrays = stack(with_all_names(states, np.zeros_like) if self._updates.any() else states, np.stack)
        self._slices = self._slices_of(np.arange(len(members)))
        arrays = {part: arrays.get(part, {}) for part in ("params", "buffers", "optimizer", "member", "numbers")}
        arrays["member"] |= {name: np.zeros(len(members), dtype=np.int32) for name in ("step", "trouble")}
        self._parameters = sum(array[0].size for array in arrays["params"].values())
        self._row_bytes = sum(array.nbytes for array in leaves(arrays)) // len(members)
        parts = map_tree(self.tensor, {**arrays, "metrics": {}})
        self.stacked = StackedState(parts, len(members), _ProgramTensors(self))

    @property
    def _width(self) -> int:
        return self.stacked.width

    @property
    def parameters(self) -> int:
        """Return the number of trained numbers per member."""
        return self._parameters

    @property
    def bytes(self) -> int:
        """Return the size of the state on the device."""
        return self._row_bytes * self.stacked.rows

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a host array on the device."""
        return self.backend.tensor(array)

    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: why each member was set aside, by the codes of `errors.REASONS`."""
        return np.asarray(self.backend.host(self.state["member"]["trouble"]))

    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the number of steps that changed each member's weights."""
        return np.asarray(self.backend.host(self.state["member"]["step"]))

    def clear_trouble(self) -> None:
        """Mark every member as fine, at the start of a fit."""
        fine = self.tensor(np.zeros(self._width, dtype=np.int32))
        self.state = {**self.state, "member": {**self.state["member"], "trouble": fine}}

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state of some members; with None, all parts except "numbers"."""
        if parts is None:
            parts = [part for part in self.state if part != "numbers"]
        return super().read(positions, parts)

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True: members share no tensors here. Each has its own row of every tensor."""
        return True

    def gather(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state that the models of some members hold into the state here."""
        by_update: dict[int, list[int]] = {}  # their states have different names
        for row, position in enumerate(positions):
            by_update.setdefault(int(self._updates[position]), []).append(row)
        for rows in by_update.values():
            here = [positions[row] for row in rows]
            states = [self._definition_of(p).state(members[row]) for p, row in zip(here, rows, strict=True)]
            found = stack(states, np.stack)
            self.write(here, {part: found[part] for part in self.parts_in_models if part in found})

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state of some members into their models."""
        arrays = self.backend.exactly(self.stacked.read(positions, self.parts_in_models, copy=False))
        for row, (position, member) in enumerate(zip(positions, members, strict=True)):
            own = map_tree(lambda array, row=row: array[row], arrays)
            self._definition_of(position).write_back(member, own)
        self.changed = self.changed and len(members) < self.stacked.members

    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members from now on. The others rest."""
        super().give_slots(positions)
        self._slices = self._slices_of(self.slots)

    def optimizer_tensors(self, position: int) -> frozenset[str] | None:
        """Return the names of those of the optimizer's tensors that a member's own optimizer has; None for all."""
        return self._optimizer_names[int(self._updates[position])] if len(self._optimizer_names) > 1 else None

    def _definition_of(self, position: int) -> Definition:
        """Return the definition that knows a member's state."""
        return self._definition.by_task[self._updates[position]]

    def _slices_of(self, positions: np.ndarray) -> tuple[Slice, ...]:
        """Return the slices of slots of these members; none if all members of the lane have one optimizer."""
        if len(self._optimizer_names) < 2:
            return ()
        return tuple(Slice(*own) for own in runs(self._updates[positions]))

    @contextmanager
    def _apart_by_update(self) -> Iterator[None]:
        """Let members of one kind of optimizer stay together if members of several can't be fused."""
        try:
            yield
        except CannotFuseError as error:
            if error.together is None and len(self._variants_by_update) > 1:
                error.together = self._variants_by_update
            raise

    def indices(self, numbers: Positions) -> Tensor:
        """Return slots or rows as an index for `take` and `put`."""
        return self.tensor(np.asarray(numbers, dtype=np.int32))

    def _fresh_metrics(self) -> dict[str, Tensor]:
        fresh = self.programs.definition.fresh_metrics()
        return map_tree(lambda a: self.tensor(np.stack([np.asarray(a)] * self._width)), fresh)

    def _all_slots(self) -> Tensor:
        return self.tensor(np.ones(self._width, dtype=bool))

    def _keep_changes(self, changed: State) -> None:
        """Keep changes that evaluating or predicting made to the state."""
        if leaves(changed):
            self.state = {**self.state, **{part: {**self.state[part], **own} for part, own in changed.items()}}
            self.changed = True

    @staticmethod
    def _readable(state: State) -> State:
        return {part: state[part] for part in READABLE}


def _variants_by_update(updates: np.ndarray, variants: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the variants of each kind of optimizer."""
    found: dict[int, list[int]] = {}
    for own, variant in dict.fromkeys(zip(updates.tolist(), variants, strict=True)):
        found.setdefault(own, []).append(variant)
    return list(found.values())


class _ProgramTensors:
    """Operations on tensors (see `stacked.Tensors`) that are compiled with an engine's programs."""

    def __init__(self, engine: "FunctionalState") -> None:
        self._engine = weakref.proxy(engine)  # the engine, as its programs may be replaced

    def rows(self, numbers: np.ndarray) -> Tensor:
        """Return row numbers as an index."""
        return self._engine.indices(numbers)

    def take(self, tree: Tree, rows: Tensor) -> Tree:
        """Return a copy of some rows of every tensor."""
        return self._engine.programs.take(tree, rows)

    def put(self, tree: Tree, rows: Tensor, values: Tree) -> Tree:
        """Return the tensors with some rows replaced."""
        return self._engine.programs.put(tree, rows, values)

    def like(self, value: Tensor | np.ndarray, tensor: Tensor) -> Tensor:
        """Return a tensor, or an array that the adapter's `arrays.host` returned, like another tensor."""
        return self.replace(tensor, value) if isinstance(value, np.ndarray) else value

    def replace(self, tensor: Tensor, value: Tensor | np.ndarray) -> Tensor:
        """Return the value as a tensor like another."""
        return self._engine.backend.loaded(value, tensor)
