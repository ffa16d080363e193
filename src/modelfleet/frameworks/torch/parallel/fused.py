"""Rows of a fused lane's batches, divided over the ranks of a process group."""

from collections.abc import Hashable

import torch
from torch import Tensor

from modelfleet.errors import StrategyError
from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Pace
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.fused.programs import Programs
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.fused.steps_protocol import Tensors
from modelfleet.frameworks.torch.fused.variants import Variants
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsBySlice
from modelfleet.frameworks.torch.parallel import row_sums
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup
from modelfleet.frameworks.torch.parallel.row_independence import divide_by_rows
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tree

Lead = tuple[State, Tensors]
"""Stacked state, and the tensors that all members share."""
OwnRows = tuple[Tree, Tensor | None, Tensors]
"""Some rows of a batch, their weights, and their place in the batch, as `Steps.row_gradients` takes them."""


class RowDivision:
    """Train steps of which each rank of the `group` computes its own rows."""

    def __init__(self, first: str, programs: Programs[Steps], variants: Variants, device: torch.device) -> None:
        """Prepare for batches of a lane. `first` is the name of its first member."""
        self.group: ProcessGroup | None = None
        self._first = first
        self._programs = programs
        self._variants = variants
        self._device = device
        self._draws: dict[Hashable, DrawShapes] = {}  # by the form of a batch: what its rows draw
        self._rows_at: dict[tuple[int, int, int], Tensors] = {}  # by start, end and rows of a batch

    def reason_against(self, lead: Lead, batch: Batch) -> str | None:
        """Return why batches like this one can't be divided, and what to do; or None, and set `steps.draws`.

        Raises:
            CannotFuseError: Members that differ in numbers draw differently.
        """
        rows, steps = batch.member(0), self._programs.steps
        # A single row does not show what each row draws, so its form is its own.
        form = len(leaves(rows)[0]) == 1, *(leaf.shape[1:] for leaf in leaves(rows))
        if form not in self._draws:
            inputs = batch_parts.weighted_inputs(rows)
            for own, _ in self._variants.trials:
                found = divide_by_rows(own, *lead, rows, inputs)
                if isinstance(found, str):
                    return found
                if self._draws.setdefault(form, found) != found:
                    del self._draws[form]
                    raise CannotFuseError("a dropout rate of 0 draws no random numbers, and others do")
        steps.draws = self._draws[form]
        return None

    def ready(self, lead: Lead, batch: Batch) -> None:
        """Trace what this rank computes of a batch. A rank without rows traces one, so that all find the same.

        Raises:
            StrategyError: The rows of such batches can't be divided.
        """
        self._refuse_indivisible(lead, batch)
        part = self._own_rows(batch) or self._rows_between(0, 1, batch)
        self._programs.program("row_gradients", (*self._with_numbers(lead, part, batch), *part), batch.shared)

    def step(
        self, lead: Lead, coefficients: CoefficientsBySlice, active: Tensor, batch: Batch, pace: Pace
    ) -> Tensor:
        """Take one train step of which this rank computes its own rows. Return the losses `(member,)` of all rows.

        Raises:
            StrategyError: The rows of the batch can't be divided.
        """
        assert self.group is not None
        self._refuse_indivisible(lead, batch)
        part = self._own_rows(batch)
        if part is None:
            numbers, columns = row_sums.zeros(lead[0])
        else:
            own = self._with_numbers(lead, part, batch)
            numbers, columns = self._programs.row_gradients(own, part, shared_data=batch.shared, pace=pace)
        self.group.sum([numbers, columns])
        return self._programs.apply("row_apply", lead, (coefficients, active, numbers, columns))

    def _with_numbers(self, lead: Lead, part: OwnRows, batch: Batch) -> Lead:
        state, shared = lead
        return self._variants.given("row_gradients", state, *part[:2], shared=batch.shared), shared

    def _refuse_indivisible(self, lead: Lead, batch: Batch) -> None:
        reason = self.reason_against(lead, batch)
        if reason is not None:
            raise StrategyError(f"member {self._first!r} can't be spread over several devices: {reason}.")

    def _own_rows(self, batch: Batch) -> OwnRows | None:
        """Return this rank's rows of a batch, or None if it has no rows."""
        assert self.group is not None
        start, end = self.group.rows(batch.size)
        return None if start == end else self._rows_between(start, end, batch)

    def _rows_between(self, start: int, end: int, batch: Batch) -> OwnRows:
        """Return the rows of a batch from a start to an end."""
        rows_at = start, end, batch.size
        if rows_at not in self._rows_at:
            self._rows_at[rows_at] = {
                "start": torch.tensor(start, device=self._device),
                "count": torch.tensor(batch.size, device=self._device),
                "fraction": torch.tensor((end - start) / batch.size, dtype=torch.float32, device=self._device),
            }
        axis = 0 if batch.shared else 1
        own = map_tree(lambda leaf: leaf.narrow(axis, start, end - start).contiguous(), batch.data)
        weights = None if batch.weights is None else batch.weights[:, start:end].contiguous()
        return own, weights, self._rows_at[rows_at]
