"""Members of a Keras lane on torch that differ in numbers: what differs, and the columns of their numbers.

A lane runs the Python of its first member for all. One member of each kind of forward pass runs once, for each
kind of step and form of batch, and the torch functions that it calls are recorded. Where the recordings differ in
a number, the fused step computes with a column `(member,)`. `torch.fused.variants` does this for modules.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.keras.torch.steps import TorchSteps
from modelfleet.frameworks.torch.fused.arguments import Key, numbers_key
from modelfleet.frameworks.torch.fused.steps_protocol import Tensors
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.tracing.number_rules import program_name, refuse_unknown, site_name
from modelfleet.frameworks.torch.tracing.reasons import explain
from modelfleet.frameworks.torch.tracing.recording import Comparison, Recording, compare
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, as_if_compiling
from modelfleet.trees import map_tree
from modelfleet.types import State, Tree

_RESULTS: Key = ("results",)


class Numbers:
    """Numbers of a lane's members (see `stepping.NumberSource`).

    Args:
        steps: The steps of the lane.
        variants: The variant of each member.
        device: The device of the lane.
    """

    def __init__(self, steps: TorchSteps, variants: Sequence[int], device: torch.device) -> None:
        self.slots = np.arange(len(variants))
        """Position of the member in each slot."""
        self._steps, self._device = steps, device
        self._variants = np.asarray(variants, np.int64)
        self._columns: dict[Key, Tensors] = {}  # by kind and form: by site, `(position, …)`
        self._rows: dict[Key, tuple[np.ndarray, Tensors]] = {}  # by kind and form: the last positions
        self._given: dict[Key, tuple[State, Tensors, State]] = {}  # by kind and form: the last state

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

        Raises:
            CannotFuseError: The members differ in more than numbers, or in a number that can't be a column.
        """
        if not self._steps.members_differ:
            return state
        positions = self.slots if positions is None else positions
        key = numbers_key(kind, data, weights, shared=shared)
        if key not in self._columns:
            self._columns[key] = self._find_columns(kind, key, state, data, weights, shared=shared)
        numbers = self._numbers_of(key, positions)
        known = self._given.get(key)
        if known is None or known[0] is not state or known[1] is not numbers:
            known = self._given[key] = state, numbers, {**state, "numbers": numbers}
        return known[2]

    def check(self) -> None:
        """Do nothing: a number that is changed in a layer counts from the next verb on."""

    def steps_of(self, position: int) -> TorchSteps:
        """Return the steps that run the Python of a member, or of one with the same numbers."""
        return self._steps.of_variant(int(self._variants[position]))

    def cut(self, state: State, position: int) -> State:
        """Return the state of a member in its own shapes: all members have the same."""
        return state

    def _numbers_of(self, key: Key, positions: np.ndarray) -> Tensors:
        known = self._rows.get(key)
        if known is None or known[0] is not positions:
            rows = torch.from_numpy(np.asarray(positions, np.int64)).to(self._device)
            own = {site: column.index_select(0, rows) for site, column in self._columns[key].items()}
            known = self._rows[key] = positions, own
        return known[1]

    def _find_columns(
        self, kind: str, key: Key, state: State, data: Tree, weights: Tensor | None, *, shared: bool
    ) -> Tensors:
        """Record a step of every kind of forward pass, and return a column for each number that differs."""
        recordings = self._steps.recordings.get(key)
        if recordings is None:
            with TRACE_LOCK:
                recordings = self._record_all(kind, state, data, weights, shared=shared)
            self._steps.recordings[key] = recordings
        found = self._compared(recordings)
        columns: Tensors = {}
        for call, path, values in found.floats:
            exact = [torch.tensor(float(value), dtype=torch.float64) for value in values]
            columns[site_name(call, path)] = self._column(exact)
        for call, path, tensors in found.outside:
            columns[site_name(call, path)] = self._column([tensor.detach() for tensor in tensors])
        # Programs are told apart by the names of their numbers. This one stands for everything that is no column.
        name = program_name(recordings[0], columns, self._steps.known_recordings)
        return {name: torch.zeros(len(self._variants), device=self._device), **columns}

    def refuse_other_results(self, state: State) -> None:
        """Raise `CannotFuseError` if a metric's value depends on a number: whose sums they are is not known."""
        if not self._steps.members_differ or _RESULTS in self._steps.recordings:
            return
        own = {part: state[part] for part in ("metrics", "member")}
        with TRACE_LOCK:
            recordings = self._record_all("results", own, None, None, shared=True)
        found = self._compared(recordings)
        if found.floats or found.outside:
            raise CannotFuseError("the value of a metric depends on a number in which they differ")
        self._steps.recordings[_RESULTS] = recordings

    def _record_all(
        self, kind: str, state: State, data: Tree, weights: Tensor | None, *, shared: bool
    ) -> list[Recording]:
        """Run a step of every kind of forward pass, and return the calls of its Python. This changes nothing."""
        one = map_tree(lambda t: t[0].clone(), {part: own for part, own in state.items() if part != "numbers"})
        own = data if shared else map_tree(lambda t: t[0], data)
        found = []
        for number in self._steps.first_variants:
            steps = self._steps.of_variant(number)
            with (
                locked_in_mode(steps, train=kind == "train"),
                undoing_side_effects(*steps.roots()),
                as_if_compiling(),
            ):
                try:
                    found.append(steps.recorded(kind, one, own, None if weights is None else weights[0]))
                except CannotFuseError:
                    raise
                except Exception as error:  # a model may raise anything
                    raise explain(error) from error
        return found

    def _compared(self, recordings: Sequence[Recording]) -> Comparison:
        """Return the numbers in which recordings differ.

        Raises:
            CannotFuseError: They differ in more, or in a number that can't be a column.
        """
        found = compare(recordings)
        try:
            refuse_unknown(recordings[0], found)
        except CannotFuseError as error:
            error.together = self._steps.variants_by_forward(_classes(recordings))
            raise
        return found

    def _column(self, values: Sequence[Tensor]) -> Tensor:
        """Return a value of each kind of forward pass as one of each member, `(position, …)`."""
        of_position = np.array([self._steps.forward_of[variant] for variant in self._variants], np.int64)
        return torch.stack([value.to(self._device) for value in values])[torch.from_numpy(of_position)]


def _classes(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return the numbers of recordings that differ only in numbers."""
    found: list[list[int]] = []
    for number, own in enumerate(recordings):
        for together in found:
            pair = [recordings[together[0]], own]
            try:
                refuse_unknown(pair[0], compare(pair))
            except CannotFuseError:
                continue
            together.append(number)
            break
        else:
            found.append([number])
    return found
