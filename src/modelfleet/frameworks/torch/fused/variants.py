"""Members of a lane that differ in numbers: what differs, found by recording, and the columns of their numbers.

A lane runs the Python of its first member for all. Members whose models or losses differ in numbers call the same
functions with other numbers. So one member of each variant runs once, for each kind and form of batch, and its
calls are recorded. Where the recordings differ in a number, the fused step computes with a column `(member,)`.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.structure import Signature
from modelfleet.frameworks.torch.fused.arguments import Key, numbers_key
from modelfleet.frameworks.torch.fused.steps import Recorded, Steps
from modelfleet.frameworks.torch.fused.steps_protocol import How, Tensors
from modelfleet.frameworks.torch.likeness import signatures
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.python_state.checks import StatefulError
from modelfleet.frameworks.torch.python_state.snapshot import PythonSnapshot
from modelfleet.frameworks.torch.python_state.undo import restoring_python, restoring_tensors
from modelfleet.frameworks.torch.structure import difference, signature, without_modes, without_numbers
from modelfleet.frameworks.torch.task import Task
from modelfleet.frameworks.torch.tracing.number_rules import (
    PROGRAM,
    program_name,
    refuse_unknown,
    site_name,
    with_integers_as_floats,
)
from modelfleet.frameworks.torch.tracing.parameters import NeedsGradientError
from modelfleet.frameworks.torch.tracing.reasons import explain
from modelfleet.frameworks.torch.tracing.recording import Recording, compare
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, as_if_compiling
from modelfleet.frameworks.torch.walking import modules_of
from modelfleet.frameworks.torch.widths.family import Shapes, shapes, without_sizes
from modelfleet.frameworks.torch.widths.padded_calls import Call, side_by_side
from modelfleet.frameworks.torch.widths.padding import OWN, Padding
from modelfleet.frameworks.torch.widths.trial import WidthTrial
from modelfleet.frameworks.torch.widths.widths import Widths
from modelfleet.trees import map_tree
from modelfleet.types import State, Tree

Named = tuple[str, nn.Module]


@dataclass
class Variant:
    """Members that compute with the same numbers.

    Attributes:
        steps: Steps that run the Python of the first of them.
        positions: Their positions in the lane.
        recordings: Their recordings, by kind and form of a batch.
        snapshot: What the Python of the first of them read when the members were last checked.
    """

    steps: Steps
    positions: list[int]
    recordings: dict[Key, Recording] = field(default_factory=dict)
    snapshot: PythonSnapshot | None = None

    @contextmanager
    def undoing_side_effects(self) -> Iterator[None]:
        """Run the Python of the first member, and leave everything as it was before."""
        snapshot = self.snapshot
        if snapshot is None or not snapshot.same(thoroughly=True):
            snapshot = PythonSnapshot(self.steps.roots())
        with restoring_python(snapshot, strictly=False), restoring_tensors(snapshot, strictly=False):
            yield


class Variants:
    """Members of a lane by variant.

    Args:
        members: The members by name, in the order of their positions.
        tasks: Their tasks.
        variants: The variant of each, as `LaneContext.variants` has them.
        steps: The steps of the first member, or of the widest.
        shared: The tensors that all members share.
        weights_of: Returns the weights of the member at a position, `(1, …)`.
        device: The device of the lane.
        widths: The widths of the members, if they are not equal.
    """

    def __init__(
        self,
        members: Sequence[Named],
        tasks: Sequence[Task],
        variants: Sequence[int],
        steps: Steps,
        shared: Tensors,
        weights_of: Callable[[int], State],
        device: torch.device,
        widths: Widths | None,
    ) -> None:
        self._members, self._tasks, self._widths = members, tasks, widths
        self._steps, self._shared, self._weights_of, self._device = steps, shared, weights_of, device
        self.slots = np.arange(len(members))
        """Position of the member in each slot."""
        self._columns: dict[Key, Tensors] = {}  # by kind and form: by site, `(position, …)`
        self._given: dict[Key, tuple[State, np.ndarray, State]] = {}  # by kind and form: the last state
        self._shapes = [] if widths is None else _shapes_of(members, variants)  # by position
        # By kind and form: for each variant, which of its numbers are 0 or 1.
        self._specials: dict[Key, list[Hashable]] = {}
        self._variants = self._grouped(variants)
        self._remember()

    @property
    def several(self) -> bool:
        """Return True if the members compute with different numbers."""
        return len(self._variants) > 1

    def steps_of(self, position: int) -> Steps:
        """Return the steps that run the Python of a member, or of one with the same numbers."""
        return next(variant.steps for variant in self._variants if position in variant.positions)

    def cut(self, state: State, position: int) -> State:
        """Return the state `(1, …)` of a member as views in its own shapes, for `steps_of`."""
        return state if self._widths is None else self._widths.cut(state, self._widths.of(position))

    @property
    def trials(self) -> list[tuple[Steps, int]]:
        """Return the steps to try if something is to hold for all members, with the position of a member.

        A number of 0 or 1 may hide what a model does. Of variants with the same zeros and ones, one is tried.
        """
        found: dict[Hashable, tuple[Steps, int]] = {}
        for number, variant in enumerate(self._variants):
            special = tuple(own[number] for own in self._specials.values()) if self._specials else number
            found.setdefault(special, (variant.steps, variant.positions[0]))
        return list(found.values())

    # --- numbers -------------------------------------------------------------------------------------------------

    def given(
        self,
        kind: str,
        state: State,
        data: Tree,
        weights: Tensor | None,
        positions: np.ndarray | None = None,
        *,
        shared: bool,
    ) -> State:
        """Return a state with the part `numbers`, the numbers that a step on such a batch computes with, by site.

        Args:
            kind: The step.
            state: The state of some members.
            data: A batch.
            weights: The weights of its rows.
            positions: The positions of these members; None for those in the slots.
            shared: True if the batch has no member axis.

        Raises:
            CannotFuseError: The members differ in more than numbers, or in a number that can't be a column.
        """
        if not self.several:
            return state
        positions = self.slots if positions is None else positions
        key = numbers_key(kind, data, weights, shared=shared)
        known = self._given.get(key)
        if known is None or known[0] is not state or known[1] is not positions:
            if key not in self._columns:
                self._columns[key] = self._find_columns(kind, key, data, weights, shared=shared)
            rows = torch.from_numpy(np.asarray(positions, np.int64)).to(self._device)
            numbers = {site: column.index_select(0, rows) for site, column in self._columns[key].items()}
            known = self._given[key] = state, positions, {**state, "numbers": numbers}
        return known[2]

    def _find_columns(self, kind: str, key: Key, data: Tree, weights: Tensor | None, *, shared: bool) -> Tensors:
        """Record a step of every variant, and return a column for each number in which they differ."""
        with TRACE_LOCK:
            for variant in self._variants:
                if key not in variant.recordings:
                    variant.recordings[key] = self._record(variant, kind, data, weights, shared=shared)
        recordings = [variant.recordings[key] for variant in self._variants]
        found = compare(recordings)
        first = next(variant.recordings[key] for variant in self._variants if variant.steps is self._steps)
        if self._widths is None:
            found = with_integers_as_floats(first, found)
        refuse_unknown(first, found, sizes=self._widths is not None)
        self._steps.recordings[key] = first
        different = [*found.floats, *found.outside]
        self._specials[key] = [
            tuple(_special(one.values[number]) for one in different) for number in range(len(self._variants))
        ]
        columns: Tensors = {}
        for call, path, values in found.floats:
            numbers = [torch.tensor(float(value), dtype=torch.float64) for value in values]
            columns[site_name(call, path)] = self._column(numbers)
        for call, path, tensors in found.outside:
            columns[site_name(call, path)] = self._column([tensor.detach() for tensor in tensors])
        # Programs are told apart by the names of their numbers. This one stands for everything that is no column.
        name = program_name(first, columns, self._steps.known_recordings)
        columns = {name: torch.zeros(len(self._members), device=self._device), **columns}
        if self._widths is not None:
            columns |= self._padded(kind, key, side_by_side(first, found), columns, data, weights, shared=shared)
        return columns

    def _padded(
        self,
        kind: str,
        key: Key,
        calls: list[Call],
        columns: Tensors,
        data: Tree,
        weights: Tensor | None,
        *,
        shared: bool,
    ) -> Tensors:
        """Return the columns of members of unequal widths, after a trial of their step."""
        known = self._steps.known_padding
        padding = next((own for own in known if own.calls == calls), None)
        if padding is None:
            padding = Padding(calls)
            self._try_padding(kind, padding, columns, data, weights, shared=shared)
            known.append(padding)
        self._steps.padding[key] = padding
        exact = torch.float32 if self._device.type == "mps" else torch.float64
        tables = [padding.table(number).to(exact) for number in range(len(self._variants))]
        # A program has the numbers of the columns built in.
        name = f"{PROGRAM}padding {known.index(padding)}"
        return {name: torch.zeros(len(self._members), device=self._device), OWN: self._column(tables)}

    def _try_padding(
        self, kind: str, padding: Padding, columns: Tensors, data: Tree, weights: Tensor | None, *, shared: bool
    ) -> None:
        """Compare a step of all variants, padded, with what each computes alone."""
        assert self._widths is not None
        if kind == "row_gradients":
            raise CannotFuseError("the rows of members of unequal widths are not divided over devices")
        firsts = [variant.positions[0] for variant in self._variants]
        rows = torch.tensor(firsts, device=self._device)
        trial = WidthTrial(
            self._steps,
            [variant.steps for variant in self._variants],
            [(self._members[at][0], self._widths.of(at)) for at in firsts],
            [self._weights_of(at) for at in firsts],
            self._widths,
            self._shared,
        )
        numbers = {site: column.index_select(0, rows) for site, column in columns.items()}
        own = data if shared else map_tree(lambda t: t[0], data)
        with TRACE_LOCK:
            trial.run(kind, padding, numbers, own, None if weights is None else weights[0])

    def _column(self, values: Sequence[Tensor]) -> Tensor:
        """Return a value of each variant as one of each member, `(position, …)`."""
        of_position = np.empty(len(self._members), np.int64)
        for number, variant in enumerate(self._variants):
            of_position[variant.positions] = number
        return torch.stack([value.to(self._device) for value in values])[torch.from_numpy(of_position)]

    def _record(
        self, variant: Variant, kind: str, data: Tree, weights: Tensor | None, *, shared: bool
    ) -> Recording:
        """Run a step of a variant's first member, and return the calls of its Python. Nothing is changed by it."""
        steps = variant.steps
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device)
        state = {**self._weights_of(variant.positions[0]), "member": {"seed": zeros, "step": zeros}}
        own = data if shared else map_tree(lambda t: t[:1], data)
        args = [state, self._shared, own]
        if kind != "predict":
            args.append(None if weights is None else weights[:1])
        if kind == "row_gradients":
            args.append(dict.fromkeys(("start", "count"), zeros[0] + 1) | {"fraction": zeros[0] + 1.0})
        step = getattr(steps, "gradients" if kind == "train" else kind)
        train = kind != "evaluate" and kind != "predict"
        steps.differentiates = steps.differentiates or self._steps.differentiates
        steps.contiguous, steps.draws = self._steps.contiguous, self._steps.draws
        with locked_in_mode(steps, train=train), variant.undoing_side_effects(), as_if_compiling():
            steps.records = True
            try:
                step(*map_tree(torch.clone, args), How(shared, fused=False))
            except Recorded as done:
                return done.recording
            except NeedsGradientError:
                if steps.differentiates:
                    raise
                steps.differentiates = True
            except CannotFuseError:
                raise
            except Exception as error:  # a model's forward may raise anything
                raise explain(error) from error
            finally:
                steps.records = False
        return self._record(variant, kind, data, weights, shared=shared)

    # --- changes -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Group the members again if their Python has changed, and read their numbers again.

        Raises:
            StatefulError: A member's structure differs from the first member's in more than numbers.
        """
        if self._unchanged():
            return
        known: dict[Signature, Signature] = {}
        structures = []
        for own in signatures([model for _, model in self._members]):
            if own not in known:
                known[own] = without_modes(own)
            structures.append(known[own])
        first, expected = self._members[0][0], self._without_numbers(structures[0], 0)
        for position, ((name, _), own) in enumerate(zip(self._members, structures, strict=True)):
            if own is not structures[0] and self._without_numbers(own, position) != expected:
                found = difference(own, structures[0])
                raise StatefulError(f"{name!r} no longer has the structure of {first!r}: {found}")
        numbers: dict[Hashable, int] = {}
        keys = zip(structures, (id(task) for task in self._tasks), strict=True)
        self._columns, self._given, self._specials = {}, {}, {}
        self._variants = self._grouped([numbers.setdefault(key, len(numbers)) for key in keys])
        self._remember()

    def _without_numbers(self, own: Signature, position: int) -> Hashable:
        """Return a structure without what members of this lane may differ in."""
        if self._widths is None:
            return without_numbers(own)
        changed = shapes(own) != self._shapes[position]
        return without_sizes(without_numbers(own)), changed

    def _grouped(self, variants: Sequence[int]) -> list[Variant]:
        """Return the variants. Those that differ in nothing that a forward computes are one."""
        found: dict[int, list[int]] = {}
        for position, number in enumerate(variants):
            found.setdefault(number, []).append(position)
        by_numbers: dict[Hashable, Variant] = {}
        for positions in found.values():
            model, task = self._members[positions[0]][1], self._tasks[positions[0]]
            if len(found) == 1:
                key: Hashable = None
            else:
                key = without_modes(signature(model)), id(task.loss), id(task.objective)
            if key not in by_numbers:
                is_first = model is self._steps.model
                steps = self._steps if is_first else Steps(model, task, self._steps.layout, self._steps.rules)
                by_numbers[key] = Variant(steps, [])
            by_numbers[key].positions += positions
        return sorted(by_numbers.values(), key=lambda variant: min(variant.positions))

    def _unchanged(self) -> bool:
        same = all(
            len(table) == len(values) and all(map(is_, table.values(), values))
            for table, values in zip(self._tables, self._values, strict=True)
        )
        if not same or self._versions != [tensor._version for tensor in self._tensors]:
            return False
        recorded = (own for variant in self._variants for own in variant.recordings.values())
        return all(own.same_outside() for own in recorded) and all(
            variant.snapshot is None or variant.snapshot.same(thoroughly=True) for variant in self._variants
        )

    def _remember(self) -> None:
        self._tables: list[dict[str, Any]] = []
        for _, model in self._members:
            for module in modules_of(model):
                self._tables += (vars(module), module._modules) if module._modules else (vars(module),)
        self._values = [tuple(table.values()) for table in self._tables]
        self._tensors = [value for values in self._values for value in values if isinstance(value, Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        self._steps.members_differ = self.several
        # Several members' Python is read here, and not only the first one's, which `Programs` watches.
        for variant in self._variants if self.several else ():
            variant.snapshot = PythonSnapshot(variant.steps.roots())


def _shapes_of(members: Sequence[Named], variants: Sequence[int]) -> list[Shapes]:
    """Return the shapes of each member's tensors. Members of one variant have the same."""
    known: dict[int, Shapes] = {}
    for (_, model), variant in zip(members, variants, strict=True):
        if variant not in known:
            known[variant] = shapes(signature(model))
    return [known[variant] for variant in variants]


def _special(value: float | Tensor) -> Hashable:
    """Return a value with None in the place of numbers that are neither 0 nor 1."""
    if isinstance(value, Tensor):
        return tuple(map(_special, value.flatten().tolist()))
    return value if value in (0, 1) else None
